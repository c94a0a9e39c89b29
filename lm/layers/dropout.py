"""Dropout with one key per example."""

import jax
import jax.numpy as jnp


def dropout(x, keys_B, rate):
    """Zeroes each element with probability `rate` and divides the others by 1 - rate (Srivastava et al. 2014,
    section 10).

    x: (B, ...); keys_B: B keys of jax.random, one per example, so that an example's draw does not depend on how the
    batch is split over devices or microbatches; rate: a Python number in [0, 1). At rate 0 returns x, and the keys
    may be None.
    Raises ValueError for another rate, for a number of keys other than B, and for keys whose draws depend on their
    neighbours in a batch (JAX's "rbg").
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate is {rate}; it must be at least 0 and less than 1")
    if rate == 0:
        return x
    if not jnp.issubdtype(keys_B.dtype, jax.dtypes.prng_key):
        raise ValueError(f"dropout: keys of dtype {keys_B.dtype}; expected typed keys, made by jax.random.key")
    if keys_B.shape != x.shape[:1]:
        raise ValueError(
            f"dropout: keys of shape {keys_B.shape} for x of shape {x.shape}; expected one key per example"
        )
    if "rbg" in str(jax.random.key_impl(keys_B)):
        raise ValueError("dropout: keys of the 'rbg' kind do not draw example by example; use 'threefry2x32'")
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys_B)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
