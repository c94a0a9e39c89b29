"""A part of configs/sweeps/swiglu_vs_silu.py, to measure where the time of a sweep goes: 18 runs at most, of 400 steps.

python3 -m lm.sweep --config benchmarks/sweep_part.py --budget quick
"""

from lm.sweeps import Budget, Sweep, match_params


def get_sweep():
    return Sweep(
        question="With as many parameters, does SwiGLU reach a lower loss than a plain SiLU feed-forward layer?",
        base="configs/shakespeare_small.py",
        variants={
            "SiLU": {"model.ffn": "mlp"},
            "SwiGLU": {"model.ffn": "glu", "model.d_ff": match_params("SiLU")},
        },
        baseline="SiLU",
        comparisons=(("SwiGLU", "SiLU"),),
        learning_rates=(4e-3, 8e-3, 1.6e-2),
        budgets={"quick": Budget(tuning_seeds=1, seeds=2)},
    )
