"""Feed-forward layers: activations, the MLP, and the gated linear unit."""

import functools

import jax
import jax.numpy as jnp

from lm.kernels import platform
from lm.layers.linear import project
from lm.layers.recomputed import recomputed

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,  # x sigmoid(x), also called swish (Elfwing et al. 2017, arXiv:1702.03118)
    "gelu": functools.partial(jax.nn.gelu, approximate=False),  # x Phi(x) (Hendrycks and Gimpel 2016, arXiv:1606.08415)
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),  # the tanh form of the same paper, as in GPT-2
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, Primer, arXiv:2109.08668
    "sigmoid": jax.nn.sigmoid,
}


def mlp(x, w_in, w_out, *, activation, b_in=None, b_out=None, tap=lambda h: h):
    """Return activation(x w_in + b_in) w_out + b_out.

    Args:
        x, w_in, w_out: (..., D), (D, F) and (F, D).
        activation: a key of ACTIVATIONS.
        b_in, b_out: (F,) and (D,), or None.
        tap: a function that observes or replaces the hidden activations (..., F).

    >>> mlp(jnp.array([1.0, -2.0]), jnp.eye(2), jnp.ones((2, 1)), activation="relu")  # max(1, 0) + max(-2, 0)
    Array([1.], dtype=float32)
    """
    hidden = recomputed(functools.partial(_activate, activation))  # see glu
    return project(tap(hidden(project(x, w_in, b_in))), w_out, b_out)


def glu(x, w_gate, w_up, w_down, *, activation, b_gate=None, b_up=None, b_down=None, tap=lambda h: h):
    """Return (activation(x w_gate + b_gate) * (x w_up + b_up)) w_down + b_down.

    With sigmoid this is the GLU of Dauphin et al. 2017 (arXiv:1612.08083), with silu SwiGLU, with gelu GEGLU (Shazeer
    2020, arXiv:2002.05202, section 2).

    Args:
        x, w_gate, w_up, w_down: (..., D), (D, F), (D, F) and (F, D).
        activation, tap: see `mlp`.
        b_gate, b_up, b_down: (F,), (F,) and (D,), or None.

    >>> glu(jnp.array([1.0, 2.0]), jnp.eye(2), jnp.eye(2), jnp.ones((2, 1)), activation="relu")  # 1 * 1 + 2 * 2
    Array([5.], dtype=float32)
    """
    # The backward pass computes the activation again: cheaper than to store and read its parts.
    gated = recomputed(lambda gate, up: _activate(activation, gate) * up)
    return project(tap(gated(project(x, w_gate, b_gate), project(x, w_up, b_up))), w_down, b_down)


def _activate(activation, x):
    if platform.target() == "cpu":  # XLA:CPU rounds to 16 bits after every operation, which takes twice as long
        return ACTIVATIONS[activation](x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)
    return ACTIVATIONS[activation](x)
