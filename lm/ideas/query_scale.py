"""A learned factor of the queries of each head, alone or times the logarithm of the position.

learned  q <- s_h q, a temperature
log_n    q <- s_h q log(1 + t) / log(1 + T) at position t of a context of T: attention to many keys
         stays as sharp as to few (Chiang and Cholak 2022, arXiv:2202.12172, section 5)

s = 1 at step 0. Shleifer et al. 2021 (arXiv:2110.09456) scale the outputs of heads instead.
"""

import math

import jax.numpy as jnp

from lm.config import query_heads
from lm.declarations import gain


def table(c):
    return {"query_scale_H": gain((query_heads(c),), "H")}


def same_at_start(c):
    return c.query_scale == "learned"


def absolute(c):
    return c.query_scale == "log_n"


def apply(here, qk):
    q_BTHK, k_BTGK = qk
    scale_BTH = here.p["query_scale_H"].astype(jnp.float32)
    if here.c.query_scale == "log_n":
        # max_positions may be None, and the logarithm is a divisor
        longest = math.log(1 + max(1, here.c.max_positions or 1))
        scale_BTH = scale_BTH * (jnp.log(1.0 + here.positions) / longest)[..., None]
    return (q_BTHK * scale_BTH[..., None]).astype(q_BTHK.dtype), k_BTGK
