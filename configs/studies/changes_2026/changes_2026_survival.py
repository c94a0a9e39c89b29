"""Do the winners of changes_2026 keep their lead when training is 3 and 10 times longer?

    python configs/studies/changes_2026/survival.py sweeps/survival

The design, fixed before the first run (the commit that adds this file):

* The second cell of changes_2026.py (0.11 M parameters besides embeddings, Tiny Shakespeare) at 480,
  1,440 and 4,800 steps, with a warm-up that is as long in proportion. All runs are new, also those of
  480 steps, with seeds of this file: a change that was chosen because it was best in the study has a
  lead there that is too large on average.
* The nine changes with lower loss by more than 0.005 in all four cells or in the mean, and three
  whose difference was not shown: head gate, value residual and softcap.
* Each change is tuned at each length over 3 learning rates with 2 seeds, and over 3 weight decays
  more if it is an update rule; a list whose best value is at its edge is extended. Runs are at the
  vertex of the curve with the usual shape (lm/sweeps/tuning.py), so that no change depends on another
  one. Then 8 fresh paired seeds.
* Primary claims, one per change: the lead at 4,800 steps minus that at 480 (Welch's t test, Holm's
  correction for as many changes as are finished), and the ratio of the two with its interval by
  Fieller. The leads at each length are secondary.
* The control of the architectures is the mean of the base and a placebo, that of value embeddings a
  base of as many parameters, and that of update rules AdamW, tuned as they are.
* Changes are trained in the order of survival.py, each at all lengths: base, placebo and the four
  architectures, then AdamW and the update rules, then the three without a shown difference. A stop
  after any change leaves a complete, smaller table. Whether to stop does not depend on the results.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep, match_params

DECAY = "optimizer.weight_decay"
DECAYS = (0.03, 0.1, 0.3)
MATCHED = {"model.d_ff": match_params("base")}

CHANGES = {
    "token shift": {"model.token_shift": True} | MATCHED,
    "peri-norm": {"model.norm_placement": "sandwich"} | MATCHED,
    "short convolution": {"model.conv_keys": True, "model.conv_values": True} | MATCHED,
    "value embeddings": {"model.value_embeddings": True},
    "head gate": {"model.attn_gate": "head_identity"} | MATCHED,
    "value residual": {"model.value_residual": "learned"} | MATCHED,
    "softcap": {"model.logit_softcap": 15.0} | MATCHED,
}
UPDATES = {
    "SOAP": {"optimizer.name": "soap"},
    "MuonH": {"optimizer.name": "muonh"},
    "Muon": {"optimizer.name": "muon"},
    "schedule-free": {"optimizer.name": "schedule_free", "optimizer.schedule": "constant"},
    "NorMuon": {"optimizer.name": "normuon"},
}
WIDE = "wide for value embeddings"
CONTROLS = {"value embeddings": WIDE} | dict.fromkeys(UPDATES, "AdamW")


def times(n: int, rates: tuple) -> dict:
    return {
        "train.steps": 480 * n,
        "optimizer.warmup_steps": 144 * n,
        "eval.every": 160 * n,
        "checkpoint.every": 480 * n,
        LEARNING_RATE: rates,
    }


def get_sweep():
    variants = {"base": {}} | CHANGES | {WIDE: {"model.d_ff": match_params("value embeddings")}}
    variants["AdamW"] = {DECAY: DECAYS}
    variants |= {name: values | {DECAY: DECAYS} for name, values in UPDATES.items()}
    return Sweep(
        question="Do the winners of changes_2026 keep their lead when training is longer?",
        base="configs/studies/changes_2026/base.py",
        variants=variants,
        lengths={
            "480 steps": times(1, (1.6e-2, 3.2e-2, 6.4e-2)),
            "1,440 steps": times(3, (1.6e-2, 3.2e-2, 6.4e-2)),
            "4,800 steps": times(10, (8e-3, 1.6e-2, 3.2e-2)),
        },
        baseline="base",
        comparisons=tuple((name, CONTROLS.get(name, "base")) for name in CHANGES | UPDATES),
        tune={LEARNING_RATE: (1.6e-2, 3.2e-2, 6.4e-2), DECAY: (0.1,)},
        budgets={"full": Budget(tuning_seeds=2, seeds=8, placebos=1)},
    )
