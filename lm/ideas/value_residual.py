"""Value residual: v_l <- (1 - a) v_l + a v_0, with the values v_0 of the first layer.

Zhou et al. 2024, arXiv:2410.17897.

half     a = 1/2 in every layer
learned  one a per layer, from 0: at step 0 the model is the one without the residual
"""

import jax.numpy as jnp

from lm.declarations import small_weight


def table(c):
    return {"value_mix": small_weight((), "")} if c.value_residual == "learned" else {}


def carry(c, x_BTD):
    return {"v_first_BTGK": jnp.zeros((*x_BTD.shape[:-1], c.n_kv_heads, c.d_head), x_BTD.dtype)}


def apply(here, v_BTGK):
    first_BTGK = jnp.where(here.layer == 0, v_BTGK, here.stream["v_first_BTGK"])
    here.stream["v_first_BTGK"] = first_BTGK
    a = here.p["value_mix"].astype(v_BTGK.dtype) if here.c.value_residual == "learned" else 0.5
    return (1 - a) * v_BTGK + a * first_BTGK
