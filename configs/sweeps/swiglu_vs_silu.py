"""Does a gated feed-forward layer reach a lower loss than a plain one with as many parameters?

    python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget quick
    python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget full

GLU has a sigmoid gate (Dauphin et al. 2017, arXiv:1612.08083). Shazeer 2020 (arXiv:2002.05202)
finds that gates help, for an encoder-decoder 1,000 times this size.

Result (docs/results/swiglu_vs_silu.md): SwiGLU ends 0.048 nats per token lower than SiLU, GeGLU
0.018 lower than GELU, and GLU 0.050 higher than SwiGLU; ReLU, GELU and ReLU^2 end 0.030 to 0.035
lower than SiLU.
"""

from lm.sweeps import Sweep, match_params


def get_sweep():
    return Sweep(
        question=(
            "With as many parameters, does SwiGLU reach a lower loss than a plain SiLU "
            "feed-forward layer?"
        ),
        base="configs/shakespeare_small.py",
        variants={
            "SiLU": {"model.ffn": "mlp"},
            "ReLU": {"model.ffn": "mlp", "model.activation": "relu"},
            "GELU": {"model.ffn": "mlp", "model.activation": "gelu"},
            "ReLU^2": {"model.ffn": "mlp", "model.activation": "relu_squared"},
            "SwiGLU": {"model.ffn": "glu", "model.d_ff": match_params("SiLU")},
            "GLU": {
                "model.ffn": "glu",
                "model.activation": "sigmoid",
                "model.d_ff": match_params("SiLU"),
            },
            "GeGLU": {
                "model.ffn": "glu",
                "model.activation": "gelu",
                "model.d_ff": match_params("SiLU"),
            },
        },
        baseline="SiLU",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(
            ("SwiGLU", "SiLU"),
            ("GeGLU", "GELU"),
            ("GLU", "SwiGLU"),
            ("GELU", "SiLU"),
            ("ReLU", "SiLU"),
            ("ReLU^2", "SiLU"),
        ),
        learning_rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    )
