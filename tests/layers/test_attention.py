"""Attention: all implementations against float64, PyTorch and finite differences, for all kinds of
masks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from running import slow

from lm.layers import attention
from lm.layers.attention import UNLIMITED, Mask, causal_attention, choose_implementation

T, H, K = 7, 4, 8
ON_GPU = jax.default_backend() == "gpu"
MASK = [field.name for field in dataclasses.fields(Mask)]
STATIC = ("window", "softcap", "scale", "implementation", "contiguous")


def attention_with(q, k, v, **options):
    """Call causal_attention with the fields of the mask as keyword arguments."""
    mask = Mask(**{name: options.pop(name) for name in MASK if name in options})
    return causal_attention(q, k, v, mask, **options)


attend = jax.jit(attention_with, static_argnames=STATIC)


def inputs(batch=(2,), n_kv_heads=2, n_queries=T, n_keys=T):
    q = normal(*batch, n_queries, H, K)
    return q, *(normal(*batch, n_keys, n_kv_heads, K, seed=seed) for seed in (1, 2))


def everyone(*, q_positions, k_positions, q_segments=None, k_segments=None, window=UNLIMITED):
    """Return which query sees which key, as the docstring of Mask defines it: bool (B, T, S)."""
    sees = np.zeros((2, q_positions.shape[-1], k_positions.shape[-1]), bool)
    q_positions, k_positions = (
        np.broadcast_to(q_positions, sees.shape[:2]),
        np.broadcast_to(k_positions, sees[:, 0].shape),
    )
    for b, t, s in np.ndindex(sees.shape):
        p, at = q_positions[b, t], k_positions[b, s]
        same = q_segments is None or q_segments[b, t] == k_segments[b, s]
        sees[b, t, s] = 0 <= at <= p and at > p - window and same
    return sees


def reference(q, k, v, sees, softcap=None, scale=K**-0.5):
    """Compute attention in float64, one example, query and head at a time."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        g = h // (q.shape[2] // k.shape[2])
        seen = sees[b, t]
        if not seen.any():
            continue
        scores = k[b, seen, g] @ q[b, t, h] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, seen, g]
    return out


PLAIN = {"q_positions": np.arange(T), "k_positions": np.arange(T)}
SEGMENTS = np.array([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 9]])
# A cache: queries after some of the keys, empty slots (-1), keys in any order, different positions
# in each example.
CACHE = {
    "q_positions": np.array([[5, 6, 7], [2, 3, 4]]),
    "k_positions": np.array([[0, 1, 2, 3, 4, 5, 6, 7], [4, 3, 2, 1, 0, -1, -1, -1]]),
}
MASKS = {
    "causal": PLAIN,
    "window": PLAIN | {"window": 3},
    "self": PLAIN | {"window": 1},
    "segments": PLAIN | {"q_segments": SEGMENTS, "k_segments": SEGMENTS},
    "segments and window": PLAIN | {"q_segments": SEGMENTS, "k_segments": SEGMENTS, "window": 2},
    "cache": CACHE,
    "cache and window": CACHE | {"window": 4},
}


@jax.jit
def attend_with_both(q, k, v, options):
    """Return outputs by implementation. The window is traced, to compile once: compiling dominates
    the test's time.
    """
    return {
        name: attention_with(q, k, v, implementation=name, **options) for name in ("einsum", "xla")
    }


@pytest.mark.parametrize(
    ("mask", "n_kv_heads"), [*((mask, 2) for mask in MASKS), ("window", 1), ("window", 4)]
)
def test_equals_float64_for_all_masks_and_implementations(mask, n_kv_heads):
    options = {"window": UNLIMITED} | MASKS[mask]
    n_queries, n_keys = options["q_positions"].shape[-1], options["k_positions"].shape[-1]
    q, k, v = inputs(n_kv_heads=n_kv_heads, n_queries=n_queries, n_keys=n_keys)
    expected = reference(q, k, v, everyone(**options))
    for name, out in attend_with_both(q, k, v, options).items():
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_equals_torch(torch_answers):
    a = torch_answers["attention"]
    q, k, v = (np.float32(a[name]) for name in "qkv")
    for name, window in (("causal", UNLIMITED), ("window_3", 3)):
        options = {"q_positions": np.arange(6), "k_positions": np.arange(6), "window": window}
        for out in attend_with_both(q, k, v, options).values():
            np.testing.assert_allclose(out, a[name], rtol=1e-5, atol=1e-6)


def gradients(out_gradient, options):
    def loss(q, k, v):
        return jnp.sum(out_gradient * attention_with(q, k, v, **options))

    return jax.jit(jax.grad(loss, (0, 1, 2)))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_equal_finite_differences(softcap, finite_difference):
    options = {"q_positions": np.arange(3), "k_positions": np.arange(3), "window": 2}
    sees = everyone(**options)
    q, k, v = inputs(batch=(1,), n_queries=3, n_keys=3)
    weights = normal(*q.shape, seed=3)
    expected = finite_difference(
        lambda *qkv: np.sum(weights * reference(*qkv, sees, softcap=softcap)), q, k, v
    )
    for implementation in ("einsum",) if softcap else ("einsum", "xla"):
        found = gradients(
            weights, options | {"softcap": softcap, "implementation": implementation}
        )(q, k, v)
        for g, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["einsum", "xla"])
def test_a_query_without_visible_keys_returns_zeros_and_has_no_gradient(implementation):
    # Example 0: the cache is empty. Example 1: the first query is padding, the other two see keys.
    options = {
        "q_positions": np.array([[0, 1, 2], [-1, 0, 1]]),
        "k_positions": np.array([[-1, -1, -1], [0, 1, -1]]),
        "implementation": implementation,
    }
    q, k, v = inputs(n_queries=3, n_keys=3)
    out = np.asarray(attend(q, k, v, **options))
    blind = np.array([[True, True, True], [True, False, False]])
    assert np.all(out[blind] == 0)
    assert np.all(out[~blind] != 0)
    d_q, d_k, d_v = (np.asarray(g) for g in gradients(normal(*q.shape, seed=3), options)(q, k, v))
    assert np.all(d_q[blind] == 0)
    assert np.any(d_q[1, 2] != 0)
    for g in (d_k, d_v):
        assert np.all(g[0] == 0)
        assert np.all(g[1, 2] == 0)
        assert np.any(g[1, 0] != 0)


def test_attention_accepts_any_leading_axes():
    q, k, v = inputs(batch=(3, 2))
    options = PLAIN | {"q_segments": SEGMENTS, "k_segments": SEGMENTS, "window": UNLIMITED}
    whole, one = attend_with_both(q, k, v, options), attend_with_both(q[1], k[1], v[1], options)
    options |= {"q_segments": SEGMENTS[0], "k_segments": SEGMENTS[0]}
    alone = attend_with_both(q[0, 0], k[0, 0], v[0, 0], options)
    for name, out in whole.items():
        np.testing.assert_allclose(one[name], np.asarray(out)[1], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(alone[name], np.asarray(out)[0, 0], rtol=1e-6, atol=1e-6)


def test_bfloat16_inputs_have_a_float32_softmax():
    # 256 nearly equal weights: bfloat16 scores, or a sum in bfloat16, would have an error of
    # several percent.
    n = 256
    q, k, v = (jnp.asarray(normal(1, n, 2, K, seed=seed), jnp.bfloat16) for seed in (0, 1, 2))
    q = q * 0.1 + 8
    positions = {"q_positions": np.arange(n), "k_positions": np.arange(n)}
    sees = np.tril(np.ones((1, n, n), bool))
    expected = reference(q, k, v, sees)
    for implementation in ("einsum", "xla"):
        out = attend(q, k, v, implementation=implementation, **positions)
        assert out.dtype == jnp.bfloat16
        # The weights and the result are rounded to bfloat16, with a relative error of at most 2^-8
        # each.
        bound = 2.0**-8 * (
            np.abs(expected) + reference(q, k, np.abs(np.asarray(v, np.float64)), sees)
        )
        assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= 1.1 * bound + 1e-5)


def test_the_cudnn_path_has_the_same_mask_as_einsum(monkeypatch):
    """Without a GPU, jax.nn's XLA implementation replaces cuDNN and gets the same arguments."""
    real = jax.nn.dot_product_attention
    calls = []

    def stand_in(*args, implementation, **options):
        calls.append(implementation)
        return real(*args, implementation="xla", **options)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    n = T + 1  # with documents cuDNN needs even lengths
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in inputs(n_queries=n, n_keys=n))
    documents, positions = (
        np.arange(n) // 3,
        {"q_positions": np.arange(n), "k_positions": np.arange(n)},
    )
    for window, segments in ((None, None), (1, None), (3, None), (None, documents), (2, documents)):
        options = {"window": window, "q_segments": segments, "k_segments": segments} | positions
        # A new function each time: jit would reuse the implementation chosen before the platform
        # was patched.
        out = jax.jit(lambda q, o=options: attention_with(q, k, v, contiguous=True, **o))(q)
        expected = attend(q, k, v, implementation="einsum", **options)
        np.testing.assert_allclose(
            np.float32(out), np.float32(expected), rtol=2.0**-7, atol=2.0**-7
        )
    assert calls == ["cudnn"] * 5


@pytest.mark.parametrize(
    ("n", "softcap", "window"),
    [
        *((256, None, 100), (300, 5.0, None), (300, 5.0, 129), (256, None, "traced")),
        *(slow(256, None, window) for window in (None, 1, 129)),
        *(slow(300, 5.0, window) for window in (1, 100, "traced")),
    ],
)
def test_chunked_attention_equals_einsum(window, n, softcap):
    q, k, v = inputs((2,), n_queries=n, n_keys=n)
    positions = {
        "q_positions": np.arange(n),
        "k_positions": np.arange(n),
        "contiguous": True,
        "softcap": softcap,
    }
    out_gradient = normal(*q.shape, seed=3)

    @functools.partial(jax.jit, static_argnames="name")
    def found(q, k, v, traced, name):
        options = positions | {
            "window": traced if window == "traced" else window,
            "implementation": name,
        }
        out, vjp = jax.vjp(lambda *qkv: attention_with(*qkv, **options), q, k, v)
        return out, *vjp(out_gradient)

    for a, b in zip(found(q, k, v, 77, "chunked"), found(q, k, v, 77, "einsum"), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1, np.abs(b).max()))


@pytest.mark.skipif(not ON_GPU, reason="cuDNN needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("window", "segments"), [(None, None), (1, None), (100, None), (100, np.arange(256) // 70)]
)
def test_cudnn_equals_einsum(window, segments):
    n = 256
    q = jnp.asarray(normal(2, n, 4, 64), jnp.bfloat16)
    k, v = (jnp.asarray(normal(2, n, 2, 64, seed=seed), jnp.bfloat16) for seed in (1, 2))
    positions = {
        "q_positions": np.arange(n),
        "k_positions": np.arange(n),
        "contiguous": True,
        "window": window,
    }
    positions |= {"q_segments": segments, "k_segments": segments}
    outs, grads = {}, {}
    for name in ("einsum", "cudnn"):
        outs[name] = np.float32(attend(q, k, v, implementation=name, **positions))
        out_gradient = jnp.asarray(normal(*q.shape, seed=3), jnp.bfloat16)
        grads[name] = [
            np.float32(g)
            for g in gradients(out_gradient, positions | {"implementation": name})(q, k, v)
        ]
    np.testing.assert_allclose(outs["cudnn"], outs["einsum"], rtol=2.0**-6, atol=2.0**-6)
    for a, b in zip(grads["cudnn"], grads["einsum"], strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-5, atol=2.0**-5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("n_kv_heads", "window", "softcap", "documents"),
    [
        slow(4, None, None, False),
        (2, 100, 5.0, True),
        slow(1, 1, None, True),
        slow(2, None, 5.0, False),
        slow(1, 300, 0.5, False),
    ],
)
def test_splash_equals_einsum(n_kv_heads, window, softcap, documents):
    """Its kernels are interpreted here; five blocks of 128 positions. Documents restart the
    positions.
    """
    n = 5 * 128
    q, k, v = inputs((2,), n_kv_heads, n_queries=n, n_keys=n)
    segments = np.stack([np.arange(n) // 70, np.arange(n) // 200]) if documents else None
    positions = np.stack([np.arange(n) % 70, np.arange(n) % 200]) if documents else np.arange(n)
    mask = Mask(positions, positions, segments, segments, window, contiguous=True)
    out_gradient = normal(*q.shape, seed=3)

    def found(attend):
        scoring = attention.Scoring(0.3, softcap)
        out, vjp = jax.vjp(lambda *qkv: attend(*qkv, mask, scoring), q, k, v)
        return out, *vjp(out_gradient)

    both = (attention.IMPLEMENTATIONS[name] for name in ("splash", "einsum"))
    for a, b in zip(*map(jax.jit(found, static_argnums=0), both), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1, np.abs(b).max()))


GPU = dict(
    platform="gpu",
    dtype=jnp.bfloat16,
    d_head=64,
    softcap=None,
    window=None,
    segments=False,
    contiguous=True,
)
GPU |= {"n_queries": 1024}


TPU = GPU | {"platform": "tpu", "softcap": 50.0, "segments": True}
CHOSEN = [  # of "auto", and a word of its reason
    (GPU, "cudnn", "flash"),
    (GPU | {"dtype": jnp.float16, "d_head": 128, "window": 256}, "cudnn", "flash"),
    (GPU | {"platform": "cpu"}, "chunked", "cpu"),
    (GPU | {"dtype": jnp.float32}, "chunked", "float32"),
    (GPU | {"d_head": 12, "n_queries": 129}, "chunked", "12"),
    (GPU | {"d_head": 256, "n_queries": 128}, "einsum", "256"),
    (GPU | {"softcap": 50.0}, "chunked", "50.0"),
    (GPU | {"segments": True}, "cudnn", "flash"),
    (GPU | {"segments": True, "n_queries": 127}, "einsum", "even number of tokens"),
    (GPU | {"segments": True, "softcap": 50.0}, "einsum", "softcap"),
    (GPU | {"contiguous": False}, "einsum", "contiguous"),
    (GPU | {"window": np.int32(4)}, "chunked", "before compilation"),
    (TPU, "splash", "TPU"),
    (TPU | {"dtype": jnp.float32, "d_head": 256, "window": 256}, "splash", "TPU"),
    (TPU | {"n_queries": 1000}, "einsum", "1000"),
    (TPU | {"contiguous": False}, "einsum", "contiguous"),
    (TPU | {"window": np.int32(4), "segments": False}, "chunked", "before compilation"),
    (TPU | {"more_scores": True, "segments": False}, "chunked", "bias"),
]


def test_auto_chooses_the_kernel_of_the_platform_if_and_only_if_it_is_supported():
    for given, chosen, word in CHOSEN:
        name, reason = choose_implementation("auto", **given)
        assert (name, word in reason) == (chosen, True), (given, reason)
        kernel = "splash" if given["platform"] == "tpu" else "cudnn"
        if chosen == kernel:
            assert choose_implementation(kernel, **given)[0] == kernel
        else:
            with pytest.raises(ValueError, match=word):
                choose_implementation(kernel, **given)
    with pytest.raises(ValueError, match="needs a TPU"):
        choose_implementation("splash", **(TPU | {"platform": "cpu"}))


def test_an_explicit_implementation_is_used_or_refused_with_a_reason():
    for change in (
        {},
        {"softcap": 1.0, "segments": True, "contiguous": False, "dtype": jnp.float32},
    ):
        assert choose_implementation("einsum", **(GPU | change))[0] == "einsum"
    assert choose_implementation("xla", **(GPU | {"segments": True, "platform": "cpu"}))[0] == "xla"
    with pytest.raises(
        ValueError, match=r"'xla' has no softcap \(softcap is 1.0\); use 'auto' or 'einsum'"
    ):
        choose_implementation("xla", **(GPU | {"softcap": 1.0}))
    with pytest.raises(
        ValueError, match=r"'chunked' needs positions that are 0..T-1 \(contiguous is False\)"
    ):
        choose_implementation("chunked", **(GPU | {"contiguous": False}))
    with pytest.raises(
        ValueError, match="'flash'; expected one of auto, einsum, chunked, xla, cudnn, splash"
    ):
        choose_implementation("flash", **GPU)
    with pytest.raises(ValueError, match="needs bfloat16 or float16 inputs"):
        attention_with(*inputs(), implementation="cudnn", **PLAIN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": normal(2, T, 3, K), "v": normal(2, T, 3, K)}, "key heads must divide query heads"),
        (
            {"k": normal(2, T, 2, K + 1), "v": normal(2, T, 2, K + 1)},
            "differ in batch or head width",
        ),
        ({"v": normal(2, T + 1, 2, K)}, "keys and values differ"),
        ({"window": 0}, "at least 1"),
        ({"scale": np.ones((H, 1, 1))}, "scale is not a number; multiply the queries"),
        ({"q_segments": SEGMENTS}, "or neither"),
        (
            {"q": normal(2, 1, H, K), "q_positions": np.arange(1), "contiguous": True},
            "as many queries as keys",
        ),
    ],
)
def test_invalid_arguments_raise(change, message):
    arguments = dict(zip("qkv", inputs(), strict=True)) | PLAIN | change
    qkv = [arguments.pop(name) for name in "qkv"]
    with pytest.raises(ValueError, match=message):
        attention_with(*qkv, **arguments)


@pytest.mark.parametrize("implementation", ["einsum", "chunked"])
def test_biases_and_sinks_equal_a_plain_softmax(implementation, monkeypatch):
    """A bias is added to the scores of a key, a sink is a key with value 0; derivatives included."""
    monkeypatch.setattr(attention.fused_attention, "CHUNK", 4)
    T, H, G, K = 9, 4, 2, 3
    shapes = {"q": (T, H, K), "k": (T, G, K), "v": (T, G, K), "bias": (T, H), "sink": (H,)}
    arrays = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}

    def ours(a):
        options = {
            "bias_BSH": a["bias"],
            "sink_H": a["sink"],
            "implementation": implementation,
            "softcap": 2.0,
        }
        return causal_attention(a["q"], a["k"], a["v"], Mask.causal(T, 5), **options)

    def plain(a):
        k_THK, v_THK = jnp.repeat(a["k"], H // G, axis=1), jnp.repeat(a["v"], H // G, axis=1)
        scores_HTS = (
            2 * jnp.tanh(jnp.einsum("thk,shk->hts", a["q"], k_THK) / jnp.sqrt(K) / 2)
            + a["bias"].T[:, None]
        )
        weights_HTS = jnp.where(Mask.causal(T, 5).visible(), jnp.exp(scores_HTS), 0)
        sums_HT = weights_HTS.sum(-1) + jnp.exp(a["sink"])[:, None]
        return jnp.einsum("hts,shk->thk", weights_HTS / sums_HT[..., None], v_THK)

    def slopes_and_values(f):
        return jax.jit(jax.grad(lambda a: (jnp.sum(jnp.sin(f(a))), f(a)), has_aux=True))(arrays)

    (slopes, found), (plain_slopes, expected) = map(slopes_and_values, (ours, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for name in shapes:
        np.testing.assert_allclose(
            slopes[name], plain_slopes[name], rtol=1e-4, atol=1e-5, err_msg=name
        )
    with pytest.raises(ValueError, match="has no bias and no sink"):
        causal_attention(
            *(arrays[n] for n in "qkv"), Mask.causal(T), sink_H=arrays["sink"], implementation="xla"
        )
