"""Forgetting attention: scores of query t and key s += sum of log f_l over l = s+1 .. t.

Lin et al. 2025, arXiv:2503.02130. f = sigmoid(x W + b) is one number per head and token, in (0, 1).
The paper uses it without a position encoding: positions = "none". The sum is a difference of
running sums up to t and s. The one up to t is the same for all keys, so it does not change the
softmax, except with a sink, which is refused.
"""

import jax
import jax.numpy as jnp

from lm.config import query_heads
from lm.declarations import bias, weight
from lm.layers.linear import einsum


def table(c):
    return {
        "w_forget_DH": weight(c, (c.d_model, query_heads(c)), "DH"),
        "b_forget_H": bias((query_heads(c),), "H"),
    }


def apply(here, options):
    logits_BTH = einsum("BTD,DH->BTH", here.x_BTD, here.p["w_forget_DH"], here.p["b_forget_H"])
    # float32: the sum grows with the text, and scores are differences of it
    log_f_BTH = jax.nn.log_sigmoid(logits_BTH.astype(jnp.float32))
    sum_BTH = here.running_sum("forgotten", log_f_BTH)
    bias_BSH, _ = here.earlier("bias", -sum_BTH, window=here.window())
    return options | {"bias_BSH": bias_BSH}
