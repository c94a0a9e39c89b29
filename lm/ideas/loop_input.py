"""Input injection: each later turn of the looped layers reads their input again.

e is the stream before the first turn of the looped layers. Before every later turn

add  x <- x + e          (Yang et al. 2024, arXiv:2311.12424, eq. 4)
mix  x <- a x + b e      for each feature, from a = 1 and b = 0, the model without it

Geiping et al. 2025 (arXiv:2502.05171) have a matrix of both in place of a and b.
"""

import jax.numpy as jnp

from lm.config import looped_layers
from lm.declarations import small_weight


def table(c):
    if c.loop_input != "mix":
        return {}
    return {
        "loop_scale_D": small_weight((c.d_model,), "D", init="ones"),
        "loop_input_scale_D": small_weight((c.d_model,), "D"),
    }


def carry(c, x_BTD):
    return {"loop_input_BTD": jnp.zeros_like(x_BTD)}


def block_input(here, x_BTD):
    """Keep e."""
    if here.turn == 0:
        is_first = here.layer == looped_layers(here.c).start
        here.stream["loop_input_BTD"] = jnp.where(is_first, x_BTD, here.stream["loop_input_BTD"])
    return x_BTD


def turn_input(here, x_BTD):
    if here.turn == 0:
        return x_BTD
    e_BTD = here.stream["loop_input_BTD"]
    if here.c.loop_input == "add":
        return x_BTD + e_BTD
    a_D = here.p["loop_scale_D"].astype(x_BTD.dtype)
    b_D = here.p["loop_input_scale_D"].astype(x_BTD.dtype)
    return a_D * x_BTD + b_D * e_BTD
