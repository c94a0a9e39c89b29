"""How much training compute does a gated feed-forward layer save, and does that change with the
size?

    python -m lm.sweep --config configs/sweeps/scale_swiglu.py --budget quick
    python -m lm.sweep --config configs/sweeps/scale_swiglu.py --budget full --dry-run

Four sizes with 5 training tokens per parameter. Both variants of a size have equally many
parameters. The best learning rate falls as 1 / d_model (docs/results/mup.md), so each grid is that
of width 64 times 64 / d_model; the largest size, which takes most of the time, has the three middle
rates.

Result (docs/results/scale_swiglu.md): SwiGLU saves 28 % of SiLU's training compute (95 % CI 24 to
31), mean of the sizes; that the saving grows with the size is not shown. The page's runs are of the
earlier method: 5 seeds at the best rate of the grid and at its neighbors.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep, match_params

# By width: steps for 5 tokens per parameter, and warm-up and steps between evaluations in
# proportion.
LENGTHS = {32: (141, 7, 18), 48: (309, 15, 39), 64: (542, 27, 68), 96: (1203, 60, 150)}
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
    sizes["96"][LEARNING_RATE] = sizes["96"][LEARNING_RATE][1:4]
    return Sweep(
        question="With as many parameters, how much training compute does SwiGLU save against a plain SiLU "
        "feed-forward layer, from 58,000 to 490,000 parameters?",
        base="configs/shakespeare_small.py",
        variants={
            "SwiGLU": {"model.ffn": "glu"},
            "SiLU": {"model.ffn": "mlp", "model.d_ff": match_params("SwiGLU")},
        },
        sizes=sizes,
        baseline="SiLU",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(("SwiGLU", "SiLU"),),
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
