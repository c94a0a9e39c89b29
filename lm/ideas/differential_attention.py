"""Differential attention V2: o_h = a_2h - sigmoid(x W)_h a_2h+1 (Microsoft, 2026).

Ye, Dong, Sun and Wei, "Differential Transformer V2". Each h has two heads of queries, which share
keys and values. `query_heads` of lm/config/schema.py doubles the queries; the output projection is
that of H heads.
"""

import jax

from lm.declarations import weight
from lm.layers.linear import einsum


def table(c):
    return {"w_lambda_DH": weight(c, (c.d_model, c.n_heads), "DH")}


def apply(here, a_BTQK, v_BTGK):
    gate_BTH = jax.nn.sigmoid(einsum("BTD,DH->BTH", here.x_BTD, here.p["w_lambda_DH"]))
    return a_BTQK[..., 0::2, :] - gate_BTH[..., None] * a_BTQK[..., 1::2, :]
