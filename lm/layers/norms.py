"""RMSNorm, and what norms share. Statistics are float32 (float64 for float64 inputs)."""

import jax
import jax.numpy as jnp


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
    x_wide = widen(x)
    axes = tuple(range(-1 if scale is None else -scale.ndim, 0))
    y = x_wide * jax.lax.rsqrt(jnp.mean(jnp.square(x_wide), axis=axes, keepdims=True) + eps)
    return affine(y, scale, None).astype(x.dtype)


def dyt(x, alpha, scale, bias):
    """Return tanh(alpha x) * scale + bias, a norm without statistics (DyT, Zhu et al. 2025, arXiv:2503.10622)."""
    return affine(jnp.tanh(alpha * widen(x)), scale, bias).astype(x.dtype)


def widen(x):
    """Return x in the dtype of statistics, float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def affine(y, scale, bias):
    """Return y * scale + bias; None: without."""
    y = y if scale is None else y * scale.astype(y.dtype)
    return y if bias is None else y + bias.astype(y.dtype)
