"""Functions of single elements, in the precision that is fast on each platform."""

import jax.numpy as jnp

from lm.kernels import platform


def apply(function, x):
    """Return function(x) in the dtype of x."""
    if platform.target() == "cpu":  # XLA:CPU rounds to 16 bits after every operation, which takes twice as long
        return function(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)
    return function(x)
