"""Dropout: the configured rate, and gradients. tests/test_model.py: the mask of an example depends on its own key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.layers.dropout import dropout

KEYS = jax.random.split(jax.random.key(0), 4)
jit_dropout = jax.jit(dropout, static_argnums=2)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_drops_at_the_rate_and_preserves_the_expectation(rate):
    n = 20000
    y = np.asarray(jit_dropout(np.full((4, n), 2, np.float32), KEYS, rate))
    kept = y != 0
    np.testing.assert_allclose(y[kept], 2 / (1 - rate), rtol=1e-6)
    standard_error = np.sqrt(rate * (1 - rate) / n)
    assert np.all(np.abs(kept.mean(-1) - (1 - rate)) < 5 * standard_error)
    assert np.all(np.abs(y.mean(-1) - 2) < 5 * standard_error * 2 / (1 - rate))


def test_the_gradient_has_the_same_mask_and_scale_and_the_dtype_is_kept():
    x = np.ones((4, 50), np.float32)
    y, dx = jax.jit(lambda x: (dropout(x, KEYS, 0.25), jax.grad(lambda x: jnp.sum(dropout(x, KEYS, 0.25)))(x)))(x)
    np.testing.assert_array_equal(y, dx)
    assert jax.eval_shape(lambda x: dropout(x, KEYS, 0.5), jnp.ones((4, 3), jnp.bfloat16)).dtype == jnp.bfloat16
