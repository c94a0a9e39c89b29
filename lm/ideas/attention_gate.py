"""A gate on the output of the heads: o <- o sigmoid(x W) (Qiu et al. 2025, arXiv:2505.06708).

head      one gate for each head, W (D, H)
element   one gate for each feature, W (D, H, K)

With head_identity and element_identity it is o <- 2 o sigmoid(x W) from W = 0: at step 0 the model
is the one without the gate.
"""

import jax

from lm.declarations import Parameter, weight
from lm.layers.linear import einsum


def table(c):
    axes = "DH"
    shape = (c.d_model, c.n_heads)
    if c.attn_gate.startswith("element"):
        axes = "DHK"
        shape = (c.d_model, c.n_heads, c.d_head)
    if c.attn_gate.endswith("_identity"):  # from 0, whatever config.model.init is
        return {f"w_gate_{axes}": Parameter(shape, axes, "weight", "D")}
    return {f"w_gate_{axes}": weight(c, shape, axes)}


def same_at_start(c):
    return c.attn_gate.endswith("_identity")


def apply(here, o_BTHK, v_BTGK):
    if here.c.attn_gate.startswith("element"):
        gate_BTHK = jax.nn.sigmoid(einsum("BTD,DHK->BTHK", here.x_BTD, here.p["w_gate_DHK"]))
    else:
        gate_BTH = jax.nn.sigmoid(einsum("BTD,DH->BTH", here.x_BTD, here.p["w_gate_DH"]))
        gate_BTHK = gate_BTH[..., None]
    factor = 2 if here.c.attn_gate.endswith("_identity") else 1
    return factor * o_BTHK * gate_BTHK
