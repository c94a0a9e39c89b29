"""Does SwiGLU still reach a lower loss than SiLU if the weight decay is tuned for each of them too?

    python -m lm.sweep --config configs/sweeps/swiglu_tuned.py --budget quick
    python -m lm.sweep --config configs/sweeps/swiglu_tuned.py --budget full --dry-run --measure

configs/sweeps/swiglu_vs_silu.py tunes the learning rate alone, without weight decay. Here every
variant is tuned over two lists in turn: the rate at the middle decay, then the decay, 8 points with
2 seeds each.
"""

from lm.sweeps import Sweep, match_params


def get_sweep():
    return Sweep(
        question=(
            "Does SwiGLU beat SiLU when the learning rate and the weight decay are tuned for each?"
        ),
        base="configs/shakespeare_small.py",
        variants={
            "SiLU": {"model.ffn": "mlp"},
            "SwiGLU": {"model.ffn": "glu", "model.d_ff": match_params("SiLU")},
        },
        baseline="SiLU",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(("SwiGLU", "SiLU"),),
        tune={
            "optimizer.learning_rate": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
            "optimizer.weight_decay": (0.03, 0.1, 0.3),
        },
    )
