"""Dropout with one key per example."""

import jax
import jax.numpy as jnp


def dropout(x, keys_B, rate):
    """Set each element to zero with probability `rate`, and divide the others by 1 - rate (Srivastava et al. 2014).

    The draw of an example depends on its own key only, not on how the batch is split over devices or micro-batches. So
    keys are of JAX's default kind: draws of "rbg" depend on the other keys of a batch.

    Args:
        x, keys_B: (B, ...), and a key for each example.
        rate: a number in [0, 1).

    >>> x = jnp.ones((2, 1000))
    >>> y = dropout(x, jax.random.split(jax.random.key(0), 2), 0.25)
    >>> sorted({round(float(value), 4) for value in y.ravel()})
    [0.0, 1.3333]
    """
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys_B)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
