"""LayerNorm over the last axis, with any of the algorithms of lm/kernels/moments.py."""

import functools

import jax
import jax.numpy as jnp

from lm.kernels import platform
from lm.kernels.moments import MOMENTS, running_mean
from lm.layers.norms import affine, widen

LAYER_NORMS = (*MOMENTS, "running_mean")  # choices of config.model.norm_algorithm


def layer_norm(x, scale, bias, *, eps=1e-5, algorithm="two_pass", ddof=0, block_size=32):
    """Return (x - mean) / sqrt(var + eps) * scale + bias (Ba et al. 2016, arXiv:1607.06450, eq. 4).

    Args:
        x: (..., D).
        scale, bias: (D,) or None.
        eps: added inside the root.
        algorithm: how the variance is computed, see lm/kernels/moments.py. All but "running_mean"
            compute the same function.
        ddof: var = sum (x - mean)^2 / (D - ddof), as in NumPy.
        block_size: features per block of "chan", and per tile of the running sums of "welford" and
            "running_mean". It changes the result only by rounding.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: unknown algorithm; D <= ddof; "running_mean" with ddof other than 0, or with D =
            1.

    >>> layer_norm(jnp.array([1.0, 2.0, 3.0]), None, None, eps=0.0, ddof=1)
    Array([-1.,  0.,  1.], dtype=float32)
    """
    n = x.shape[-1]
    if algorithm not in LAYER_NORMS:
        raise ValueError(
            f"layer_norm: algorithm is {algorithm!r}; expected one of {', '.join(LAYER_NORMS)}"
        )
    if block_size < 1:
        raise ValueError(f"layer_norm: block_size is {block_size}; it must be at least 1")
    if not 0 <= ddof < n:
        raise ValueError(
            f"layer_norm: ddof is {ddof} at width {n}; it must be at least 0 and less than the "
            "width"
        )
    if algorithm != "running_mean":
        return _layer_norm(x, scale, bias, eps, algorithm, ddof, block_size)
    if ddof != 0:
        raise ValueError(
            f"layer_norm: running_mean divides by its own n - 1; ddof is {ddof}, leave it at 0"
        )
    if n == 1:
        raise ValueError(
            "layer_norm: running_mean divides by n - 1 and needs a width of at least 2"
        )
    centered, var = running_mean(widen(x), block_size)
    return affine(centered * jax.lax.rsqrt(var + eps), scale, bias).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _layer_norm(x, scale, bias, eps, algorithm, ddof, block_size):
    """LayerNorm with the closed-form gradient that all exact algorithms share.

    Only x and the two statistics are saved for the backward pass, so a bfloat16 input costs no
    float32 copy of itself. With y = (x - mean) r, r = 1/sqrt(var + eps), n features and h = g *
    scale: dx = r (h - mean(h) - y sum(h y) / (n - ddof)).
    """
    return _layer_norm_forward(x, scale, bias, eps, algorithm, ddof, block_size)[0]


def _layer_norm_forward(x, scale, bias, eps, algorithm, ddof, block_size):
    x_wide = widen(x)
    mean, total = MOMENTS[algorithm](x_wide, block_size)
    r = jax.lax.rsqrt(total / (x.shape[-1] - ddof) + eps)
    y = affine((x_wide - mean) * r, scale, bias).astype(x.dtype)
    return y, (x, mean, r, scale, bias)


def _layer_norm_backward(eps, algorithm, ddof, block_size, saved, g):
    x, mean, r, scale, bias = saved
    if platform.target() == "gpu":
        # XLA:GPU would compute both again, in one kernel with dx. Another kernel would write the
        # terms of d_scale as a float32 array, only to sum them.
        mean, r = jax.lax.optimization_barrier((mean, r))
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
