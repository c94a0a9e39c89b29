"""Products of matrices: the one seam where precision and device tricks live."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

PRODUCT = "product"  # the name of products that jax.checkpoint_policies cannot tell by their primitive


def einsum(equation, x, w, b=None, *, dtype=None):
    """Contracts activations `x` with a weight `w`, multiplying in the dtype of `x`, and adds a bias `b` where given.

    The weight is cast to `x.dtype` (mixed precision keeps float32 weights and bfloat16 activations); its gradient
    comes back in its own dtype. Every backend accumulates such a product in float32 and rounds it once.

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
    if _narrow_on_cpu(x):
        y = _product_on_cpu(of_x[-1] == of_w[-1], len(set(of_x) & set(of_w)), x, w)
        y = checkpoint_name((y if b is None else y + b).astype(dtype), PRODUCT)
    else:
        y = _wide_einsum(equation, dtype, x, w) if dtype != x.dtype else jnp.einsum(equation, x, w)
        y = y if b is None else y + b.astype(y.dtype)
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


def scores(q_BTHK, k_BSHK):
    """q k^T by example and head, (..., H, T, S), in float32 or wider."""
    if _narrow_on_cpu(q_BTHK):
        return matmul_on_cpu(True, jnp.swapaxes(q_BTHK, -2, -3), jnp.swapaxes(k_BSHK, -2, -3))
    wide = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    return jnp.einsum("...THK,...SHK->...HTS", q_BTHK, k_BSHK, preferred_element_type=wide)


def weighted_sums(weights_BHTS, v_BSHK):
    """The sums of values that the weights ask for, (..., T, H, K), multiplied in the dtype of the values."""
    weights_BHTS = weights_BHTS.astype(v_BSHK.dtype)
    if _narrow_on_cpu(v_BSHK):
        return jnp.swapaxes(matmul_on_cpu(False, weights_BHTS, jnp.swapaxes(v_BSHK, -2, -3)), -2, -3)
    return jnp.einsum("...HTS,...SHK->...THK", weights_BHTS, v_BSHK)


def _narrow_on_cpu(x) -> bool:
    """Whether products of x are for matmul_on_cpu."""
    return x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"


def _product_on_cpu(w_is_transposed, n_contracted, x, w):
    """einsum's product of bfloat16 on a CPU, as one of matrices; float32.

    n_contracted: how many axes are summed over, the last ones of x and the first of w, or its last where
        w_is_transposed.
    """
    kept, size = x.shape[: x.ndim - n_contracted], math.prod(x.shape[x.ndim - n_contracted :])
    if w_is_transposed:
        made, matrix = w.shape[: w.ndim - n_contracted], w.reshape(-1, size)
    else:
        made, matrix = w.shape[n_contracted:], w.reshape(size, -1)
    return matmul_on_cpu(w_is_transposed, x.reshape(-1, size), matrix).reshape(*kept, *made)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_on_cpu(b_is_transposed, a, b):
    """a b, or a b^T, of bfloat16 over the last two axes; float32. Its derivative multiplies in bfloat16 as well.

    XLA:CPU hands products of 16 bits to the units that processors have for them only where the result is float32 and
    both factors lie in memory by rows; by itself it keeps a transposed one as it lies, at a quarter of the speed.
    """
    return _rows_times(a, b, b_is_transposed)


def _matmul_on_cpu_forward(b_is_transposed, a, b):
    return matmul_on_cpu(b_is_transposed, a, b), (a, b)


def _matmul_on_cpu_backward(b_is_transposed, saved, g):
    a, b = saved
    g = g.astype(a.dtype)
    left, right = (g, a) if b_is_transposed else (a, g)
    d_a, d_b = _rows_times(g, b, not b_is_transposed), _rows_times(jnp.swapaxes(left, -1, -2), right, False)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


matmul_on_cpu.defvjp(_matmul_on_cpu_forward, _matmul_on_cpu_backward)


@functools.partial(jax.jit, static_argnames="b_is_transposed")  # layouts are constrained in compiled programs only
def _rows_times(a, b, b_is_transposed):
    contracted = (a.ndim - 1,), (b.ndim - 1 if b_is_transposed else b.ndim - 2,)
    batch = tuple(range(a.ndim - 2))
    a, b = _by_rows(a), _by_rows(b)
    return _by_rows(jax.lax.dot_general(a, b, (contracted, (batch, batch)), preferred_element_type=jnp.float32))


def _by_rows(a):
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[axis] > 1 for axis in mesh.auto_axes):
        return a  # the partitioner would gather what it cannot look into
    return with_layout_constraint(a, Layout(tuple(range(a.ndim))))


def softcap(x, cap):
    """cap * tanh(x / cap): keeps logits within (-cap, cap), almost unchanged near 0 (Gemma 2, arXiv:2408.00118,
    section 2).

    cap: a positive number, or None for no cap.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)
