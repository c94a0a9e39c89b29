r"""Can LayerNorm be computed in one pass? Swapped in a trained model, after fine-tuning, and from scratch.

    for seed in 0 1 2 3 4; do
        python -m lm.train --config configs/shakespeare_small.py --config.model.norm=layer \
            --config.train.seed=$seed --workdir runs/layernorm-$seed
    done
    python -m lm.sweep --config configs/sweeps/layernorm_algorithms.py --budget quick
    python -m lm.report sweeps/layernorm_algorithms-quick
    python -m benchmarks.layernorm_swap runs/layernorm-*        # logits' deviation, error per layer, speed of the layer

The first to ask took BERT on CoLA; here a trained language model is the subject: the question is about the layer, and
there are no weights to fetch. They found a 13-fold slowdown (132 to 136 tokens/s in place of 1,695 to 2,081) and a
model that no longer learned, from a formula that normalized the wrong axis in a loop over columns.

What is compared are the formulas (lm/layers/norms.py): the statistics follow the recurrence of one pass, computed for
all rows at once; the normalization then reads the row again, as it must, and all but running_mean share a derivative.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep

ALGORITHMS = ("two_pass", "welford", "chan", "running_mean")
TRAINED = {"init_from": "runs/layernorm-{seed}"}
WAYS = {
    "swap": TRAINED | {"train.steps": 0, LEARNING_RATE: 8e-3},
    "tune": TRAINED | {"train.steps": 100, "optimizer.warmup_steps": 10, LEARNING_RATE: 2e-3},
    "scratch": {},
}


def get_sweep():
    return Sweep(
        question="Does LayerNorm by the formulas of one pass reach the same loss as by two passes?",
        base="configs/shakespeare_small.py",
        values={"model.norm": "layer"},
        variants={
            f"{way}: {a}": {"model.norm_algorithm": a} | changes for way, changes in WAYS.items() for a in ALGORITHMS
        },
        baseline="scratch: two_pass",
        comparisons=tuple((f"{way}: {a}", f"{way}: two_pass") for way in reversed(WAYS) for a in ALGORITHMS[1:]),
        learning_rates=(4e-3, 8e-3, 1.6e-2),
        budgets={
            "quick": Budget(
                tuning_seeds=1, seeds=2, values={"train.steps": 60, "eval.every": 20}, learning_rates=(8e-3,)
            ),
            "full": Budget(tuning_seeds=2, seeds=5),
        },
    )
