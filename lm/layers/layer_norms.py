"""LayerNorm over the last axis, with any of the algorithms of lm/kernels/moments.py."""

import functools

import jax
import jax.numpy as jnp

from lm.kernels.moments import MOMENTS, running_mean
from lm.layers.norms import affine, widen

LAYER_NORMS = (*MOMENTS, "running_mean")  # choices of config.model.norm_algorithm


def layer_norm(x, scale, bias, *, eps=1e-5, algorithm="two_pass", ddof=0):
    """Return (x - mean) / sqrt(var + eps) * scale + bias, in the dtype of x (Ba et al. 2016, arXiv:1607.06450, eq. 4).

    Args:
        x: (..., D).
        scale, bias: (D,) or None.
        algorithm: how the variance is computed, see lm/kernels/moments.py. All but "running_mean", which needs D > 1
            and has its own divisor, compute the same function.
        ddof: var = sum (x - mean)^2 / (D - ddof), as in NumPy.

    >>> layer_norm(jnp.array([1.0, 2.0, 3.0]), None, None, eps=0.0, ddof=1)
    Array([-1.,  0.,  1.], dtype=float32)
    """
    if algorithm != "running_mean":
        return _layer_norm(x, scale, bias, eps, algorithm, ddof)
    centered, var = running_mean(widen(x))
    return affine(centered * jax.lax.rsqrt(var + eps), scale, bias).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _layer_norm(x, scale, bias, eps, algorithm, ddof):
    """LayerNorm with the closed-form gradient that all exact algorithms share.

    Only x and the two statistics are saved for the backward pass, so a bfloat16 input costs no float32 copy of itself.
    With y = (x - mean) r, r = 1/sqrt(var + eps), n features and h = g * scale:
    dx = r (h - mean(h) - y sum(h y) / (n - ddof)).
    """
    return _layer_norm_forward(x, scale, bias, eps, algorithm, ddof)[0]


def _layer_norm_forward(x, scale, bias, eps, algorithm, ddof):
    x_wide = widen(x)
    mean, total = MOMENTS[algorithm](x_wide)
    r = jax.lax.rsqrt(total / (x.shape[-1] - ddof) + eps)
    y = affine((x_wide - mean) * r, scale, bias).astype(x.dtype)
    return y, (x, mean, r, scale, bias)


def _layer_norm_backward(eps, algorithm, ddof, saved, g):
    x, mean, r, scale, bias = saved
    g = widen(g)
    y = (widen(x) - mean) * r
    h = affine(g, scale, None)
    h_mean = jnp.mean(h, axis=-1, keepdims=True)
    slope = jnp.sum(h * y, axis=-1, keepdims=True) / (x.shape[-1] - ddof)
    dx = (r * (h - h_mean - y * slope)).astype(x.dtype)
    leading = tuple(range(x.ndim - 1))
    d_scale = None if scale is None else jnp.sum(g * y, axis=leading).astype(scale.dtype)
    d_bias = None if bias is None else jnp.sum(g, axis=leading).astype(bias.dtype)
    return dx, d_scale, d_bias


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
