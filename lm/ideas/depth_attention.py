"""Attention over depth: h = sum_i softmax_i(w . RMSNorm(y_i)) y_i (Attention Residuals).

Moonshot AI, March 2026. y_0 are the embeddings and y_1, y_2, ... the outputs of all branches so
far. h takes the place of their sum, as the input of the next branch or of the final norm. Each
branch has its own w, 0 at step 0. The mean then has the direction of the plain sum, which is all
that a norm leaves of it.
"""

import jax
import jax.numpy as jnp

from lm.config import branches_of, n_applied_layers
from lm.declarations import small_weight
from lm.layers.norms import rms_norm
from lm.layers.recomputed import recomputed

OWN_STREAM = True  # the first branch alone reads x
AVERAGES = True  # the stream is a mean over branches


def table(c):
    # Two products with each output: the scores and the mean.
    w_D = small_weight((c.d_model,), "D", "D", products=2 * (n_outputs(c) + 1))
    return {f"{branch.name}_depth_D": w_D for branch in branches_of(c)}


def n_outputs(c):
    """Return the number of outputs of all branches, in all turns of a loop."""
    return len(c.branches) * n_applied_layers(c)


def carry(c, x_BTD):
    # places of all outputs, as a scan needs arrays of one shape
    later_BTYD = jnp.zeros((*x_BTD.shape[:-1], n_outputs(c), c.d_model), x_BTD.dtype)
    return {"outputs_BTYD": jnp.concatenate([x_BTD[..., None, :], later_BTYD], axis=-2)}


def block(here, x_BTD, branches):
    outputs_BTYD = here.stream["outputs_BTYD"]
    places_Y = jnp.arange(outputs_BTYD.shape[-2])

    # Normalized outputs are not saved: that would be all outputs, again for each branch.
    @recomputed
    def mean(outputs_BTYD, w_D, exists_Y):
        keys_BTYD = rms_norm(outputs_BTYD, None, eps=here.c.norm_eps)
        scores_BTY = jnp.einsum("...YD,D->...Y", keys_BTYD, w_D, preferred_element_type=jnp.float32)
        weights_BTY = jax.nn.softmax(jnp.where(exists_Y, scores_BTY, -jnp.inf))
        weights_BTY = weights_BTY.astype(outputs_BTYD.dtype)
        return jnp.einsum("...Y,...YD->...D", weights_BTY, outputs_BTYD)

    last = len(branches) * here.depth
    for name, branch in branches.items():
        last += 1
        y_BTD = branch(x_BTD)
        outputs_BTYD = jnp.where((places_Y == last)[:, None], y_BTD[..., None, :], outputs_BTYD)
        x_BTD = mean(outputs_BTYD, here.p[f"{name}_depth_D"], places_Y <= last)
    here.stream["outputs_BTYD"] = outputs_BTYD
    return x_BTD
