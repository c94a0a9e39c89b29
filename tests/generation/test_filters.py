"""The distribution of drawn tokens, compared with a plain implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from lm.generation.filters import Sampling, draw, filter_logits

LOGITS = np.array([1.5, 0.2, -0.4, 1.1, 0.9, -2.0, 0.0, 0.3])


def expected(temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Return the probabilities by plain loops over the sorted tokens, renormalized after each
    filter.
    """
    p = np.exp(LOGITS / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p:
        total = 0.0
        for i in order:
            if total >= top_p:
                p[i] = 0
            total += p[i]
        p /= p.sum()
    if min_p:
        p[p < min_p * p.max()] = 0
        p /= p.sum()
    return p


ALL = {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.2}


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, ALL], ids=str
)
def test_frequencies_match_the_distribution(options):
    """A chi-square test over 20,000 draws. Tokens that a filter removes are never drawn."""
    n, p = 20_000, expected(**options)
    keys = jax.random.split(jax.random.key(0), n)
    counts = np.bincount(
        draw(keys, jnp.tile(jnp.asarray(LOGITS), (n, 1)), Sampling(**options)), minlength=len(p)
    )
    assert counts[p == 0].sum() == 0
    assert chisquare(counts[p > 0], n * p[p > 0]).pvalue > 0.001
    wrong = np.roll(p[p > 0], 1)  # the test has the power to reject another distribution
    assert chisquare(counts[p > 0], n * wrong).pvalue < 1e-9


def test_temperature_0_takes_the_likeliest_token():
    keys = jax.random.split(jax.random.key(0), 50)
    assert set(
        draw(keys, jnp.tile(jnp.asarray(LOGITS), (50, 1)), Sampling(temperature=0.0)).tolist()
    ) == {0}


def test_a_filter_keeps_all_tokens_with_the_highest_probability():
    tied = jnp.array([1.0, 3.0, 3.0, 0.0])
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert jnp.isfinite(filter_logits(tied, Sampling(**options))).tolist() == [
            False,
            True,
            True,
            False,
        ]
    assert jnp.isfinite(filter_logits(tied, Sampling(top_p=1.0, top_k=99, min_p=1e-9))).all()
