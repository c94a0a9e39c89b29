"""Does it matter whether a norm subtracts the mean, or has a bias?

    python -m lm.sweep --config configs/sweeps/norms.py --budget quick
    python -m lm.sweep --config configs/sweeps/norms.py --budget full

Zhang and Sennrich 2019 (arXiv:1910.07467) find that RMSNorm does as well as LayerNorm and costs
less.

Result (docs/results/norms.md): undecided; LayerNorm ends 0.007 nats per token lower than RMSNorm
(95 % CI -0.002 to +0.017), and 0.006 lower than without a bias (-0.003 to +0.016). The 80 runs took
29 minutes of one CPU core.
"""

from lm.sweeps import Sweep


def get_sweep():
    return Sweep(
        question="Does LayerNorm reach a lower loss than RMSNorm, and does its bias help?",
        base="configs/shakespeare_small.py",
        variants={
            "RMSNorm": {"model.norm": "rms"},
            "LayerNorm": {"model.norm": "layer"},
            "LayerNorm without bias": {"model.norm": "layer", "model.norm_bias": False},
        },
        baseline="RMSNorm",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(("LayerNorm", "RMSNorm"), ("LayerNorm", "LayerNorm without bias")),
        learning_rates=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    )
