"""Feed-forward layers and activations: against PyTorch and NumPy, dtypes, and default widths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from running import slow

from lm.layers import variants
from lm.layers.feed_forward import ACTIVATIONS, gelu, glu, mlp
from lm.parallel.collectives import save_all_but_gathered

X, W_IN, W_UP, W_OUT = normal(2, 3, 5), normal(5, 7, seed=1), normal(5, 7, seed=2), normal(7, 5, seed=3)
B_IN, B_UP, B_OUT = normal(7, seed=4), normal(7, seed=5), normal(5, seed=6)


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activations_equal_torch(name, torch_answers):
    a = torch_answers["activations"]
    out = np.asarray(jax.jit(ACTIVATIONS[name])(np.float32(a["x"])))
    # For large negative x the tanh form computes 1 + tanh near 0: its error is a rounding near 1, times x / 2.
    assert np.all(np.abs(out - a[name]) <= 1e-6 * np.abs(a[name]) + 2.0**-23 * np.abs(a["x"]))


@pytest.mark.parametrize("name", ["relu", "sigmoid"])
def test_values_and_derivatives_are_those_of_jax_nn(name):
    x = jnp.linspace(-30, 30, 241)  # with 0
    ours, theirs = ACTIVATIONS[name], getattr(jax.nn, name)
    np.testing.assert_array_equal(ours(x), theirs(x))
    np.testing.assert_array_equal(jax.vmap(jax.grad(ours))(x), jax.vmap(jax.grad(theirs))(x))


def test_relu_squared_is_the_square_of_relu():
    np.testing.assert_array_equal(ACTIVATIONS["relu_squared"](jnp.array([-3.0, 0, 0.5, 3])), [0, 0, 0.25, 9])


def test_mlp_equals_numpy():
    expected = np.maximum(X.astype(np.float64) @ W_IN + B_IN, 0) @ W_OUT + B_OUT
    np.testing.assert_allclose(
        mlp(X, W_IN, W_OUT, activation="relu", b_in=B_IN, b_out=B_OUT), expected, rtol=1e-5, atol=1e-5
    )
    without = np.maximum(X.astype(np.float64) @ W_IN, 0) @ W_OUT
    np.testing.assert_allclose(mlp(X, W_IN, W_OUT, activation="relu"), without, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends compute activations in 16 bits")
@pytest.mark.parametrize("name", ["silu", slow("gelu"), slow("gelu_tanh")])
def test_16_bit_activations_are_rounded_once_on_a_cpu(name):
    x = jnp.asarray(np.linspace(-4, 4, 999), jnp.bfloat16)[:, None]
    one = jnp.ones((1, 1), jnp.bfloat16)
    exact = np.float64(ACTIVATIONS[name](x.astype(jnp.float32)))
    found = np.float64(mlp(x, one, one, activation=name))  # products with 1 round nothing
    assert np.all(np.abs(found - exact) <= 2.0**-8 * np.abs(exact))


def test_glu_equals_numpy():
    x = X.astype(np.float64)
    gate, up = x @ W_IN + B_IN, x @ W_UP + B_UP
    expected = (gate / (1 + np.exp(-gate)) * up) @ W_OUT + B_OUT
    biases = dict(b_gate=B_IN, b_up=B_UP, b_down=B_OUT)
    np.testing.assert_allclose(glu(X, W_IN, W_UP, W_OUT, activation="silu", **biases), expected, rtol=1e-5, atol=1e-5)
    gate, up = x @ W_IN, x @ W_UP
    expected = (gate / (1 + np.exp(-gate)) * up) @ W_OUT
    np.testing.assert_allclose(glu(X, W_IN, W_UP, W_OUT, activation="silu"), expected, rtol=1e-5, atol=1e-5)
    exact = (np.asarray(gelu(jnp.float32(gate))) * up) @ W_OUT
    np.testing.assert_allclose(glu(X, W_IN, W_UP, W_OUT, activation="gelu"), exact, rtol=1e-5, atol=1e-5)
    dauphin = (up / (1 + np.exp(-gate))) @ W_OUT
    np.testing.assert_allclose(glu(X, W_IN, W_UP, W_OUT, activation="sigmoid"), dauphin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [slow("silu"), slow("gelu"), "gelu_tanh"])
def test_gradients_equal_those_of_the_formula_and_keep_no_parts_of_the_activation(name):
    def plain_glu(x, w_gate, w_up, w_down):
        return (ACTIVATIONS[name](x @ w_gate) * (x @ w_up)) @ w_down

    def plain_mlp(x, w_in, w_out):
        return ACTIVATIONS[name](x @ w_in) @ w_out

    for f, plain, weights in ((glu, plain_glu, (W_IN, W_UP, W_OUT)), (mlp, plain_mlp, (W_IN, W_OUT))):
        y, vjp = jax.vjp(lambda *a, f=f: f(*a, activation=name), X, *weights)
        expected = jax.vjp(plain, X, *weights)[1](y)
        for a, b in zip(vjp(y), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        outer = jax.checkpoint(lambda *a, f=f: f(*a, activation=name), policy=save_all_but_gathered)  # as under fsdp
        for found in (vjp, jax.vjp(outer, X, *weights)[1]):
            hidden = [a for a in jax.tree.leaves(found) if a.size == 2 * 3 * 7]
            assert len(hidden) == len(weights)  # the inputs of the activation and of the last product


def test_the_result_has_the_dtype_of_the_input_and_gradients_those_of_the_weights():
    x = jnp.asarray(X, jnp.bfloat16)

    def f(x, w_gate, w_up, w_down, b_up):
        return glu(x, w_gate, w_up, w_down, activation="silu", b_up=b_up)

    y, vjp = jax.vjp(f, x, W_IN, W_UP, W_OUT, B_UP)
    assert y.dtype == jnp.bfloat16
    assert [g.dtype for g in jax.eval_shape(vjp, y)] == [jnp.bfloat16] + 4 * [jnp.float32]


@pytest.mark.parametrize(
    ("d_model", "kind", "d_ff"),
    # 1344: CS336. 2048: exactly 8/3 of 768. 8/3 of 4096 is 170.67 * 64, rounded up to 171 * 64 = 10944. 8/3 of 64 is
    # 2.67 * 64, rounded up to 3 * 64. 8/3 of 8 is 21, raised to 64.
    [
        (512, "glu", 1344),
        (768, "glu", 2048),
        (4096, "glu", 10944),
        (64, "glu", 192),
        (8, "glu", 64),
        (512, "mlp", 2048),
    ],
)
def test_known_default_widths(d_model, kind, d_ff):
    assert variants.FEED_FORWARDS[kind].default_d_ff(d_model) == d_ff


def test_default_width_is_the_nearest_multiple_of_64():
    for d_model in range(24, 600):
        assert abs(variants.FEED_FORWARDS["glu"].default_d_ff(d_model) - 8 / 3 * d_model) <= 32
