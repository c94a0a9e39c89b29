"""Token shift ("smear"): x_t <- x_t + a sigmoid(x_t[:24] . w) x_{t-1} (nanochat, 2026).

x are the embeddings. a = 0 at step 0: the model starts as the one without it.
"""

import jax

from lm.declarations import small_weight
from lm.layers.linear import einsum

GATE_INPUTS = 24  # the first features of x


def table(c):
    n = min(GATE_INPUTS, c.d_model)
    return {"shift_scale": small_weight((), ""), "w_shift_C1": small_weight((n, 1), "C1", "C")}


def same_at_start(c):
    return True


def apply(here, x_BTD):
    gate_BT1 = jax.nn.sigmoid(einsum("BTC,CI->BTI", x_BTD[..., :GATE_INPUTS], here.p["w_shift_C1"]))
    previous_BTD = here.last("shift", x_BTD, 2)[..., 0, :]  # of the last two, its own included
    return x_BTD + here.p["shift_scale"].astype(x_BTD.dtype) * gate_BT1 * previous_BTD
