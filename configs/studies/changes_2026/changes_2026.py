"""Which of the changes that 2026 argues about lower the loss of a small language model?

    python -m lm.sweep --config configs/studies/changes_2026/changes_2026.py --budget full

A draft: nothing was run. It becomes the design when changes_2026_base.py has run, before the first run of its own. The
seeds follow from the name of this file.

Each change is compared with a base that is tuned over 48 configurations per text, at its own best learning rate, with
ten fresh paired seeds. Update rules are tuned over rate and weight decay, and so is the AdamW that they are compared
with. Parameters are matched through d_ff. The claims are the means over the cells, each a size on a text; Holm's
correction is for all of them. DyT is a negative control, and a placebo is in every cell.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep, match_params

DECAY, DECAYS = "optimizer.weight_decay", (0.03, 0.1, 0.3)
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
# Changes with so many parameters that the base is widened to match them instead.
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
    variants = {"base": {}} | {name: values | {"model.d_ff": match_params("base")} for name, values in CHANGES.items()}
    variants |= LARGE | {f"wide for {name}": {"model.d_ff": match_params(name)} for name in LARGE}
    variants["AdamW"] = {DECAY: DECAYS}
    variants |= {name: values | {DECAY: DECAYS} for name, values in UPDATES.items()}
    return Sweep(
        question="Which of the changes that 2026 argues about lower the loss of a small language model?",
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
