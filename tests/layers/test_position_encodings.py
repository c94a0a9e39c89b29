"""RoPE and sinusoidal positions: against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

from lm.layers.position_encodings import apply_rope, rope_table, sinusoidal

UNIT = 2.0**-24
jit_table = jax.jit(rope_table, static_argnums=1, static_argnames="theta")
jit_rope = jax.jit(apply_rope, static_argnames="pairing")
jit_sinusoidal = jax.jit(sinusoidal, static_argnums=1, static_argnames="order")


def rotate(x, positions, theta=10000.0, pairing="adjacent"):
    """Apply RoPE in float64 as a product of complex numbers."""
    d_head = x.shape[-1]
    x = x.astype(np.float64)
    angles = np.asarray(positions)[..., None, None] * theta ** (
        -2 * np.arange(d_head // 2) / d_head
    )
    if pairing == "adjacent":
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    z = (x[..., : d_head // 2] + 1j * x[..., d_head // 2 :]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("pairing", ["adjacent", "halves"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope_equals_complex_rotation(pairing, theta):
    x = normal(2, 5, 3, 8)
    positions = np.array([[0, 1, 2, 3, 4], [7, 100, 3, 2047, 5]])  # neither in order nor from 0
    cos, sin = jit_table(positions, 8, theta=theta)
    assert cos.shape == sin.shape == (2, 5, 4)
    assert cos.dtype == sin.dtype == jnp.float32
    out = jit_rope(x, cos, sin, pairing=pairing)
    # The angle has three roundings (of the exponent, the frequency, the product), and its error
    # rotates x by as much.
    bound = 8 * UNIT * (1 + positions[..., None, None]) * np.abs(x).max()
    assert np.all(np.abs(np.asarray(out) - rotate(x, positions, theta, pairing)) <= bound)


@pytest.mark.parametrize("pairing", ["adjacent", "halves"])
def test_a_narrow_table_rotates_the_first_features_only(pairing):
    x, table = normal(4, 3, 8), jit_table(np.arange(4), 6)
    out = np.asarray(jit_rope(x, *table, pairing=pairing))
    np.testing.assert_array_equal(out[..., 6:], x[..., 6:])
    np.testing.assert_allclose(
        out[..., :6], rotate(x[..., :6], np.arange(4), pairing=pairing), atol=1e-5
    )


def test_linear_scaling_equals_positions_divided_by_the_factor():
    scaled = rope_table(np.arange(0, 40, 4), 8, scaling="linear", factor=4.0)
    np.testing.assert_array_equal(np.asarray(scaled), np.asarray(rope_table(np.arange(10), 8)))


def test_rope_accepts_any_leading_axes():
    x, table = normal(2, 3, 4, 2, 6), jit_table(np.arange(4), 6)
    np.testing.assert_allclose(
        np.asarray(jit_rope(x, *table))[1, 2], jit_rope(x[1, 2], *table), rtol=1e-6, atol=1e-6
    )


def test_16_bit_inputs_are_rotated_in_float32():
    x = jnp.asarray(normal(3, 2, 8), jnp.bfloat16)
    positions = np.array([0, 500, 1000])
    table = jit_table(positions, 8)
    out, vjp = jax.vjp(lambda x: jit_rope(x, *table), x)
    assert out.dtype == jax.eval_shape(vjp, out)[0].dtype == jnp.bfloat16
    expected = rotate(np.asarray(x, np.float64), positions)
    assert np.all(
        np.abs(np.asarray(out, np.float64) - expected) <= 2.0**-8 * np.abs(expected) + 1e-3
    )


@pytest.mark.parametrize("order", ["sine_first", "cosine_first"])
def test_sinusoidal_equals_its_formula(order):
    positions = np.array([[0, 1, 2], [10, 2000, 3]])
    out = jit_sinusoidal(positions, 6, order=order)
    assert out.shape == (2, 3, 6)
    assert out.dtype == jnp.float32
    for p, row in zip(positions.ravel(), np.asarray(out).reshape(-1, 6), strict=True):
        for k in range(3):
            sine, cosine = np.sin(p / 10000 ** (2 * k / 6)), np.cos(p / 10000 ** (2 * k / 6))
            pair = (sine, cosine) if order == "sine_first" else (cosine, sine)
            np.testing.assert_allclose(row[2 * k : 2 * k + 2], pair, atol=8 * UNIT * (1 + p))


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="d_head is 7"):
        rope_table(np.arange(3), 7)
    with pytest.raises(ValueError, match="d_model is 5"):
        sinusoidal(np.arange(3), 5)
    with pytest.raises(ValueError, match="expected integers"):
        rope_table(np.arange(3.0), 8)
