"""Which position encoding does a small character model need?

    python -m lm.sweep --config configs/sweeps/positions.py --budget quick
    python -m lm.sweep --config configs/sweeps/positions.py --budget full

Even without positions, causal attention can infer them (Haviv et al. 2022, arXiv:2203.16634).

Result (docs/results/positions.md): RoPE ends lower than sinusoidal (by 0.113 nats per token),
learned (0.150) and no positions (0.377). The 100 runs took 56 minutes of one busy CPU core.
"""

from lm.sweeps import Sweep, each


def get_sweep():
    return Sweep(
        question="Does RoPE reach a lower loss than sinusoidal, learned or no positions?",
        base="configs/shakespeare_small.py",
        variants=each("model.positions", "rope", "sinusoidal", "learned", "none"),
        baseline="rope",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(("sinusoidal", "rope"), ("learned", "rope"), ("none", "rope")),
        learning_rates=(4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    )
