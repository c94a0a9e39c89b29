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
def softmax_means(scores_XTS, v_XSK):
    """Return softmax(scores) v for each X, such as each example and head: (X, T, K) in float32.

    The products multiply in the dtype of `v_XSK`. The derivative by a score is
    weight * (g v - g mean) / sum. Under a peaked softmax the two terms almost cancel. Both are
    therefore computed in float32 from the same rounded g: the error of g does not dominate their
    difference.

    Args:
        scores_XTS: float32 (X, T, S).
        v_XSK: values (X, S, K).

    >>> softmax_means(jnp.zeros((1, 2)), jnp.array([[1.0], [3.0]]))  # equal scores: the mean of both values
    Array([[2.]], dtype=float32)
    """
    return _forward(scores_XTS, v_XSK)[0]


def _forward(scores_XTS, v_XSK):
    largest_XT1 = jnp.max(scores_XTS, axis=-1, keepdims=True)
    weights_XTS = jnp.exp(scores_XTS - largest_XT1)
    # Divide the output by the sum, not the weights: the output is narrower.
    sum_XT1 = jnp.sum(weights_XTS, axis=-1, keepdims=True)
    weights_XTS = weights_XTS.astype(v_XSK.dtype)
    means_XTK = _matmul(weights_XTS, v_XSK, False) / sum_XT1
    return means_XTK, (weights_XTS, sum_XT1, means_XTK, v_XSK)


def _backward(saved, g_XTK):
    weights_XTS, sum_XT1, means_XTK, v_XSK = saved
    g_XTK = (g_XTK / sum_XT1).astype(v_XSK.dtype)
    g_mean_XT1 = jnp.sum(g_XTK.astype(jnp.float32) * means_XTK, axis=-1, keepdims=True)
    d_weights_XTS = _matmul(g_XTK, v_XSK, True) - g_mean_XT1
    d_v_XSK = _transposed_matmul(weights_XTS, g_XTK).astype(v_XSK.dtype)
    return weights_XTS.astype(jnp.float32) * d_weights_XTS, d_v_XSK


softmax_means.defvjp(_forward, _backward)


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
