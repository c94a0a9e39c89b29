"""Exclusive attention: o <- o - a (o . v / |v|^2) v (Zhai 2026, arXiv:2603.09078).

v is the token's own value. Attention then adds only what the token itself does not have. Heads of a
group share its value.

full     a = 1, as in the paper
learned  a = tanh(a_h), one a_h per head, from 0: at step 0 the model is the one without it
"""

import jax.numpy as jnp

from lm.declarations import small_weight

EPS = 1e-12  # a value of 0 has no direction


def table(c):
    if c.attn_exclusive != "learned":
        return {}
    return {"exclusive_H": small_weight((c.n_heads,), "H")}


def same_at_start(c):
    return c.attn_exclusive == "learned"


def apply(here, o_BTHK, v_BTGK):
    n_shared = o_BTHK.shape[-2] // v_BTGK.shape[-2]
    # float32: o and a v almost cancel where o is along v
    v_BTHK = jnp.repeat(v_BTGK, n_shared, axis=-2).astype(jnp.float32)
    product_BTH1 = jnp.sum(o_BTHK * v_BTHK, axis=-1, keepdims=True)
    square_BTH1 = jnp.sum(v_BTHK * v_BTHK, axis=-1, keepdims=True)
    along_BTH1 = product_BTH1 / jnp.maximum(square_BTH1, EPS)
    if here.c.attn_exclusive == "learned":
        along_BTH1 *= jnp.tanh(here.p["exclusive_H"].astype(jnp.float32))[:, None]
    return (o_BTHK - along_BTH1 * v_BTHK).astype(o_BTHK.dtype)
