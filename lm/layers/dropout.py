"""Dropout with one key per example."""

import jax
import jax.numpy as jnp


def dropout(x, keys_B, rate):
    """Zero elements with probability `rate`; divide others by 1 - rate (Srivastava et al. 2014).

    The draw of an example depends on its own key only, not on how the batch is split over devices
    or micro-batches.

    Args:
        x: (B, ...).
        keys_B: B typed keys (`jax.random.key`), one per example. May be None if `rate` is 0.
        rate: a Python number in [0, 1).

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: `rate` is out of range, the number of keys is not B, or the keys are of JAX's
            "rbg" kind, whose draws depend on the other keys of a batch.

    >>> x = jnp.ones((2, 1000))
    >>> y = dropout(x, jax.random.split(jax.random.key(0), 2), 0.25)
    >>> sorted({round(float(value), 4) for value in y.ravel()})
    [0.0, 1.3333]
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate is {rate}; it must be at least 0 and less than 1")
    if rate == 0:
        return x
    if not jnp.issubdtype(keys_B.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"dropout: keys of dtype {keys_B.dtype}; expected typed keys, made by jax.random.key"
        )
    if keys_B.shape != x.shape[:1]:
        raise ValueError(
            f"dropout: keys {keys_B.shape} for x {x.shape}; expected one key per example"
        )
    if "rbg" in str(jax.random.key_impl(keys_B)):
        raise ValueError(
            "dropout: keys of the 'rbg' kind do not draw example by example; use 'threefry2x32'"
        )
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys_B)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
