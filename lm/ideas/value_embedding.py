"""Value embeddings: v <- v + 3 sigmoid(x[:12] W)_g E[token]_g (nanochat, 2026).

Every second layer has them, counted back from the last, each with an E and a gate W (12, G) of its
own. E has one row of values for each token. It starts with the standard deviation 1 / sqrt(D), as
in nanochat (muP: that of the base width), and W starts at 0.
"""

import math

import jax

from lm.config import width_factor
from lm.declarations import Parameter, small_weight
from lm.layers.linear import einsum

GATE_INPUTS = 12  # the first features of x


def layers(c):
    return tuple(layer for layer in range(c.n_layers) if (c.n_layers - 1 - layer) % 2 == 0)


def table(c):
    shape = (c.vocab_size, c.n_kv_heads, c.d_head)
    n = min(GATE_INPUTS, c.d_model)
    std = 1 / math.sqrt(c.d_model / width_factor(c))
    return {
        "value_embedding_VGK": Parameter(shape, "VGK", "embedding", init="normal", std=std),
        "w_value_gate_CG": small_weight((n, c.n_kv_heads), "CG", "C"),
    }


def apply(here, v_BTGK):
    first_BTC = here.x_BTD[..., :GATE_INPUTS]
    gate_BTG = 3 * jax.nn.sigmoid(einsum("BTC,CG->BTG", first_BTC, here.p["w_value_gate_CG"]))
    e_BTGK = here.p["value_embedding_VGK"][here.tokens_BT].astype(v_BTGK.dtype)
    return v_BTGK + gate_BTG[..., None] * e_BTGK
