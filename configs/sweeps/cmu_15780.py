"""Does Adam reach a lower loss than plain SGD on the Transformer of CMU's course 15-780?

    python -m lm.sweep --config configs/sweeps/cmu_15780.py --budget quick
    python -m lm.sweep --config configs/sweeps/cmu_15780.py --budget full

The runs of the page took 142 minutes on one CPU core.

The validation loss is evaluated every 160 steps. An epoch is 158.4 steps, so the first evaluation
is two steps into the second epoch. It uses half of the lecture's validation text; the other half is
the test text here. A loss after one epoch is uncertain by about 0.2. The course reports 5.9 after
one epoch of SGD and about 5.1 after longer training, on the complete works of Shakespeare, in words
without spaces. Here the text is Tiny Shakespeare, in words with the space before them, so these
losses cannot be compared; the report has the unigram baseline of this text. To compare on equal
words, see the header of configs/cmu_15780.py and "Words of your own" in docs/data.md.

Result (docs/results/cmu_15780.md): Adam at 1e-3 ends 0.113 nats per token higher than SGD at 0.5.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep

EPOCH = 160  # steps, rounded: 70 % of the text is 792 windows of 256 words, and a batch has 5


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
        placebo={"model.sinusoidal_order": "sine_first"},
        comparisons=(("Adam 1e-3", "SGD 0.5"),),
        learning_rates=(1e-3,),
        budgets={
            "quick": Budget(
                tuning_seeds=1,
                seeds=2,
                values={"train.steps": 20, "eval.every": 10, "eval.max_batches": 4},
            ),
            "full": Budget(tuning_seeds=1, seeds=5, values={"train.steps": 5 * EPOCH}),
        },
    )
