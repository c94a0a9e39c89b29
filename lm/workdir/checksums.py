"""Checksums of arrays that do not depend on how the arrays are sharded."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def leaf_checksums(state) -> dict[str, str]:
    """Return a checksum for each leaf by path, computed on the leaf's devices however it is sharded.

    The bits of each element, widened to 32-bit words, and its row-major index plus one are split
    into 16-bit halves. The checksum is the four sums of products half x half modulo 2^32, in
    hexadecimal. Products and differences of two products fit in 32 bits, so any change to one
    element and any exchange of two unequal elements changes at least one sum. (A single sum of
    words times odd factors modulo 2^32 does not detect an exchange of x and -x: their words differ
    by 2^31 and odd factors by an even number.)
    """
    leaves = leaves_by_path(state)
    # One at a time: XLA's CPU client has one thread per device, and several concurrent programs
    # that sum over devices can deadlock.
    checksums = {}
    for path, leaf in jax.block_until_ready(leaves).items():
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        sums = jax.device_get(_checksum(mesh)(leaf))
        checksums[path] = "".join(f"{int(s):08x}" for s in sums)
    return checksums


@functools.cache
def _checksum(mesh):
    """Return the compiled sums of a leaf, replicated over its mesh: every process has them."""
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(_four_sums, out_shardings=sharding)


def _four_sums(leaf):
    # The index is built from one iota per dimension: a reshape to a vector would gather a sharded
    # leaf.
    index = jnp.zeros(leaf.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(leaf.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    factors = ((index & 0xFFFF) + 1, (index >> 16) + 1)
    words = leaf
    if leaf.dtype != jnp.bool_:
        words = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    words = words.astype(jnp.uint32)
    products = tuple(half * factor for half in (words & 0xFFFF, words >> 16) for factor in factors)
    # One reduction with several operands: on CPU it runs twenty times as fast as one sum each.
    zeros = tuple(jnp.uint32(0) for _ in products)
    sums = jax.lax.reduce(
        products, zeros, lambda x, y: tuple(map(jnp.add, x, y)), tuple(range(leaf.ndim))
    )
    return jnp.stack(sums)


def leaves_by_path(tree) -> dict[str, Any]:
    """Return the leaves of a tree by path, such as "params/blocks/w_in" or
    "opt_state/0/mu/blocks/w_in".
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
