"""How should a small character model know where a token stands?

    python -m lm.sweep --config configs/sweeps/positions.py --budget quick
    python -m lm.report sweeps/positions-quick

Without any, causal attention can still tell positions apart (Haviv et al. 2022, arXiv:2203.16634); here at 4 layers.
"""

from lm.sweeps import Budget, Sweep, each


def get_sweep():
    return Sweep(
        question="Does RoPE reach a lower loss than sinusoidal, learned or no positions?",
        base="configs/shakespeare_small.py",
        variants=each("model.positions", "rope", "sinusoidal", "learned", "none"),
        baseline="rope",
        comparisons=(("sinusoidal", "rope"), ("learned", "rope"), ("none", "rope")),
        learning_rates=(4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
        budgets={
            "quick": Budget(
                tuning_seeds=1,
                seeds=2,
                values={"train.steps": 60, "eval.every": 20},
                learning_rates=(4e-3, 8e-3, 1.6e-2),
            ),
            "full": Budget(tuning_seeds=2, seeds=5),
        },
    )
