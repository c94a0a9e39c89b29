"""Does the gain of SwiGLU over SiLU depend on the text?

    python -m lm.sweep --config configs/sweeps/swiglu_texts.py --budget quick
    python -m lm.sweep --config configs/sweeps/swiglu_texts.py --budget full

The base config was tuned on Tiny Shakespeare. The second text is the documentation in Python's
standard library ("python_docs"), on which nothing was tuned; both are read as characters. Each
variant tunes its learning rate on each text.

Result (docs/results/swiglu_texts.md): SwiGLU ends 0.050 nats per token lower than SiLU on Tiny
Shakespeare and 0.064 lower on Python's documentation; the mean over both is 0.057 (95 % CI 0.043 to
0.070). The page's runs are of the earlier method: 5 seeds at the best rate of the grid and at its
neighbors. They took 63 minutes on one CPU core.
"""

from lm.sweeps import Sweep, match_params


def get_sweep():
    return Sweep(
        question=(
            "Does SwiGLU reach a lower loss than SiLU on plays and on technical prose, and "
            "is the gain the same?"
        ),
        base="configs/shakespeare_small.py",
        variants={
            "SiLU": {"model.ffn": "mlp"},
            "SwiGLU": {"model.ffn": "glu", "model.d_ff": match_params("SiLU")},
        },
        texts={"Tiny Shakespeare": {}, "Python docs": {"data.source": "python_docs"}},
        baseline="SiLU",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(("SwiGLU", "SiLU"),),
        learning_rates=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    )
