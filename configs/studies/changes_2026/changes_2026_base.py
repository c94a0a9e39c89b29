"""At which learning rate, weight decay and warm-up does the base of the study train best?

    python -m lm.sweep --config configs/studies/changes_2026/changes_2026_base.py --budget full

48 configurations on each text, so that no change of the study wins because the base was not tuned.
Result: docs/results/changes_2026/base_grid.csv has the validation losses of the 96 tuning runs. The
sweep was stopped after them, without extending its lists and without final runs: each change is
tuned over the rate again.
"""

from lm.sweeps import Budget, Sweep


def get_sweep():
    return Sweep(
        question=(
            "At which learning rate, weight decay and warm-up does the base of the study "
            "train best?"
        ),
        base="configs/studies/changes_2026/base.py",
        variants={"base": {}},
        texts={
            "Python docs": {"data.source": "python_docs", "data.tokenizer": "bpe:2048"},
            "Tiny Shakespeare": {},
        },
        baseline="base",
        comparisons=(),
        tune={
            "optimizer.learning_rate": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
            "optimizer.weight_decay": (0.03, 0.1, 0.3, 1.0),
            "optimizer.warmup_steps": (12, 48, 144),
        },
        budgets={"full": Budget(tuning_seeds=1, seeds=5)},
    )
