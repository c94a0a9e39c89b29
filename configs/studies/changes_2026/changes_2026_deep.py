"""Do the changes that act across layers lower the loss of a deep and narrow model?

    python -m lm.sweep --config configs/studies/changes_2026/changes_2026_deep.py --budget full

Twelve layers of width 32, 0.12 M parameters besides embeddings, on Tiny Shakespeare: one more cell
of changes_2026.py, for the rows that need depth, with the same rules. It is secondary there.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep, match_params

CHANGES = {
    "value residual": {"model.value_residual": "learned"},
    "residual scalars": {"model.residual_scalars": True},
    "depth attention": {"model.residual": "depth_attention"},
    "DyT": {"model.norm": "dyt"},
    "no RoPE in every fourth layer": {"model.rope_pattern": (1, 1, 1, 0)},
    "peri-norm": {"model.norm_placement": "sandwich"},
}


def get_sweep():
    variants = {"base": {}} | {
        name: values | {"model.d_ff": match_params("base")} for name, values in CHANGES.items()
    }
    variants["hyper-connections"] = {"model.residual": "hyper_connections"}
    variants["wide for hyper-connections"] = {"model.d_ff": match_params("hyper-connections")}
    return Sweep(
        question="Do the changes that act across layers lower the loss of a deep and narrow model?",
        base="configs/studies/changes_2026/base.py",
        values={"model.n_layers": 12, "model.d_model": 32, "model.d_ff": 64, "model.n_heads": 2},
        variants=variants,
        baseline="base",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(
            *((name, "base") for name in CHANGES),
            ("hyper-connections", "wide for hyper-connections"),
        ),
        tune={LEARNING_RATE: (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)},
        budgets={"full": Budget(tuning_seeds=2, seeds=10)},
    )
