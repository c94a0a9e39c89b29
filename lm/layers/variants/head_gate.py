"""A gate for each head: o_h <- o_h sigmoid(x W)_h before the output projection (Qiu et al. 2025, arXiv:2505.06708).

head           W as any weight: the gates start around 1/2
head_identity  o_h <- 2 o_h sigmoid(x W)_h with W = 0: at step 0 the model is the one without the gate
"""

import jax

from lm.declarations import Parameter, weight
from lm.layers.linear import project


def table(c):
    shape = c.d_model, c.n_heads
    if c.attn_gate == "head_identity":
        return {"w_gate_DH": Parameter(shape, "DH", "weight", "D")}
    return {"w_gate_DH": weight(c, shape, "DH")}


def apply(here, stream, o_BTHK, v_BTGK):
    gate_BTH = jax.nn.sigmoid(project(here.x_BTD, here.p["w_gate_DH"]))
    factor = {"head": 1, "head_identity": 2}[here.c.attn_gate]
    return stream, factor * o_BTHK * gate_BTH[..., None]
