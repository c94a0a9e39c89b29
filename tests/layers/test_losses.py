"""Cross-entropy, unchunked and chunked: against float64, finite differences and PyTorch, and its
memory.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core

from lm.kernels.platform import compiling_for
from lm.layers.losses import Head, chunked_softmax_cross_entropy, head_logits, softmax_cross_entropy

B, T, D, V = 3, 7, 5, 11
RNG = np.random.default_rng(0)
H, W, BIAS = (RNG.standard_normal(shape).astype(np.float32) for shape in ((B, T, D), (D, V), (V,)))
TARGETS = RNG.integers(V, size=(B, T))
# Unequal weights with a zero, as for padding; few enough digits that sums are exact.
WEIGHTS = np.float32(RNG.integers(0, 5, size=(B, T)) / 4)
assert (WEIGHTS == 0).any()


def reference(h, w, bias, weights, *, softcap=None, z_loss=0.0, smoothing=0.0):
    logits = np.asarray(h, np.float64) @ w + bias
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    log_z = np.log(np.exp(logits).sum(-1))
    n = logits.shape[-1]
    p = (1 - smoothing) * np.eye(n)[TARGETS] + smoothing / n
    nll = -np.sum(p * (logits - log_z[..., None]), axis=-1)
    return np.sum(weights * (nll + z_loss * log_z**2))


@jax.jit
@functools.partial(jnp.vectorize, signature="(v),()->()")
def nll(logits_V, target):
    """Return the loss of each token."""
    return softmax_cross_entropy(logits_V, target)[0]


def whole(h, w, bias, weights, *, softcap=None, transposed=False, **added):
    logits = head_logits(h, Head(w, bias, softcap, transposed))
    sums = softmax_cross_entropy(logits, TARGETS, weights, **added)
    return sums.objective, sums.weight


def chunked(h, w, bias, weights, *, chunk_size=6, softcap=None, transposed=False, **added):
    head = Head(w, bias, softcap, transposed)
    sums = chunked_softmax_cross_entropy(h, head, TARGETS, weights, chunk_size=chunk_size, **added)
    return sums.objective, sums.weight


@functools.cache  # compiling dominates the time
def sums_and_gradients(f, **options):
    """Return a function that returns (loss_sum, weight_sum) and the gradients of 3 loss_sum /
    weight_sum.
    """

    def loss(*args):
        loss_sum, weight_sum = f(*args, **options)
        return 3 * loss_sum / weight_sum, (loss_sum, weight_sum)

    argnums = (0, 1, 2, 3)

    def both(*args):
        gradients, sums = jax.grad(loss, argnums, has_aux=True)(*args)
        return sums, gradients

    return jax.jit(both)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"softcap": 3.0, "z_loss": 0.1, "smoothing": 0.3}]
)
def test_whole_and_chunked_equal_float64_with_finite_difference_gradients(
    options, finite_difference
):
    def loss64(h, w, bias, weights):
        return 3 * reference(h, w, bias, weights, **options) / weights.sum()

    expected = finite_difference(loss64, H, W, BIAS, WEIGHTS)
    for f in (whole, chunked):
        (loss_sum, weight_sum), gradients = sums_and_gradients(f, **options)(H, W, BIAS, WEIGHTS)
        np.testing.assert_allclose(loss_sum, reference(H, W, BIAS, WEIGHTS, **options), rtol=1e-6)
        assert weight_sum == WEIGHTS.sum()
        for g, e in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)


# One position of each example at a time; two, which do not divide the 7; more than there are.
@pytest.mark.parametrize("chunk_size", [1, 6, 1000])
def test_chunked_equals_whole_for_any_chunk_size(chunk_size):
    (loss, count), gradients = sums_and_gradients(whole)(H, W, BIAS, WEIGHTS)
    (chunked_loss, chunked_count), found = sums_and_gradients(chunked, chunk_size=chunk_size)(
        H, W, BIAS, WEIGHTS
    )
    np.testing.assert_allclose(chunked_loss, loss, rtol=1e-6)
    assert chunked_count == count
    for g, e in zip(found, gradients, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)
    undifferentiated = jax.jit(functools.partial(chunked, chunk_size=chunk_size))(
        H, W, BIAS, WEIGHTS
    )
    np.testing.assert_allclose(undifferentiated[0], loss, rtol=1e-6)


def test_a_tied_head_is_the_transposed_embedding_table():
    sums, (d_h, d_w, d_bias, _) = sums_and_gradients(whole)(H, W, BIAS, WEIGHTS)
    for f in (whole, chunked):
        tied_sums, tied = sums_and_gradients(f, transposed=True)(H, W.T, BIAS, WEIGHTS)
        np.testing.assert_allclose(tied_sums, sums, rtol=1e-6)
        for g, e in zip(tied[:3], (d_h, d_w.T, d_bias), strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)


def test_bias_and_weights_may_be_absent():
    zeros, ones = np.zeros(V, np.float32), np.ones((B, T), np.float32)
    for f in (whole, chunked):
        without = jax.jit(jax.value_and_grad(lambda h, w, f=f: f(h, w, None, None)[0], (0, 1)))(
            H, W
        )
        (loss, count), (d_h, d_w, _, _) = sums_and_gradients(f)(H, W, zeros, ones)
        assert count == B * T
        np.testing.assert_allclose(without[0], loss, rtol=1e-6)
        for g, e in zip(without[1], (d_h, d_w), strict=True):
            np.testing.assert_allclose(3 / count * g, e, rtol=1e-5, atol=1e-6)


def test_equals_torch(torch_answers):
    a = torch_answers["losses"]
    logits = np.float32(a["logits"])
    np.testing.assert_allclose(nll(logits, np.array(a["targets"])), a["nll"], rtol=1e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda logits: softmax_cross_entropy(logits, a["targets"])[0]))(
        logits
    )
    np.testing.assert_allclose(gradient, a["d_logits"], rtol=1e-5, atol=1e-6)


def test_losses_accept_any_leading_axes():
    h, targets = np.stack([H, 2 * H, H - 1, H]), np.stack([TARGETS] * 4)
    f = jax.jit(
        lambda h, targets: chunked_softmax_cross_entropy(h, Head(W, BIAS), targets, chunk_size=24)[
            0
        ]
    )
    expected = jax.jit(
        lambda h, targets: softmax_cross_entropy(head_logits(h, Head(W, BIAS)), targets)[0]
    )
    np.testing.assert_allclose(f(h, targets), expected(h, targets), rtol=1e-6)
    np.testing.assert_allclose(
        f(h[0, 0], targets[0, 0]), expected(h[0, 0], targets[0, 0]), rtol=1e-6
    )


def test_large_logits_are_stable_and_16_bit_inputs_have_float32_losses():
    logits = jnp.array([[1000.0, 0, -1000], [-1e4, 0, -1e4]])
    np.testing.assert_allclose(nll(logits, jnp.array([1, 1])), [1000, 0])
    h = jnp.asarray(H, jnp.bfloat16)
    logits = np.asarray(h, np.float64) @ np.asarray(jnp.asarray(W, jnp.bfloat16), np.float64) + BIAS
    found = head_logits(h, Head(W, BIAS))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
    (a, _), whole_gradients = sums_and_gradients(whole)(h, W, BIAS, WEIGHTS)
    (b, _), gradients = sums_and_gradients(chunked)(h, W, BIAS, WEIGHTS)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    assert [g.dtype for g in gradients] == [jnp.bfloat16] + 3 * [jnp.float32]
    for g, e in zip(gradients, whole_gradients, strict=True):
        # The factor 3 / weight_sum is applied before or after rounding to bfloat16: two roundings
        # of 2^-8 on each side.
        g, e = np.float32(g), np.float32(e)
        np.testing.assert_allclose(g, e, rtol=4 * 2.0**-8, atol=2.0**-8 * np.abs(e).max())


@pytest.mark.parametrize("transposed", [False, True])
def test_rounded_logits_are_bfloat16_numbers_in_float32(transposed):
    h = jnp.asarray(H, jnp.bfloat16)
    w = W.T if transposed else W
    exact = head_logits(h, Head(w, transposed=transposed))
    for target in ("cpu", "gpu"):
        with compiling_for(target):
            found = head_logits(h, Head(w, transposed=transposed, rounded=True))
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16).astype(jnp.float32))


def test_on_a_gpu_the_sum_in_one_pass_is_logsumexp_with_its_gradient():
    with_limits = jnp.array([[-jnp.inf, 0, -jnp.inf], [-jnp.inf, -1e30, 1e30], [1e4, -1e4, 1e4]])
    for logits in (with_limits, jnp.array(RNG.standard_normal((40, 300)) * 20, jnp.float32)):
        targets = jnp.full(len(logits), 1)

        def total(logits, targets=targets):
            return softmax_cross_entropy(logits, targets, z_loss=1e-35)[0]

        expected = jax.value_and_grad(total)(logits)
        with compiling_for("gpu"):
            found = jax.value_and_grad(total)(logits)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)


def largest_intermediate(f, *args):
    """Return the size of the largest result of any operation of f, at any depth."""

    def arrays(jaxpr):
        for equation in jaxpr.eqns:
            yield from (out.aval.size for out in equation.outvars if hasattr(out.aval, "size"))
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
            ):
                if isinstance(inner, jax_core.ClosedJaxpr | jax_core.Jaxpr):
                    yield from arrays(getattr(inner, "jaxpr", inner))

    return max(arrays(jax.make_jaxpr(f)(*args).jaxpr))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_chunked_loss_has_no_intermediate_as_large_as_all_logits(transposed):
    n, d, v, chunk = 512, 8, 256, 64
    h, targets = jnp.ones((4, n // 4, d)), jnp.zeros((4, n // 4), jnp.int32)
    w = jnp.ones((v, d) if transposed else (d, v))

    def loss(h, w, chunk_size):
        if chunk_size is None:
            return softmax_cross_entropy(head_logits(h, Head(w, transposed=transposed)), targets)[0]
        return chunked_softmax_cross_entropy(
            h, Head(w, transposed=transposed), targets, chunk_size=chunk_size
        )[0]

    for f in (loss, jax.value_and_grad(loss, (0, 1))):
        # the unchunked loss has all logits
        assert largest_intermediate(lambda h, w, f=f: f(h, w, None), h, w) >= n * v
        assert largest_intermediate(lambda h, w, f=f: f(h, w, chunk), h, w) <= chunk * v
