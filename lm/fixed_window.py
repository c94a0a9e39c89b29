"""Language models that see a fixed window of the last n tokens, without attention (config.model.fixed_window = n).

The embeddings of the last n tokens are concatenated, with zeros before the start of a text:

    x_t = [e(w_{t-n+1}); ...; e(w_{t-1}); e(w_t)]
    linear, n_layers = 1:      logits_t = x_t W + b                      softmax regression
    two layers, n_layers = 2:  logits_t = f(x_t W_1 + b_1) W_2 + b_2     Bengio et al. 2003, JMLR 3, equation 1

The optional direct connections from x_t to the logits of that equation are left out.
f is config.model.activation, its width d_ff. The last product is the output head of lm/model.py; b needs head_bias.
"""

import flax.linen as nn
import jax.numpy as jnp

from lm import parameters
from lm.config import ModelConfig
from lm.layers.feed_forward import ACTIVATIONS
from lm.layers.linear import project
from lm.linen import declare


class FixedWindow(nn.Module):
    """The part between embeddings (B, T, D) and output head: (B, T, n D), or (B, T, F) with a hidden layer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, context):
        c = self.config
        if cached := getattr(context.attend, "last_vectors", None):  # see lm/generation/kv_cache.py
            x_BTWD = cached(self, x_BTD, c.fixed_window)
        else:
            x_BTWD = last_vectors(x_BTD, c.fixed_window, context.segments)
        x_BTD = x_BTWD.reshape(*x_BTD.shape[:-1], -1)
        if c.n_layers == 1:
            return x_BTD
        table = parameters.parameter_table(c)
        p = declare(self, {name: table[f"window/{name}"] for name in ("w_DF", "b_F")})
        return ACTIVATIONS[c.activation](project(x_BTD, p["w_DF"], p["b_F"]))


def last_vectors(x_BTD, n: int, segments_BT=None):
    """Return the vectors of the last n positions up to each position, oldest first: (B, T, n, D).

    Vectors before the first position, and those of other documents, are 0.

    >>> x_BTD = jnp.array([[[1.0], [2.0], [3.0]]])
    >>> last_vectors(x_BTD, 2)[0, :, :, 0].tolist()
    [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    """
    T = x_BTD.shape[-2]
    batch = [(0, 0)] * (x_BTD.ndim - 2)

    def earlier(distance: int):
        x = jnp.pad(x_BTD, [*batch, (distance, 0), (0, 0)])[..., :T, :]
        if segments_BT is None:
            return x
        same_BT = segments_BT == jnp.pad(segments_BT, [*batch, (distance, 0)])[..., :T]
        return jnp.where(same_BT[..., None], x, 0)

    return jnp.stack([earlier(distance) for distance in reversed(range(n))], axis=-2)
