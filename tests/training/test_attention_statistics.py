"""Statistics of attention equal those of one query at a time in float64, in chunks of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from lm.layers.attention import Mask
from lm.training import attention_statistics as module
from lm.training.attention_statistics import attention_statistics

B, T, H, G, K = 2, 7, 4, 2, 8
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2, 3]])


def inputs():
    draw = np.random.default_rng(0)
    return draw.standard_normal((B, T, H, K)), draw.standard_normal((B, T, G, K))


def one_query(q, k, softcap, scale):
    """Return (largest logit, entropy of the weights) of a query (K,) that sees the keys (n, K)."""
    logits = k @ q * scale
    capped = logits if softcap is None else softcap * np.tanh(logits / softcap)
    return logits.max(), scipy.stats.entropy(np.exp(capped))


# With 3 queries at a time the last chunk has one.
@pytest.mark.parametrize(
    ("window", "packed", "softcap", "scale", "chunk_scores"),
    [
        (None, False, None, None, 2**24),
        (3, False, 0.5, 2.0, 3 * B * H * T),
        (3, True, None, None, 3 * B * H * T),
        (None, False, None, None, 1),
    ],
    ids=["causal", "window, softcap and scale", "packed", "one query at a time"],
)
@pytest.mark.slow
def test_statistics_are_those_of_each_query(monkeypatch, window, packed, softcap, scale, chunk_scores):
    monkeypatch.setattr(module, "CHUNK_SCORES", chunk_scores)
    q, k = inputs()
    segments = SEGMENTS if packed else None
    mask = Mask(jnp.arange(T), jnp.arange(T), segments, segments, window)
    found = attention_statistics(jnp.float32(q), jnp.float32(k), mask, softcap=softcap, scale=scale)
    for b, t, h in np.ndindex(B, T, H):
        seen = [
            s
            for s in range(t + 1)
            if (window is None or s > t - window) and (not packed or SEGMENTS[b, s] == SEGMENTS[b, t])
        ]
        logit, entropy = one_query(q[b, t, h], k[b, seen, h // (H // G)], softcap, scale or K**-0.5)
        np.testing.assert_allclose(found.max_logit_BTH[b, t, h], logit, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.entropy_BTH[b, t, h], entropy, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.max_entropy_BT[b, t], np.log(len(seen)), rtol=1e-6)


def test_equal_logits_have_the_entropy_of_equal_weights_and_large_logits_none():
    q, k = inputs()
    mask = Mask.causal(T)
    statistics = jax.jit(lambda q: attention_statistics(q, jnp.float32(k), mask))
    equal = statistics(jnp.float32(0 * q))
    np.testing.assert_allclose(equal.entropy_BTH, np.broadcast_to(equal.max_entropy_BT[..., None], (B, T, H)), 1e-6)
    one_hot = statistics(jnp.float32(1e6 * q))
    assert float(one_hot.entropy_BTH.max()) < 1e-6


def test_biases_change_the_entropy_and_not_the_largest_logit():
    q, k = inputs()
    bias_BSH = np.random.default_rng(1).standard_normal((B, T, H))
    found = attention_statistics(jnp.float32(q), jnp.float32(k), Mask.causal(T), bias_BSH=jnp.float32(bias_BSH))
    logits_S = k[1, :6, 3 // (H // G)] @ q[1, 5, 3] * K**-0.5
    np.testing.assert_allclose(found.max_logit_BTH[1, 5, 3], logits_S.max(), rtol=1e-5)
    entropy = scipy.stats.entropy(np.exp(logits_S + bias_BSH[1, :6, 3]))
    np.testing.assert_allclose(found.entropy_BTH[1, 5, 3], entropy, rtol=1e-5)
