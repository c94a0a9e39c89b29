"""RMSNorm, and what norms share. Statistics are float32 (float64 for float64 inputs)."""

import functools

import jax
import jax.numpy as jnp

from lm.kernels import platform


def rms_norm(x, scale, *, eps=1e-5):
    """Return x / sqrt(mean(x^2) + eps) * scale (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4).

    Args:
        x: (..., D), or (..., H, K) with a scale (H, K).
        scale: (D,), or None. (H, K): the mean is over both axes, all heads of a position.
        eps: added inside the root.

    Returns:
        The shape and dtype of `x`.

    >>> rms_norm(jnp.array([-2.0, 2.0]), None, eps=0.0)
    Array([-1.,  1.], dtype=float32)
    """
    if platform.target() == "cpu":
        # JAX's derivative is as good there, and its rounding is that of earlier runs.
        return _rms_norm_forward(x, scale, eps)[0]
    return _rms_norm(x, scale, eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x, scale, eps):
    """RMSNorm that saves x and one statistic for the backward pass.

    So 16-bit inputs cost no float32 copies. With y = x r, r = 1 / sqrt(mean(x^2) + eps) and h = g
    scale: dx = r (h - y mean(h y)).
    """
    return _rms_norm_forward(x, scale, eps)[0]


def _rms_norm_forward(x, scale, eps):
    x_wide = widen(x)
    mean_square = jnp.mean(jnp.square(x_wide), axis=_normalized(scale), keepdims=True)
    r = jax.lax.rsqrt(mean_square + eps)
    y = affine(x_wide * r, scale, None).astype(x.dtype)
    return y, (x, r, scale)


def _rms_norm_backward(eps, saved, g):
    x, r, scale = saved
    g = widen(g)
    y = widen(x) * r
    h = affine(g, scale, None)
    mean_hy = jnp.mean(h * y, axis=_normalized(scale), keepdims=True)
    dx = r * (h - y * mean_hy)
    dx = dx.astype(x.dtype)
    if scale is None:
        return dx, None
    leading = tuple(range(x.ndim - scale.ndim))
    d_scale = jnp.sum(g * y, axis=leading)
    return dx, d_scale.astype(scale.dtype)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _normalized(scale) -> tuple[int, ...]:
    """Return the axes of the mean: the last one, or those of the scale."""
    n = 1 if scale is None else scale.ndim
    return tuple(range(-n, 0))


def dyt(x, alpha, scale, bias):
    """Return tanh(alpha x) * scale + bias, without statistics (DyT, arXiv:2503.10622)."""
    return affine(jnp.tanh(alpha * widen(x)), scale, bias).astype(x.dtype)


def widen(x):
    """Return x in the dtype of statistics, float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def affine(y, scale, bias):
    """Return y * scale + bias; None: without."""
    y = y if scale is None else y * scale.astype(y.dtype)
    return y if bias is None else y + bias.astype(y.dtype)
