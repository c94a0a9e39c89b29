"""Does the placebo differ from the base of changes_2026 on Python's documentation? 30 fresh pairs
at one rate.

    python -m lm.sweep --config configs/studies/placebo_docs.py --budget full
    python -m benchmarks.placebo --add sweeps/placebo_docs-full --name placebo_docs

In the third cell of changes_2026 the placebo is 0.0177 nats lower than the base (p = 0.007). Size,
text and the base's rate are those of that cell; the seeds are others.
Cost: about 14 minutes of two cores of a Xeon, with other programs beside it.
Result: no: -0.0042 (95 % interval -0.0127 to 0.0043, p = 0.32; docs/results/placebo.md).
"""

from lm.sweeps import Budget, Sweep


def get_sweep():
    return Sweep(
        question=(
            "Does a placebo (another pairing of RoPE's features) differ from the base of "
            "changes_2026?"
        ),
        base="configs/studies/changes_2026/base.py",
        values={
            "model.d_model": 32,
            "model.d_ff": 96,
            "model.n_heads": 2,
            "data.source": "python_docs",
            "data.tokenizer": "bpe:2048",
        },
        variants={"base": {}, "relabeled": {"model.rope_pairing": "adjacent"}},
        baseline="base",
        comparisons=(("relabeled", "base"),),
        learning_rates=(0.0578,),
        budgets={"full": Budget(tuning_seeds=1, seeds=30)},
    )
