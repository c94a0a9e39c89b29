"""Do the six changes with the lowest losses in changes_2026 keep their lead when training is 3
times longer?

    python -m lm.sweep --config configs/studies/changes_2026/changes_2026_longer.py --budget full

The smallest cell of changes_2026.py, for its cost (0.05 M parameters besides embeddings, Tiny
Shakespeare), with 1,440 steps instead of 480 and a warm-up that is as long in proportion. The rules
are the same, except that update rules keep the weight decay that was found there, and are compared
with the base, whose decay of 0.1 is near that of the tuned AdamW, 0.085. The six were chosen when
all four cells were finished. Each lead is read against that in the same cell. It is secondary.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep, match_params

DECAY = "optimizer.weight_decay"
UPDATES = {
    "SOAP": {"optimizer.name": "soap", DECAY: 0.0059},
    "Muon": {"optimizer.name": "muon", DECAY: 0.21},
    "MuonH": {"optimizer.name": "muonh", DECAY: 0.0076},
    "schedule-free": {
        "optimizer.name": "schedule_free",
        "optimizer.schedule": "constant",
        DECAY: 0.066,
    },
}


def get_sweep():
    variants = {
        "base": {},
        "token shift": {"model.token_shift": True, "model.d_ff": match_params("base")},
        "value embeddings": {"model.value_embeddings": True},
        "wide for value embeddings": {"model.d_ff": match_params("value embeddings")},
    }
    small = {"model.d_model": 32, "model.d_ff": 96, "model.n_heads": 2}
    longer = {
        "train.steps": 1440,
        "optimizer.warmup_steps": 432,
        "eval.every": 480,
        "checkpoint.every": 1440,
    }
    return Sweep(
        question="Do the six best changes of 2026 keep their lead when training is 3 times longer?",
        base="configs/studies/changes_2026/base.py",
        values=small | longer,
        variants=variants | UPDATES,
        baseline="base",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(
            ("token shift", "base"),
            ("value embeddings", "wide for value embeddings"),
            *((name, "base") for name in UPDATES),
        ),
        tune={LEARNING_RATE: (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)},
        budgets={"full": Budget(tuning_seeds=2, seeds=10)},
    )
