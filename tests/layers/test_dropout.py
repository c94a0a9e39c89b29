"""Dropout: one mask per example, the configured rate, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.layers.dropout import dropout

KEYS = jax.random.split(jax.random.key(0), 4)
jit_dropout = jax.jit(dropout, static_argnums=2)


def test_splitting_or_permuting_the_batch_does_not_change_masks():
    x = np.ones((4, 5, 3), np.float32)
    whole = np.asarray(jit_dropout(x, KEYS, 0.5))
    halves = [np.asarray(jit_dropout(x[i : i + 2], KEYS[i : i + 2], 0.5)) for i in (0, 2)]
    np.testing.assert_array_equal(whole, np.concatenate(halves))
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(jit_dropout(x, KEYS[order], 0.5), whole[order])
    assert len({row.tobytes() for row in whole}) == 4  # examples differ


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_drops_at_the_rate_and_preserves_the_expectation(rate):
    n = 20000
    y = np.asarray(jit_dropout(np.full((4, n), 2, np.float32), KEYS, rate))
    kept = y != 0
    np.testing.assert_allclose(y[kept], 2 / (1 - rate), rtol=1e-6)
    standard_error = np.sqrt(rate * (1 - rate) / n)
    assert np.all(np.abs(kept.mean(-1) - (1 - rate)) < 5 * standard_error)
    assert np.all(np.abs(y.mean(-1) - 2) < 5 * standard_error * 2 / (1 - rate))


def test_the_gradient_has_the_same_mask_and_scale():
    x = np.ones((4, 50), np.float32)
    y, dx = jax.jit(
        lambda x: (dropout(x, KEYS, 0.25), jax.grad(lambda x: jnp.sum(dropout(x, KEYS, 0.25)))(x))
    )(x)
    np.testing.assert_array_equal(y, dx)


def test_dropout_keeps_the_dtype_and_rate_0_is_the_identity():
    x = jnp.ones((4, 3), jnp.bfloat16)
    assert dropout(x, None, 0) is x
    assert jax.eval_shape(lambda x: dropout(x, KEYS, 0.5), x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("keys", "rate", "message"),
    [
        (KEYS, 1.0, "rate is 1.0"),
        (KEYS, -0.1, "at least 0"),
        (KEYS[:2], 0.5, "one key per example"),
        (jax.random.key(0), 0.5, "one key per example"),
        (np.zeros((4, 2), np.uint32), 0.5, "jax.random.key"),
        (jax.random.split(jax.random.key(0, impl="rbg"), 4), 0.5, "'rbg' kind"),
    ],
)
def test_invalid_arguments_raise(keys, rate, message):
    with pytest.raises(ValueError, match=message):
        dropout(jnp.ones((4, 3)), keys, rate)
