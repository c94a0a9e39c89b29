"""Activations of feed-forward layers, and gates."""

import functools

import jax
import jax.numpy as jnp

from lm.kernels import platform
from lm.layers.recomputed import recomputed


def relu(x):
    """Return max(x, 0), with gradient 0 at 0 (jnp.maximum has 1/2 there).

    >>> relu(jnp.array([-1.0, 0.0, 2.0]))
    Array([0., 0., 2.], dtype=float32)
    """
    return jax.nn.relu(x)


def silu(x):
    """Return x sigmoid(x), also called swish (Elfwing et al. 2017, arXiv:1702.03118).

    >>> silu(jnp.array([-100.0, 0.0, 100.0]))
    Array([ -0.,   0., 100.], dtype=float32)
    """
    return jax.nn.silu(x)


def gelu(x, *, approximate=False):
    """Return x Phi(x), Phi the normal distribution function (Hendrycks and Gimpel 2016).

    The paper is arXiv:1606.08415.

    Args:
        x: any array.
        approximate: use the paper's tanh form, as GPT-2 does. The default is the exact erf form, as
            in PyTorch; JAX's own default is the tanh form.

    >>> gelu(jnp.array([-100.0, 0.0, 100.0]))
    Array([ -0.,   0., 100.], dtype=float32)
    """
    return jax.nn.gelu(x, approximate=approximate)


def relu_squared(x):
    """Return max(x, 0)^2 (So et al. 2021, Primer, arXiv:2109.08668).

    >>> relu_squared(jnp.array([-1.0, 0.5, 3.0]))
    Array([0.  , 0.25, 9.  ], dtype=float32)
    """
    return jnp.square(relu(x))


ACTIVATIONS = {f.__name__: f for f in (relu, silu, gelu, relu_squared)}
ACTIVATIONS |= {"gelu_tanh": functools.partial(gelu, approximate=True), "sigmoid": jax.nn.sigmoid}


def activate(x, activation: str):
    """Return an activation of x, a key of ACTIVATIONS.

    The backward pass computes it again, which is cheaper than to store and read its parts.

    >>> activate(jnp.array([-1.0, 2.0]), "relu")
    Array([0., 2.], dtype=float32)
    """
    return recomputed(functools.partial(_activate, activation))(x)


def gated(gate, up, activation: str):
    """Return activation(gate) * up, what a gated linear unit multiplies with its last weight.

    With sigmoid this is the GLU of Dauphin et al. 2017 (arXiv:1612.08083), with silu SwiGLU, with
    gelu GEGLU (Shazeer 2020, arXiv:2002.05202, section 2). The backward pass computes it again.

    >>> gated(jnp.array([1.0, 2.0]), jnp.array([3.0, 3.0]), "relu")
    Array([3., 6.], dtype=float32)
    """
    return recomputed(lambda gate, up: _activate(activation, gate) * up)(gate, up)


def _activate(activation, x):
    f = ACTIVATIONS[activation]
    if platform.target() != "cpu":
        return f(x)
    # XLA:CPU rounds to 16 bits after every operation, which takes twice as long.
    return f(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)
