"""RMSNorm and the LayerNorm algorithms: within rounding of float64, at hard inputs, and against
PyTorch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from references import numpy_model
from running import slow

from lm.config import ModelConfig
from lm.layers import norms as norms_module
from lm.layers.layer_norms import LAYER_NORMS, layer_norm
from lm.layers.norms import rms_norm

EXACT = ("two_pass", "welford", "chan")
EPS = 1e-5
UNIT = 2.0**-24  # half the spacing of float32 numbers around 1


@functools.partial(jax.jit, static_argnames=("algorithms", "eps", "ddof", "block_size"))
def compiled(x, scale, bias, algorithms, **options):
    return {name: layer_norm(x, scale, bias, algorithm=name, **options) for name in algorithms}


def norms(x, scale=None, bias=None, *, algorithms=tuple(LAYER_NORMS), **options):
    """Return outputs by algorithm as float64, compiled as one function, because compiling dominates
    the time.
    """
    return {
        k: np.asarray(y, np.float64)
        for k, y in compiled(x, scale, bias, algorithms, **options).items()
    }


jit_rms_norm = jax.jit(rms_norm, static_argnames="eps")


def value_and_pullback(f, x, g):
    """Return f(x) and the gradient of sum(g f(x))."""

    def both(x, g):
        y, vjp = jax.vjp(f, x)
        return y, vjp(g)[0]

    y, dx = jax.jit(both)(x, g)
    return np.asarray(y), np.asarray(dx)


def reference(x, scale=1.0, bias=0.0, *, algorithm="two_pass", ddof=0):
    c = dataclasses.replace(
        ModelConfig(), norm="layer", norm_algorithm=algorithm, norm_ddof=ddof, norm_eps=EPS
    )
    return numpy_model.norm(c, {"scale_D": scale, "bias_D": bias}, np.asarray(x, np.float64))


def rounding(x, y):
    """Return a bound of the error in float32: log2(n) roundings of the mean's pairwise sum, and a
    few of the result.
    """
    x = np.asarray(x, np.float64)
    sigma = np.sqrt(x.var(-1, keepdims=True) + EPS)
    largest = np.abs(x).max(-1, keepdims=True)
    return (2 + np.log2(x.shape[-1])) * UNIT * (1 + np.abs(y) + largest / sigma)


@pytest.mark.parametrize(
    ("width", "options"),
    [
        *((width, {}) for width in (1, 3, 64, 4096)), *(slow(width, {}) for width in (2, 63, 100, 768)),
        *((100, {"block_size": n}) for n in (1, 7, 1000)), *(slow(100, {"block_size": n}) for n in (2, 99)),
        *((10, {"ddof": n}) for n in (1, 9)),
    ],
)  # fmt: skip
def test_equals_float64_at_all_widths_and_offsets_and_with_an_outlier(width, options):
    x = normal(16, width)
    outlier = np.where(np.arange(width) == 0, np.float32(1e4), x)
    algorithms = EXACT if width == 1 or "ddof" in options else tuple(LAYER_NORMS)
    for inputs in (*(x + np.float32(offset) for offset in (0, -1, 100, 1e4)), outlier):
        for name, out in norms(inputs, algorithms=algorithms, **options).items():
            y = reference(inputs, algorithm=name, ddof=options.get("ddof", 0))
            assert np.all(np.abs(out - y) <= rounding(inputs, y)), name


@pytest.mark.parametrize("algorithm", LAYER_NORMS)
def test_constant_rows_give_the_bias_and_a_finite_gradient(algorithm):
    x = np.repeat(np.float32([[0], [1], [-1 / 3], [1234.5]]), 100, axis=1)
    scale, bias = np.full(100, 2, np.float32), np.arange(100, dtype=np.float32)
    y, dx = value_and_pullback(
        lambda x: layer_norm(x, scale, bias, algorithm=algorithm), x, normal(*x.shape)
    )
    assert np.all(np.abs(y - bias) <= 2 * rounding(x, np.zeros_like(x)) + 2 * UNIT * bias)
    assert np.all(np.isfinite(dx))


@pytest.mark.parametrize(
    ("algorithm", "ddof"),
    [("two_pass", 0), ("welford", 0), ("chan", 0), ("chan", 1), ("running_mean", 0)],
)
def test_gradients_equal_finite_differences(algorithm, ddof, finite_difference):
    x, scale, bias, weights = (
        2 + normal(2, 3, 7),
        1 + normal(7, seed=1) / 4,
        normal(7, seed=2),
        normal(2, 3, 7, seed=3),
    )

    def loss64(*args):
        return np.sum(weights * reference(*args, algorithm=algorithm, ddof=ddof) ** 2)

    def loss(*args):
        return jnp.sum(
            weights * layer_norm(*args, algorithm=algorithm, ddof=ddof, block_size=3) ** 2
        )

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias)
    for g, expected in zip(gradients, finite_difference(loss64, x, scale, bias), strict=True):
        np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-5)


def test_exact_algorithms_have_the_same_gradient_at_a_large_offset():
    x, g = 100 + normal(4, 200), normal(4, 200, seed=1)

    @jax.jit
    def gradients(x, centred):
        pullbacks = [
            jax.vjp(lambda x, a=a: layer_norm(x, None, None, algorithm=a), x)[1] for a in EXACT
        ]
        expected = jax.vjp(lambda x: layer_norm(x, None, None), centred)[1](g)[0]
        return expected, [pullback(g)[0] for pullback in pullbacks]

    expected, found = gradients(x, x - 100)
    for dx in found:
        # The rounding error of the mean is a few units of 100; y enters dx with factors of about 3.
        np.testing.assert_allclose(dx, expected, atol=20 * 100 * UNIT)


def test_equals_torch(torch_answers):
    a = torch_answers["norms"]
    x, scale, bias = (np.float32(a[k]) for k in ("x", "scale", "bias"))
    np.testing.assert_allclose(jit_rms_norm(x, scale), a["rms_norm"], rtol=1e-6, atol=1e-6)
    for algorithm in EXACT:
        g = 3 * np.float32(a["layer_norm"]) ** 2
        y, dx = value_and_pullback(
            lambda x, b=algorithm: layer_norm(x, scale, bias, algorithm=b), x, g
        )
        np.testing.assert_allclose(y, a["layer_norm"], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(dx, a["layer_norm_d_x"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_inputs_have_float32_statistics_and_a_16_bit_result(dtype):
    # The squares of 300 overflow float16; sums of 4096 features in 16 bits would be wrong in the
    # first digit.
    x = jnp.asarray(normal(4, 4096) + 300, dtype)
    x64 = np.asarray(x, np.float64)
    scale = 1 + normal(4096, seed=1) / 8
    expected = {name: reference(x64, scale, algorithm=name) for name in LAYER_NORMS}
    expected["rms_norm"] = x64 / np.sqrt(np.mean(x64**2, -1, keepdims=True) + EPS) * scale
    functions = {
        name: functools.partial(layer_norm, bias=None, algorithm=name) for name in LAYER_NORMS
    }
    functions["rms_norm"] = rms_norm
    outs = jax.jit(lambda x, scale: {name: f(x, scale) for name, f in functions.items()})(x, scale)
    half_a_step = jnp.finfo(dtype).eps / 2
    for name, y in expected.items():
        error = np.abs(np.asarray(outs[name], np.float64) - y)
        assert np.all(error <= half_a_step * np.abs(y) + 2 * rounding(x64, y)), name
        d_x, d_scale = jax.eval_shape(
            lambda x, s, f=functions[name]: jax.vjp(f, x, s)[1](x), x, scale
        )
        assert (outs[name].dtype, d_x.dtype, d_scale.dtype) == (dtype, dtype, jnp.float32), name


def test_rms_norm_has_eps_inside_the_root_and_the_right_gradient(finite_difference):
    x, scale = 0.01 * normal(3, 5), 1 + normal(5, seed=1) / 4  # small, so that eps matters

    def reference64(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-4) * scale

    np.testing.assert_allclose(jit_rms_norm(x, scale, eps=1e-4), reference64(x, scale), rtol=1e-6)
    weights = normal(3, 5, seed=2)
    gradients = jax.jit(jax.grad(lambda x, s: jnp.sum(weights * rms_norm(x, s, eps=1e-4)), (0, 1)))(
        x, scale
    )
    expected = finite_difference(
        lambda x, s: np.sum(weights * reference64(x, s)), x, scale, step=1e-6
    )
    for g, e in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(jit_rms_norm(x, None), jit_rms_norm(x, np.ones(5, np.float32)))


def test_scale_and_bias_are_optional_and_leading_axes_arbitrary():
    x = normal(2, 3, 4, 10)
    y, ones = norms(x), norms(x, np.ones(10, np.float32), np.zeros(10, np.float32))
    row, part = norms(x[0, 0, 0]), norms(x[1, 2])
    for name in LAYER_NORMS:
        np.testing.assert_array_equal(y[name], ones[name])
        np.testing.assert_allclose(y[name][1, 2], part[name], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(y[name][0, 0, 0], row[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (
            4,
            {"algorithm": "naive"},
            "'naive'; expected one of two_pass, welford, chan, running_mean",
        ),
        (4, {"ddof": 4}, "ddof is 4 at width 4"),
        (4, {"ddof": -1}, "ddof is -1"),
        (4, {"algorithm": "running_mean", "ddof": 1}, "leave it at 0"),
        (1, {"algorithm": "running_mean"}, "width of at least 2"),
        (4, {"block_size": 0}, "at least 1"),
    ],
)
def test_invalid_arguments_raise(width, options, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(jnp.ones((2, width)), None, None, **options)


@pytest.mark.parametrize("scale_shape", [None, (64,), (4, 16)])
def test_the_closed_form_derivative_of_rms_norm_is_that_of_jax(scale_shape):
    """Accelerators use the closed form, CPUs JAX's own derivative."""
    x = normal(3, 5, *(scale_shape or (64,)))
    scale = None if scale_shape is None else 1 + normal(*scale_shape, seed=1)
    out_gradient = normal(*x.shape, seed=2)

    def found(norm):
        y, vjp = jax.vjp(lambda x, scale: norm(x, scale, 1e-5), x, scale)
        return y, *(g for g in vjp(out_gradient) if g is not None)

    plain = lambda x, scale, eps: norms_module._rms_norm_forward(x, scale, eps)[0]  # noqa: E731
    ours, theirs = jax.jit(lambda: (found(norms_module._rms_norm), found(plain)))()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
