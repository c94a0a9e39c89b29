"""Means weighted by a softmax, with a gradient exact up to the rounding of products' factors."""

import jax
import jax.numpy as jnp

from lm.kernels import cpu_products


def enabled(v) -> bool:
    """Return whether to use this module: 16 bits for accuracy, float32 on a CPU for speed.

    Elsewhere the plain softmax of lm/layers/attention.py serves, which also has float64 and
    forward-mode derivatives.
    """
    return v.dtype.itemsize == 2 or cpu_products.enabled(v)


@jax.custom_vjp
def softmax_means(scores_BHTS, v_BSHK):
    """Return softmax(scores) v, (..., T, H, K) in float32; products are in the dtype of `v_BSHK`.

    The derivative by a score is weight * (g v - g mean) / sum. Under a peaked softmax the two terms
    almost cancel. Both are therefore computed in float32 from the same rounded g: the error of g
    does not dominate their difference.

    Args:
        scores_BHTS: float32 (..., H, T, S).
        v_BSHK: values (..., S, H, K).

    >>> softmax_means(jnp.zeros((1, 1, 2)), jnp.array([[[1.0]], [[3.0]]]))  # equal scores: the mean of both values
    Array([[[2.]]], dtype=float32)
    """
    return _forward(scores_BHTS, v_BSHK)[0]


def _forward(scores_BHTS, v_BSHK):
    weights_BHTS = jnp.exp(scores_BHTS - jnp.max(scores_BHTS, axis=-1, keepdims=True))
    # Divide the output by the sum, not the weights: the output is narrower.
    sum_BTH1 = jnp.swapaxes(jnp.sum(weights_BHTS, axis=-1), -1, -2)[..., None]
    weights_BHTS = weights_BHTS.astype(v_BSHK.dtype)
    means_BTHK = _by_head(_matmul(weights_BHTS, _by_head(v_BSHK), False)) / sum_BTH1
    return means_BTHK, (weights_BHTS, sum_BTH1, means_BTHK, v_BSHK)


def _backward(saved, g_BTHK):
    weights_BHTS, sum_BTH1, means_BTHK, v_BSHK = saved
    g_BTHK = (g_BTHK / sum_BTH1).astype(v_BSHK.dtype)
    g_mean_BTH = jnp.sum(g_BTHK.astype(jnp.float32) * means_BTHK, axis=-1)
    g_BHTK = _by_head(g_BTHK)
    # Axes in this order: XLA:CPU would otherwise write the sums, repeated over S, to an array of
    # their own.
    g_mean_BHT1 = jnp.swapaxes(g_mean_BTH, -1, -2)[..., None]
    d_weights_BHTS = _matmul(g_BHTK, _by_head(v_BSHK), True) - g_mean_BHT1
    d_v_BSHK = _by_head(_transposed_matmul(weights_BHTS, g_BHTK)).astype(v_BSHK.dtype)
    return weights_BHTS.astype(jnp.float32) * d_weights_BHTS, d_v_BSHK


softmax_means.defvjp(_forward, _backward)


def _by_head(x_BTHK):
    """Swap the axes of positions and heads."""
    return jnp.swapaxes(x_BTHK, -2, -3)


def _matmul(a, b, transposed):
    if cpu_products.enabled(a):
        return cpu_products.matmul(a, b, transposed)
    if transposed:
        b = jnp.swapaxes(b, -1, -2)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _transposed_matmul(a, b):
    if cpu_products.enabled(a):
        return cpu_products.transposed_matmul(a, b)
    return jnp.matmul(jnp.swapaxes(a, -1, -2), b, preferred_element_type=jnp.float32)
