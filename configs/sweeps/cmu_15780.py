"""Plain SGD or Adam for the Transformer of CMU's 15-780: the validation loss after each epoch.

    python -m lm.sweep --config configs/sweeps/cmu_15780.py --budget quick
    python -m lm.report sweeps/cmu_15780-quick

The course's own figures, for the complete works and words without spacing: 5.9 after one epoch of SGD, about 5.1 after
longer training. Here it is Tiny Shakespeare by words with the space before them, another text, so the two cannot be
compared; what counting its words alone reaches is in the report (6.167 was measured with another cut into words). One
epoch is 158.4 steps, and validations are 160 steps apart.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep

EPOCH = 160  # in steps, rounded: 70 % of the text are 792 windows of 256 words, and a step takes 5


def get_sweep():
    return Sweep(
        question="Does Adam reach a lower loss than plain SGD at 0.5?",
        base="configs/cmu_15780.py",
        values={"data.splits": (0.7, 0.15, 0.15), "eval.every": EPOCH},
        variants={
            "SGD 0.5": {"optimizer.name": "sgd", LEARNING_RATE: 0.5},
            "Adam 1e-3": {"optimizer.name": "adamw", LEARNING_RATE: 1e-3},
        },
        baseline="SGD 0.5",
        comparisons=(("Adam 1e-3", "SGD 0.5"),),
        learning_rates=(1e-3,),
        budgets={
            "quick": Budget(
                tuning_seeds=1, seeds=2, values={"train.steps": 20, "eval.every": 10, "eval.max_batches": 4}
            ),
            "full": Budget(tuning_seeds=1, seeds=5, values={"train.steps": 5 * EPOCH}),
        },
    )
