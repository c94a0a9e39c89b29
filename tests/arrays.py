"""Random arrays for tests of functions of arrays."""

import numpy as np


def normal(*shape, seed=0):
    """Return standard normal values of a shape, in float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
