"""Feed-forward layers: activations, the MLP, and the gated linear unit."""

import functools

import jax
import jax.numpy as jnp

from lm.kernels import platform
from lm.layers.linear import project
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
    """Return x Phi(x), Phi the normal distribution function (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Args:
        x: any array.
        approximate: use the paper's tanh form, as GPT-2 does. The default is the exact erf form, as in PyTorch; JAX's
            own default is the tanh form.

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


def mlp(x, w_in, w_out, *, activation, b_in=None, b_out=None, tap=lambda h: h):
    """Return activation(x w_in + b_in) w_out + b_out.

    Args:
        x: (..., D).
        w_in, w_out: (D, F) and (F, D).
        activation: a key of ACTIVATIONS.
        b_in, b_out: (F,) and (D,), or None.
        tap: a function that observes or replaces the hidden activations (..., F).

    Returns:
        (..., D).

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
        x: (..., D).
        w_gate, w_up, w_down: (D, F), (D, F) and (F, D).
        activation: a key of ACTIVATIONS.
        b_gate, b_up, b_down: (F,), (F,) and (D,), or None.
        tap: a function that observes or replaces the hidden activations (..., F).

    Returns:
        (..., D).

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
