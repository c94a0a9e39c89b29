"""How much training compute does pre-norm save against post-norm, and does that change with the
size?

    python -m lm.sweep --config configs/sweeps/scale_prenorm.py --budget quick
    python -m lm.sweep --config configs/sweeps/scale_prenorm.py --budget full --dry-run

The sizes, lengths and learning rates are those of configs/sweeps/scale_swiglu.py without its
largest size, which would take more than half of the time. The page's runs of the three took 57
minutes on one CPU core, with five seeds.

Result (docs/results/scale_prenorm.md): pre-norm needs 19 % more training compute than post-norm (95
% CI 10 to 29), mean of the sizes. The page's runs are of the earlier method: 5 seeds at the best
rate of the grid and at its neighbors.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep

# By width: steps for 5 tokens per parameter, and warm-up and steps between evaluations in
# proportion.
LENGTHS = {32: (141, 7, 18), 48: (309, 15, 39), 64: (542, 27, 68)}
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)  # at width 64


def get_sweep():
    sizes = {
        str(d): {
            "model.d_model": d,
            "model.d_ff": 3 * d,
            "train.steps": steps,
            "optimizer.warmup_steps": warmup,
            "eval.every": every,
            LEARNING_RATE: tuple(rate * 64 / d for rate in RATES),
        }
        for d, (steps, warmup, every) in LENGTHS.items()
    }
    return Sweep(
        question=(
            "How much training compute does pre-norm save against post-norm, from 58,000 to "
            "220,000 parameters?"
        ),
        base="configs/shakespeare_small.py",
        variants={
            "pre-norm": {"model.norm_placement": "pre"},
            "post-norm": {"model.norm_placement": "post"},
        },
        sizes=sizes,
        baseline="post-norm",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(("pre-norm", "post-norm"),),
        learning_rates=RATES,
        budgets={
            "quick": Budget(
                tuning_seeds=1,
                seeds=2,
                values={
                    "train.steps": 20,
                    "optimizer.warmup_steps": 2,
                    "eval.every": 10,
                    "eval.max_batches": 2,
                },
            ),
            "full": Budget(tuning_seeds=2, seeds=10),
        },
    )
