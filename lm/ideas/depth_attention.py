"""Attention over depth: h = sum_i softmax_i(w . RMSNorm(y_i)) y_i (Attention Residuals, Moonshot
AI, March 2026).

y_0 are the embeddings and y_1, y_2, ... the outputs of all branches so far; h, in place of their
sum, is the input of the next branch, and at the end that of the final norm. Each branch has its own
w, 0 at step 0. The mean then has the direction of the plain sum, which is all that a norm leaves of
it.
"""

import jax
import jax.numpy as jnp

from lm.declarations import small_weight
from lm.layers.norms import rms_norm
from lm.layers.recomputed import recomputed


def table(c):
    n_outputs = 2 * c.n_layers + 1
    # Two products with each output: the scores and the mean.
    w_D = small_weight((c.d_model,), "D", "D", products=2 * n_outputs)
    return {"attention_depth_D": w_D, "ffn_depth_D": w_D}


def carry(c, x_BTD):
    later = jnp.zeros((*x_BTD.shape[:-1], 2 * c.n_layers, c.d_model), x_BTD.dtype)
    return {"outputs_BTYD": jnp.concatenate([x_BTD[..., None, :], later], axis=-2)}


def block(here, x_BTD, attention, ffn):
    outputs_BTYD = here.stream["outputs_BTYD"]
    places_Y = jnp.arange(outputs_BTYD.shape[-2])

    @recomputed  # the backward pass normalizes the outputs again
    def mean(outputs_BTYD, w_D, exists_Y):
        keys_BTYD = rms_norm(outputs_BTYD, None, eps=here.c.norm_eps)
        scores_BTY = jnp.einsum("...YD,D->...Y", keys_BTYD, w_D, preferred_element_type=jnp.float32)
        weights_BTY = jax.nn.softmax(jnp.where(exists_Y, scores_BTY, -jnp.inf)).astype(
            outputs_BTYD.dtype
        )
        return jnp.einsum("...Y,...YD->...D", weights_BTY, outputs_BTYD)

    for i, (name, branch) in enumerate((("attention", attention), ("ffn", ffn))):
        last = 2 * here.layer + 1 + i
        y_BTD = branch(x_BTD)
        outputs_BTYD = jnp.where((places_Y == last)[:, None], y_BTD[..., None, :], outputs_BTYD)
        x_BTD = mean(outputs_BTYD, here.p[f"{name}_depth_D"], places_Y <= last)
    here.stream["outputs_BTYD"] = outputs_BTYD
    return x_BTD
