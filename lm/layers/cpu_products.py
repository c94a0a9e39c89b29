"""Fast bfloat16 matrix products on CPUs. No other backend uses this file.

XLA:CPU uses a processor's 16-bit matrix units only if the result is float32 and both factors are stored row-major.
It would leave a transposed factor in its transposed layout, at a quarter of the speed.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


def enabled(x) -> bool:
    """Return whether products of `x` should use this module: bfloat16 on a CPU."""
    return x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"


def project(x, w, n_in):
    """Contract the last `n_in` axes of `x` (R, *in) with the first of `w` (*in, *out); returns float32 (R, *out)."""
    size = math.prod(w.shape[:n_in])
    return matmul(x.reshape(-1, size), w.reshape(size, -1), False).reshape(-1, *w.shape[n_in:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(a, b, transposed):
    """Return a b, or a b^T if `transposed`, over the last two axes in float32. The gradient multiplies in bfloat16."""
    return _row_major_product(a, b, transposed)


def _matmul_forward(a, b, transposed):
    return matmul(a, b, transposed), (a, b)


def _matmul_backward(transposed, saved, g):
    a, b = saved
    g = g.astype(a.dtype)
    left, right = (g, a) if transposed else (a, g)
    d_a = _row_major_product(g, b, not transposed)
    d_b = _row_major_product(jnp.swapaxes(left, -1, -2), right, False)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.jit, static_argnames="transposed")  # layouts can be constrained only in compiled programs
def _row_major_product(a, b, transposed):
    contracted = (a.ndim - 1,), (b.ndim - 1 if transposed else b.ndim - 2,)
    batch = tuple(range(a.ndim - 2))
    product = jax.lax.dot_general(
        _row_major(a), _row_major(b), (contracted, (batch, batch)), preferred_element_type=jnp.float32
    )
    return _row_major(product)


def _row_major(a):
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[axis] > 1 for axis in mesh.auto_axes):
        return a  # XLA's partitioner does not support the constraint and would gather the full array
    return with_layout_constraint(a, Layout(tuple(range(a.ndim))))
