"""Feed-forward layers and activations: against PyTorch and NumPy, dtypes, and default widths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from references import numpy_model
from running import slow

from lm import model
from lm.config import ModelConfig
from lm.here import Here
from lm.layers.feed_forward import ACTIVATIONS
from lm.parallel.collectives import save_all_but_gathered

X, W_IN, W_UP, W_OUT = (
    normal(2, 3, 5),
    normal(5, 7, seed=1),
    normal(5, 7, seed=2),
    normal(7, 5, seed=3),
)
B_IN, B_UP, B_OUT = normal(7, seed=4), normal(7, seed=5), normal(5, seed=6)


def apply(function, names: str, x, *arrays, activation):
    """Return a feed-forward layer of lm/model.py with these parameters."""
    p = dict(zip(names.split(), arrays, strict=False))
    here = Here(None, None, c=ModelConfig(activation=activation), p=p)
    return function(here, x)


def mlp(x, w_in, w_out, b_in=None, b_out=None, *, activation):
    return apply(
        model.mlp,
        "w_in_DF w_out_FD b_in_F b_out_D",
        x,
        w_in,
        w_out,
        b_in,
        b_out,
        activation=activation,
    )


def glu(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None, *, activation):
    names = "w_gate_DF w_up_DF w_down_FD b_gate_F b_up_F b_down_D"
    return apply(
        model.glu, names, x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation=activation
    )


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activations_equal_torch(name, torch_answers):
    a = torch_answers["activations"]
    out = np.asarray(jax.jit(ACTIVATIONS[name])(np.float32(a["x"])))
    # For large negative x the tanh form computes 1 + tanh near 0: its error is a rounding near 1,
    # times x / 2.
    assert np.all(np.abs(out - a[name]) <= 1e-6 * np.abs(a[name]) + 2.0**-23 * np.abs(a["x"]))


@pytest.mark.parametrize("name", ["relu", "sigmoid"])
def test_values_and_derivatives_are_those_of_jax_nn(name):
    x = jnp.linspace(-30, 30, 241)  # with 0
    ours, theirs = ACTIVATIONS[name], getattr(jax.nn, name)
    np.testing.assert_array_equal(ours(x), theirs(x))
    np.testing.assert_array_equal(jax.vmap(jax.grad(ours))(x), jax.vmap(jax.grad(theirs))(x))


def test_mlp_and_glu_equal_numpy_with_and_without_biases():
    x = X.astype(np.float64)
    for b_in, b_up, b_out in ((B_IN, B_UP, B_OUT), (None, None, None)):
        gate, up = x @ W_IN + (b_in is not None) * B_IN, x @ W_UP + (b_in is not None) * B_UP
        for name, f in numpy_model.ACTIVATIONS.items():
            with_mlp = mlp(X, W_IN, W_OUT, activation=name, b_in=b_in, b_out=b_out)
            with_glu = glu(
                X, W_IN, W_UP, W_OUT, activation=name, b_gate=b_in, b_up=b_up, b_down=b_out
            )
            for found, hidden in ((with_mlp, f(gate)), (with_glu, f(gate) * up)):
                expected = hidden @ W_OUT + (b_in is not None) * B_OUT
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="other backends compute activations in 16 bits"
)
@pytest.mark.parametrize("name", ["silu", slow("gelu"), slow("gelu_tanh")])
def test_16_bit_activations_are_rounded_once_on_a_cpu(name):
    x = jnp.asarray(np.linspace(-4, 4, 999), jnp.bfloat16)[:, None]
    one = jnp.ones((1, 1), jnp.bfloat16)
    exact = np.float64(ACTIVATIONS[name](x.astype(jnp.float32)))
    found = np.float64(mlp(x, one, one, activation=name))  # products with 1 round nothing
    assert np.all(np.abs(found - exact) <= 2.0**-8 * np.abs(exact))


@pytest.mark.parametrize("name", [slow("silu"), slow("gelu"), "gelu_tanh"])
def test_gradients_equal_those_of_the_formula_and_keep_no_parts_of_the_activation(name):
    def plain_glu(x, w_gate, w_up, w_down):
        return (ACTIVATIONS[name](x @ w_gate) * (x @ w_up)) @ w_down

    def plain_mlp(x, w_in, w_out):
        return ACTIVATIONS[name](x @ w_in) @ w_out

    for f, plain, weights in (
        (glu, plain_glu, (W_IN, W_UP, W_OUT)),
        (mlp, plain_mlp, (W_IN, W_OUT)),
    ):
        y, vjp = jax.vjp(lambda *a, f=f: f(*a, activation=name), X, *weights)
        expected = jax.vjp(plain, X, *weights)[1](y)
        for a, b in zip(vjp(y), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        # as under fsdp
        outer = jax.checkpoint(lambda *a, f=f: f(*a, activation=name), policy=save_all_but_gathered)
        for found in (vjp, jax.vjp(outer, X, *weights)[1]):
            hidden = [a for a in jax.tree.leaves(found) if a.size == 2 * 3 * 7]
            # the inputs of the activation and of the last product
            assert len(hidden) == len(weights)


def test_the_result_has_the_dtype_of_the_input_and_gradients_those_of_the_weights():
    x = jnp.asarray(X, jnp.bfloat16)

    def f(x, w_gate, w_up, w_down, b_up):
        return glu(x, w_gate, w_up, w_down, activation="silu", b_up=b_up)

    y, vjp = jax.vjp(f, x, W_IN, W_UP, W_OUT, B_UP)
    assert y.dtype == jnp.bfloat16
    assert [g.dtype for g in jax.eval_shape(vjp, y)] == [jnp.bfloat16] + 4 * [jnp.float32]


def test_default_widths_of_glu_are_the_nearest_multiples_of_64_and_those_of_mlp_4_times_d_model():
    def of_glu(d_model):
        return model.default_d_ff(ModelConfig(ffn="glu", d_model=d_model))

    # 1344: CS336. 2048: exactly 8/3 of 768. 8/3 of 4096 is 170.67 * 64, rounded up to 171 * 64. 64
    # is the least width.
    assert [of_glu(d_model) for d_model in (512, 768, 4096, 8)] == [1344, 2048, 10944, 64]
    assert max(abs(of_glu(d_model) - 8 / 3 * d_model) for d_model in range(24, 600)) <= 32
    assert model.default_d_ff(ModelConfig(ffn="mlp", d_model=512)) == 2048
