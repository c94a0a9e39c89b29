"""Deep supervision: the stream at half of the depth predicts the next token, too, by the same head.

See Lee et al. 2015 (arXiv:1409.5185) and Al-Rfou et al. 2019 (arXiv:1808.04444, section 3.2). The
term "deep" of the loss has the weight deep_supervision. The stream is divided by its root mean
square before the head. Evaluation does not change.
"""

import jax.numpy as jnp

from lm.config import n_applied_layers
from lm.layers.norms import rms_norm


def carry(c, x_BTD):
    return {"deep_BTD": jnp.zeros_like(x_BTD)}


def apply(here, x_BTD):
    # jnp.where and not `if`: under a scan the depth is traced
    at_middle = here.depth == n_applied_layers(here.c) // 2
    deep_BTD = rms_norm(x_BTD, None, eps=here.c.norm_eps)
    here.stream["deep_BTD"] = jnp.where(at_middle, deep_BTD, here.stream["deep_BTD"])
    return x_BTD


def loss_weights(c, fraction):
    return {"deep": c.deep_supervision}


def loss_products(c):
    return c.d_model * c.vocab_size


def losses(fields, cross_entropy):
    return {"deep": cross_entropy(fields["targets"], fields["weights"], of="deep_BTD")}
