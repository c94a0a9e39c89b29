"""Which of the changes that 2026 argues about lower the loss of a small language model?

    python -m lm.sweep --config configs/studies/changes_2026/changes_2026.py --budget full

The design, fixed before the first run: commit dc28597 of 2026-11-26, 08:13:01 UTC; the first run
started at 08:15:05. The times are those of git and of sweep.json; nobody else has recorded them. The
seeds follow from the name of this file.

* Base: RMSNorm, SwiGLU, RoPE, QK-norm and AdamW (base.py). Its weight decay and warm-up come from
  48 combinations of rate, decay and warm-up on each text (changes_2026_base.py): any change may win
  against a base that is not tuned.
* Each change is tuned over 5 learning rates with 2 seeds, and trained with 10 fresh paired seeds at
  the vertex. Update rules are tuned over rate and weight decay, and so is the AdamW that they are
  compared with.
* Parameters are matched through d_ff, to the base's. Value embeddings and hyper-connections have so
  many that d_ff would shrink to a half or less; a wider base is matched to them instead. DyT is a
  negative control.
* Cells: two sizes (parameters besides embeddings) on two texts, in the order of this file; a stop
  after any cell leaves a complete, smaller table. Whether to stop does not depend on the results.
* Primary claims: the 29 means over the finished cells, with Holm's correction, judged against 0.005
  nats. "In general" needs one sign in all cells, and a prediction interval without 0. Single cells,
  tau, the recall probe, a deep and narrow cell, and training 3 times longer are secondary. A change
  with a diverged run is called unstable.
* If the placebo is significant at 0.01 in the mean, or at 0.05 in two cells, no change is published
  until that is explained. Nothing is added to this file after the first run; `lm.sweep --study
  changes_2026 --add` adds rows that are marked as not preregistered.

Added after the first start, and before the first final run, which started after 11:55:56; until then
there were 380 tuning runs. At 08:20 (commit fbaf340):

* A claim is refuted by a sweep of this design with other seeds (a copy of this file under another
  name) whose interval does not overlap its own, and "in general" by any size or text with a
  significant difference of the other sign.

At 09:42 (commit fdb768a), when ten verdicts of others were also removed and one was turned, most of
them because they compare with Muon, and pairs that a source calls equal left the rank agreement:

* The four cells are two texts at two sizes. The prediction interval treats them as drawn alike; it
  does not cover another kind of text. The test split of Python's documentation has 21,359 tokens,
  whose luck more seeds do not reduce.
* Decay and warm-up were chosen for the base at 0.11 M with one seed, and are the same for all
  changes but update rules.
* On Python's documentation, embeddings are more than half of all parameters. Parameters that are
  matched there change the FLOPs: of the tied head 1.4 times those of the base, of the wide base 1.8
  times those of value embeddings.
* Training 3 times longer has no file yet: it is for the six changes with the lowest differences.

A third sweep, changes_2026_10m, with three claims at ten million parameters, was declared on
2026-11-27 at 07:38 (commit d1606a8) and deleted at 08:17 (commit c3b1bb6). No run of it is in this
repository.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep, match_params

DECAY = "optimizer.weight_decay"
DECAYS = (0.03, 0.1, 0.3)
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)

CHANGES = {
    "head gate": {"model.attn_gate": "head_identity"},
    "element gate": {"model.attn_gate": "element_identity"},
    "exclusive attention": {"model.attn_exclusive": "learned"},
    "attention sink": {"model.attn_sink": True},
    "differential attention": {"model.attn_differential": True},
    "value residual": {"model.value_residual": "learned"},
    "residual scalars": {"model.residual_scalars": True},
    "depth attention": {"model.residual": "depth_attention"},
    "DyT": {"model.norm": "dyt"},
    "half of RoPE": {"model.rope_width": 8},
    "no RoPE in layer 4": {"model.rope_pattern": (1, 1, 1, 0)},
    "peri-norm": {"model.norm_placement": "sandwich"},
    "short convolution": {"model.conv_keys": True, "model.conv_values": True},
    "token shift": {"model.token_shift": True},
    "multi-token prediction": {"model.multi_token_prediction": True},
    "ReLU^2": {"model.ffn": "mlp", "model.activation": "relu_squared"},
    "sigmoid GLU": {"model.activation": "sigmoid"},
    "softcap": {"model.logit_softcap": 15.0},
    "z-loss": {"train.z_loss": 1e-4},
    "tied head": {"model.tie_embeddings": True, "model.embed_std": 0.1},
    "tail EMA": {"train.ema": 0.98},
}
LARGE = {
    "value embeddings": {"model.value_embeddings": True},
    "hyper-connections": {"model.residual": "hyper_connections"},
}
UPDATES = {
    "Muon": {"optimizer.name": "muon"},
    "NorMuon": {"optimizer.name": "normuon"},
    "MuonH": {"optimizer.name": "muonh"},
    "SOAP": {"optimizer.name": "soap"},
    "cautious decay": {"optimizer.cautious_decay": True},
    "schedule-free": {"optimizer.name": "schedule_free", "optimizer.schedule": "constant"},
}


def get_sweep():
    variants = {"base": {}} | {
        name: values | {"model.d_ff": match_params("base")} for name, values in CHANGES.items()
    }
    variants |= LARGE | {f"wide for {name}": {"model.d_ff": match_params(name)} for name in LARGE}
    variants["AdamW"] = {DECAY: DECAYS}
    variants |= {name: values | {DECAY: DECAYS} for name, values in UPDATES.items()}
    return Sweep(
        question=(
            "Which of the changes that 2026 argues about lower the loss of a small language model?"
        ),
        base="configs/studies/changes_2026/base.py",
        variants=variants,
        texts={
            "Tiny Shakespeare": {},
            "Python docs": {"data.source": "python_docs", "data.tokenizer": "bpe:2048"},
        },
        sizes={
            "0.05 M": {"model.d_model": 32, "model.d_ff": 96, "model.n_heads": 2},
            "0.11 M": {},
        },
        baseline="base",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(
            *((name, "base") for name in CHANGES),
            *((name, f"wide for {name}") for name in LARGE),
            *((name, "AdamW") for name in UPDATES),
        ),
        tune={LEARNING_RATE: RATES, DECAY: (0.1,)},
        budgets={
            "quick": Budget(tuning_seeds=1, seeds=2, values={"train.steps": 40, "eval.every": 20}),
            "full": Budget(tuning_seeds=2, seeds=10),
        },
    )
