"""Products with weights: the one seam where precision and device tricks live."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


def einsum(equation, x, w, b=None, *, dtype=None):
    """Contracts activations `x` with a weight `w`, multiplying in the dtype of `x`, and adds a bias `b` where given.

    The weight is cast to `x.dtype` (mixed precision keeps float32 weights and bfloat16 activations); its gradient
    comes back in its own dtype. Every backend accumulates such a product in float32 and rounds once, at the end.

    equation: the contracted axes are the last of `x`, and the first or the last of `w`.
    dtype: of the result. None means `x.dtype`; float32 keeps the accumulator unrounded, which logits need: a
        bfloat16 logit of 10 is rounded to a multiple of 1/16. The products of the backward pass still multiply in
        `x.dtype`.
    """
    w = w.astype(x.dtype)
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    of_x, of_w = equation.split("->")[0].split(",")
    # One leading axis: XLA:CPU makes transposed copies to sum a weight's gradient over two, and half the speed.
    leading = x.shape[: x.ndim - len(of_x.removeprefix("..."))]
    x = x.reshape(-1, *x.shape[len(leading) :]) if leading else x
    if x.dtype.itemsize == 2 and jax.default_backend() == "cpu":
        y = _product_on_cpu(of_x[-1] == of_w[-1], len(set(of_x) & set(of_w)), x, w)
    else:
        y = _wide_einsum(equation, dtype, x, w) if dtype != x.dtype else jnp.einsum(equation, x, w)
    y = (y if b is None else y + b.astype(y.dtype)).astype(dtype)
    return y.reshape(*leading, *y.shape[1:]) if leading else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wide_einsum(equation, dtype, x, w):
    return jnp.einsum(equation, x, w, preferred_element_type=dtype)


def _wide_einsum_forward(equation, dtype, x, w):
    return _wide_einsum(equation, dtype, x, w), (x, w)


def _wide_einsum_backward(equation, dtype, saved, g):
    # JAX's own rule would multiply a float32 cotangent with the other operand, at a fraction of the 16-bit speed.
    x, w = saved
    _, vjp = jax.vjp(functools.partial(jnp.einsum, equation), x, w)
    return vjp(g.astype(x.dtype))


_wide_einsum.defvjp(_wide_einsum_forward, _wide_einsum_backward)


def _product_on_cpu(w_is_transposed, n_contracted, x, w):
    """The same for 16 bits on a CPU, as a product of matrices that XLA hands to the units that processors have for them.
    Returns float32.

    n_contracted: how many axes are summed over, the last ones of x and the first of w, or its last where
        w_is_transposed.
    """
    kept, size = x.shape[: x.ndim - n_contracted], math.prod(x.shape[x.ndim - n_contracted :])
    if w_is_transposed:
        made, matrix = w.shape[: w.ndim - n_contracted], w.reshape(-1, size)
    else:
        made, matrix = w.shape[n_contracted:], w.reshape(size, -1)
    return _matmul_on_cpu(w_is_transposed, x.reshape(-1, size), matrix).reshape(*kept, *made)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_on_cpu(w_is_transposed, x, w):
    return _rows_times(x, w, w_is_transposed)


def _matmul_on_cpu_forward(w_is_transposed, x, w):
    return _matmul_on_cpu(w_is_transposed, x, w), (x, w)


def _matmul_on_cpu_backward(w_is_transposed, saved, g):
    x, w = saved
    g = g.astype(x.dtype)
    left, right = (g, x) if w_is_transposed else (x, g)
    d_x, d_w = _rows_times(g, w, not w_is_transposed), _rows_times(left.T, right, False)
    return d_x.astype(x.dtype), d_w.astype(w.dtype)


_matmul_on_cpu.defvjp(_matmul_on_cpu_forward, _matmul_on_cpu_backward)


@functools.partial(jax.jit, static_argnames="b_is_transposed")
def _rows_times(a, b, b_is_transposed):
    """a b, or a b^T, in float32. XLA:CPU has fast products of 16 bits with a float32 result only, and where both lie in
    memory by rows; by itself it would rather keep a transposed one as it lies than move it.
    """
    a, b = (with_layout_constraint(m, Layout((0, 1))) for m in (a, b))
    contracted = ((1,), (1,) if b_is_transposed else (0,))
    y = jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)
    return with_layout_constraint(y, Layout((0, 1)))


def softcap(x, cap):
    """cap * tanh(x / cap): keeps logits within (-cap, cap), almost unchanged near 0 (Gemma 2, arXiv:2408.00118,
    section 2).

    cap: a positive number, or None for no cap.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)
