"""Matrix products with weights: values, gradients, and where they are rounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

from lm.layers.linear import einsum, project_to_float32


def test_values_and_gradients_equal_numpy_for_any_leading_axes():
    """Internally products have one leading axis; here x has none, one or two."""
    w, b = normal(8, 2, 4, seed=1), normal(2, 4, seed=2)
    for leading in ((), (3,), (3, 5)):
        x, g = normal(*leading, 8), normal(*leading, 2, 4, seed=3)
        y, vjp = jax.vjp(functools.partial(einsum, "BTD,DHK->BTHK"), x, w, b)
        np.testing.assert_allclose(y, np.einsum("...d,dhk->...hk", x, w) + b, rtol=1e-5, atol=1e-5)
        rows, upstream = x.reshape(-1, 8), g.reshape(-1, 2, 4)
        expected = (
            np.einsum("...hk,dhk->...d", g, w),
            np.einsum("nd,nhk->dhk", rows, upstream),
            upstream.sum(0),
        )
        for found, right in zip(vjp(g), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


PRODUCTS = {
    "abD,DF->abF": (functools.partial(einsum, "BTD,DF->BTF"), (3, 5, 8), (8, 6)),
    "abD,DHK->abHK": (functools.partial(einsum, "BTD,DHK->BTHK"), (3, 5, 8), (8, 2, 4)),
    "abHK,HKD->abD": (functools.partial(einsum, "BTHK,HKD->BTD"), (3, 5, 2, 4), (2, 4, 6)),
    "D,DF->F": (functools.partial(einsum, "BTD,DF->BTF"), (8,), (8, 6)),
    "abD,DV->abV": (project_to_float32, (3, 5, 8), (8, 7)),
    "abD,VD->abV": (functools.partial(project_to_float32, transposed=True), (3, 5, 8), (7, 8)),
}


@pytest.mark.parametrize("equation", PRODUCTS)
def test_16_bit_products_round_only_factors_and_results(equation):
    """Values and gradients are exact products of rounded factors; a 16-bit result is rounded once
    more.
    """
    product, of_x, of_w = PRODUCTS[equation]
    x, w = (
        jnp.asarray(normal(*shape, seed=i), jnp.bfloat16) for i, shape in enumerate((of_x, of_w))
    )
    y, vjp = jax.vjp(jax.jit(product), x, w.astype(jnp.float32))
    g = jnp.asarray(normal(*y.shape, seed=3), jnp.bfloat16)
    x64, w64, g64 = (np.asarray(a, np.float64) for a in (x, w, g))
    left, right, out = equation.replace("->", ",").split(",")
    exact = [
        np.einsum(f"{left},{right}->{out}", x64, w64),
        np.einsum(f"{out},{right}->{left}", g64, w64),
        np.einsum(f"{left},{out}->{right}", x64, g64),
    ]
    dtype = jnp.float32 if "V" in out else jnp.bfloat16
    found = [y, *vjp(g.astype(dtype))]
    assert [a.dtype for a in found] == [dtype, jnp.bfloat16, jnp.float32]
    steps = (1e-6 if dtype == jnp.float32 else 2.0**-8, 2.0**-8, 2.0**-8)
    for a, right, step in zip(found, exact, steps, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), right, rtol=step, atol=1e-5)


def test_a_weight_that_does_not_fit_is_an_error():
    """Even if x has a size that could be reshaped to fit."""
    with pytest.raises(
        ValueError, match=r"x \(4, 6, 8\) does not end in the first axes of the weight \(16, 5\)"
    ):
        einsum("BTD,DF->BTF", jnp.ones((4, 6, 8)), jnp.ones((16, 5)))


@pytest.mark.parametrize(
    "equation", ["BTD,FD->BTF", "BTD,DF->BFT", "BTD,DF->BTDF", "BTHK,KHD->BTD"]
)
def test_equations_of_other_products_are_refused(equation):
    """They would be computed as another product in silence."""
    with pytest.raises(ValueError, match="the weight must begin with the last axes of x"):
        einsum(equation, jnp.ones((4, 4, 4)), jnp.ones((4, 4)))


def test_a_bias_is_added_before_the_only_rounding():
    x, w, b = (
        jnp.asarray(normal(50, 8), jnp.bfloat16),
        jnp.asarray(normal(8, 6, seed=1), jnp.bfloat16),
        normal(6, seed=2),
    )
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64) + b
    off = np.abs(np.asarray(einsum("BTD,DF->BTF", x, w, b), np.float64) - exact)
    if jax.default_backend() == "cpu":
        assert np.all(off <= 2.0**-8 * np.abs(exact) + 1e-6)
    else:  # other backends round the product, the bias and their sum
        assert np.all(off <= 2.0**-8 * (np.abs(exact) + np.abs(exact - b) + np.abs(b)))


def test_products_accumulate_in_float32():
    # A sum of ones in bfloat16 would stop at 256.
    x, w = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((4096, 1))
    assert einsum("BTD,DF->BTF", x, w)[0, 0] == 4096
