"""Does the best learning rate stay where it is as the model widens, with muP and without?

    python -m lm.sweep --config configs/sweeps/mup.py --budget quick
    python -m lm.report sweeps/mup-quick

Yang et al. 2022 (arXiv:2203.03466): under muP it does; under the standard parametrization it falls with the width. The
coordinate check (activations keep their scale over the width) is a test: tests/test_mup.py.
"""

from lm.sweeps import Budget, Sweep, each, product

WIDTHS = (32, 64, 128, 256)


def get_sweep():
    variants = product(
        {"muP": {"model.parametrization": "mup"}, "standard": {"model.parametrization": "standard"}},
        {name: changes | {"model.mup_base_d_model": 32} for name, changes in each("model.d_model", *WIDTHS).items()},
    )
    # At the width where they are the same there is nothing to compare.
    variants = {name: changes for name, changes in variants.items() if name != "muP, 32"}
    return Sweep(
        question="At 8 times the base's width, does muP reach a lower loss than the standard parametrization?",
        base="configs/shakespeare_small.py",
        values={"model.mup_base_d_head": 8},
        variants=variants,
        baseline="standard, 32",
        comparisons=tuple((f"muP, {width}", f"standard, {width}") for width in reversed(WIDTHS[1:])),
        learning_rates=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
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
