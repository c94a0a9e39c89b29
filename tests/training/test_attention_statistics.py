"""Statistics of attention equal those of one query at a time in float64, in chunks of any size."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from lm.layers.attention import Mask
from lm.training import attention_statistics as module
from lm.training.attention_statistics import attention_statistics

B, T, H, G, K = 2, 7, 4, 2, 8
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2, 3]])


def one_query(q, k, softcap, scale, bias):
    """Return (largest logit, entropy of the weights) of a query (K,) that sees the keys (n, K)."""
    logits = k @ q * scale
    capped = logits if softcap is None else softcap * np.tanh(logits / softcap)
    return logits.max(), scipy.stats.entropy(scipy.special.softmax(capped + bias))


# With 3 queries at a time the last chunk has one.
CASES = {
    "window, softcap, scale": {
        "window": 3,
        "softcap": 0.5,
        "scale": 2.0,
        "chunk_scores": 3 * B * H * T,
    },
    "packed, window": {"window": 3, "packed": True, "chunk_scores": 3 * B * H * T},
    "one query at a time, biases": {"chunk_scores": 1, "biased": True},
    "equal logits": {"scale": 1e-9},
    "all weight on one key": {"scale": 1e6},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_each_query(monkeypatch, case):
    keys = {
        "window": None,
        "packed": False,
        "softcap": None,
        "scale": None,
        "chunk_scores": 2**24,
    } | CASES[case]
    monkeypatch.setattr(module, "CHUNK_SCORES", keys["chunk_scores"])
    draw = np.random.default_rng(0)
    q, k, bias_BSH = (
        draw.standard_normal(shape) for shape in ((B, T, H, K), (B, T, G, K), (B, T, H))
    )
    segments, window = SEGMENTS if keys["packed"] else None, keys["window"]
    mask, options = Mask(jnp.arange(T), jnp.arange(T), segments, segments, window), {}
    if keys.get("biased"):
        options = {"bias_BSH": jnp.float32(bias_BSH)}
    options |= {"softcap": keys["softcap"], "scale": keys["scale"]}
    max_logit_BTH, entropy_BTH, max_entropy_BT = attention_statistics(
        jnp.float32(q), jnp.float32(k), mask, **options
    )
    for b, t, h in np.ndindex(B, T, H):
        s = np.arange(t + 1)
        s = s[(s > t - (window or T)) & (segments is None or SEGMENTS[b, s] == SEGMENTS[b, t])]
        bias = bias_BSH[b, s, h] * bool(keys.get("biased"))
        logit, entropy = one_query(
            q[b, t, h], k[b, s, h // (H // G)], keys["softcap"], keys["scale"] or K**-0.5, bias
        )
        np.testing.assert_allclose(max_logit_BTH[b, t, h], logit, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(entropy_BTH[b, t, h], entropy, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(max_entropy_BT[b, t], np.log(len(s)), rtol=1e-6)
