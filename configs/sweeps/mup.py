"""Does the best learning rate stay the same as the model widens, with muP and without?

    python -m lm.sweep --config configs/sweeps/mup.py --budget quick
    python -m lm.sweep --config configs/sweeps/mup.py --budget full
    python -m benchmarks.mup_coordinates                                 # the change of activations by width

Under muP it should stay, under the standard parametrization it should fall with the width (Yang et
al. 2022, arXiv:2203.03466). The feed-forward layer widens as well. At width 32, the base, both are
the same model.

Result (docs/results/mup.md): muP ends 0.048 nats per token higher than the standard parametrization
at width 128 and 0.031 higher at width 64, each at its own best learning rate. The page's runs are
of the earlier method: 5 seeds at the best rate of the grid and at its neighbors. They took 44
minutes on one CPU core.
"""

from lm.sweeps import Budget, Sweep, product

WIDTHS = (32, 64, 128)


def get_sweep():
    widths = {str(width): {"model.d_model": width, "model.d_ff": 3 * width} for width in WIDTHS}
    variants = product(
        {
            "muP": {"model.parametrization": "mup"},
            "standard": {"model.parametrization": "standard"},
        },
        widths,
    )
    # At width 32 both are the same model.
    variants = {name: changes for name, changes in variants.items() if name != "muP, 32"}
    return Sweep(
        question="At 4 times the width, each at its own best learning rate, does muP reach a lower loss than the "
        "standard parametrization, and what is the best rate at each width?",
        base="configs/shakespeare_small.py",
        values={"model.mup_base_d_model": WIDTHS[0], "model.mup_base_d_head": 8},
        variants=variants,
        baseline="standard, 32",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=tuple(
            (f"muP, {width}", f"standard, {width}") for width in reversed(WIDTHS[1:])
        ),
        learning_rates=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
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
            "full": Budget(
                tuning_seeds=2, seeds=10, values={"train.steps": 200, "train.batch_size": 16}
            ),
        },
    )
