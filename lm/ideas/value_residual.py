"""Value residual: v_l <- (1 - a) v_l + a v_0, with the values v_0 of the first layer.

It is the first layer that has attention, in its first turn. Zhou et al. 2024, arXiv:2410.17897.

half     a = 1/2 in every layer
learned  one a per layer, from 0: at step 0 the model is the one without the residual
"""

import jax.numpy as jnp

from lm.config import applied_layers, mixer_of
from lm.declarations import small_weight


def table(c):
    if c.value_residual != "learned":
        return {}
    return {"value_mix": small_weight((), "")}


def unread(c):
    """In the first layer v is v_0. It has an a, too, so that checkpoints keep their shapes."""
    return {"value_mix": [applied_layers(c)[first_depth(c)][1]]}


def same_at_start(c):
    return c.value_residual == "learned"


def carry(c, x_BTD):
    shape = (*x_BTD.shape[:-1], c.n_kv_heads, c.d_head)
    return {"v_first_BTGK": jnp.zeros(shape, x_BTD.dtype)}


def first_depth(c):
    """Return how many layers were applied before the first one with attention."""
    mixers = [mixer_of(c, layer) for _, layer in applied_layers(c)]
    return mixers.index("attention")


def apply(here, v_BTGK):
    is_first_branch = here.path.endswith("/attention")  # a second one is attention_2
    is_first = is_first_branch & (here.depth == first_depth(here.c))
    first_BTGK = jnp.where(is_first, v_BTGK, here.stream["v_first_BTGK"])
    here.stream["v_first_BTGK"] = first_BTGK
    a = 0.5
    if here.c.value_residual == "learned":
        a = here.p["value_mix"].astype(v_BTGK.dtype)
    return (1 - a) * v_BTGK + a * first_BTGK
