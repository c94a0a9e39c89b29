"""Fast matrix products on CPUs, in bfloat16 and float32. No other backend uses this file.

XLA:CPU would leave a transposed factor in its transposed layout, at a quarter of the speed in
bfloat16 and a third in float32. It uses a processor's 16-bit matrix units only if the result is
float32.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from lm.kernels import platform


def enabled(x) -> bool:
    """Return whether products of `x` should use this module.

    True on CPUs for bfloat16, and for float32 unless parameters are sharded over `fsdp` or
    `tensor`. Over `fsdp` the derivative of `matmul` would keep the gathered parameters for the
    backward pass. Over `tensor` it was not measured.
    """
    if platform.target() != "cpu":
        return False
    sizes = jax.sharding.get_abstract_mesh().shape
    sharded = any(sizes.get(axis, 1) > 1 for axis in ("fsdp", "tensor"))
    return x.dtype == jnp.bfloat16 or (x.dtype == jnp.float32 and not sharded)


def project(x, w, n_in):
    """Contract the n_in last axes of x (R, *in) with w (*in, *out); (R, *out) in float32."""
    size = math.prod(w.shape[:n_in])
    product = matmul(x.reshape(-1, size), w.reshape(size, -1), False)
    return product.reshape(-1, *w.shape[n_in:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(a, b, transposed):
    """Return the product over the last two axes in float32; the gradient's is in a's dtype.

    Args:
        a, b: (..., M, K) and (..., K, N), or (..., N, K) if `transposed`.
    """
    return _product(a, b, transposed)


def _matmul_forward(a, b, transposed):
    return matmul(a, b, transposed), (a, b)


def _matmul_backward(transposed, saved, g):
    a, b = saved
    g = g.astype(a.dtype)
    d_a = _product(g, b, not transposed)
    d_b = transposed_matmul(g, a) if transposed else transposed_matmul(a, g)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def transposed_matmul(a, b):
    """Return a^T b over the last two axes, in float32."""
    if a.dtype == jnp.float32 and a.shape[-1] > b.shape[-1]:
        # The same product with the wider factor on the right is faster; without the barrier XLA
        # would undo this.
        product = jax.lax.optimization_barrier(transposed_matmul(b, a))
        return jnp.swapaxes(product, -1, -2)
    if _is_plain(a):
        if a.shape[-1] == b.shape[-1] and a.shape[-1] in (64, 128):
            # at these widths faster than without a transpose
            return jax.lax.optimization_barrier(a.T) @ b
        return jnp.tensordot(a, b, (0, 0))
    return _product(jnp.swapaxes(a, -1, -2), b, False)


# Layouts can be constrained only in compiled programs.
@functools.partial(jax.jit, static_argnames="transposed")
def _product(a, b, transposed):
    of_a = a.ndim - 1
    of_b = b.ndim - 1 if transposed else b.ndim - 2
    batch = tuple(range(a.ndim - 2))
    axes = (((of_a,), (of_b,)), (batch, batch))
    product = jax.lax.dot_general(
        _row_major(a), _row_major(b), axes, preferred_element_type=jnp.float32
    )
    # Behind a barrier: with a constraint as the last operation, jax.vmap outside of jit would
    # return the numbers in the wrong order (jax 0.10.2 to 0.12.0).
    return jax.lax.optimization_barrier(_row_major(product))


def _is_plain(a) -> bool:
    """Return whether products of `a` are fast in XLA's own layout: float32 without a batch."""
    return a.dtype == jnp.float32 and a.ndim == 2


def _row_major(a):
    mesh = jax.sharding.get_abstract_mesh()
    # XLA's partitioner does not support the constraint and would gather the full array.
    if _is_plain(a) or any(mesh.shape[axis] > 1 for axis in mesh.auto_axes):
        return a
    return with_layout_constraint(a, Layout(tuple(range(a.ndim))))
