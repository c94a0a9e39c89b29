"""Does the best learning rate stay where it is as the model widens, with muP and without?

    python -m lm.sweep --config configs/sweeps/mup.py --budget quick
    python -m lm.report sweeps/mup-quick
    python -m benchmarks.mup_coordinates                       # how far a few steps move the activations, by width

Yang et al. 2022 (arXiv:2203.03466): under muP it does; under the standard parametrization it falls with the width. All
widths grow together, the feed-forward layer's too; at the base's, 32, both are the same model.
"""

from lm.sweeps import Budget, Sweep, product

WIDTHS = (32, 64, 128, 256)


def get_sweep():
    widths = {str(width): {"model.d_model": width, "model.d_ff": 3 * width} for width in WIDTHS}
    variants = product(
        {"muP": {"model.parametrization": "mup"}, "standard": {"model.parametrization": "standard"}}, widths
    )
    # At the width where they are the same there is nothing to compare.
    variants = {name: changes for name, changes in variants.items() if name != "muP, 32"}
    return Sweep(
        question="At 8 times the width, each at its own best learning rate, does muP reach a lower loss than the "
        "standard parametrization, and which rates are those on the way there?",
        base="configs/shakespeare_small.py",
        values={"model.mup_base_d_model": WIDTHS[0], "model.mup_base_d_head": 8},
        variants=variants,
        baseline="standard, 32",
        comparisons=tuple((f"muP, {width}", f"standard, {width}") for width in reversed(WIDTHS[1:])),
        learning_rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
        budgets={
            "quick": Budget(
                tuning_seeds=1,
                seeds=2,
                values={"train.steps": 20, "optimizer.warmup_steps": 2, "eval.every": 10, "eval.max_batches": 2},
                learning_rates=(8e-3,),
            ),
            "full": Budget(tuning_seeds=2, seeds=5, values={"train.steps": 200, "train.batch_size": 16}),
        },
    )
