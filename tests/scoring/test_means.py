"""Standard errors from the variation between blocks of a text, and what is derived from the sums."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.signal import lfilter

from lm.scoring.means import MAX_BLOCKS, Estimate, TextMeans, ratio


def autoregressive(n_series: int, n: int, phi: float, mean: float) -> np.ndarray:
    """Return series x_t = mean + e_t with e_t = phi e_{t-1} + N(0, 1) noise, from the stationary
    distribution.
    """
    noise = np.random.default_rng(0).standard_normal((n_series, n))
    noise[:, 0] /= math.sqrt(1 - phi**2)
    return mean + lfilter([1.0], [1.0, -phi], noise, axis=1)


@pytest.mark.parametrize("phi", [0.0, 0.9])
def test_intervals_cover_the_mean_of_a_correlated_process(phi):
    """Of 1000 intervals of level 95 %, between 92.5 and 97.5 % contain the mean (4 binomial
    standard deviations).
    """
    n_series, n = 1000, 6000
    series = autoregressive(n_series, n, phi, mean=2.5)
    sums = series.reshape(n_series, MAX_BLOCKS, -1).sum(2)
    estimates = [ratio(s, np.full(MAX_BLOCKS, n / MAX_BLOCKS)) for s in sums]
    t = stats.t.ppf(0.975, MAX_BLOCKS - 1)
    covered = np.mean([abs(e.value - 2.5) <= t * e.error for e in estimates])
    assert 0.925 <= covered <= 0.975
    # The exact standard deviation of the mean, for a large n: 1 / ((1 - phi) sqrt(n)).
    rms = math.sqrt(np.mean([e.error**2 for e in estimates]))
    assert rms == pytest.approx(1 / ((1 - phi) * math.sqrt(n)), rel=0.07)


def test_blocks_of_different_sizes_weigh_by_their_tokens():
    """The error of a ratio agrees with its standard deviation over repeated draws of blocks."""
    draw = np.random.default_rng(1)
    counts = draw.integers(50, 150, (4000, MAX_BLOCKS)).astype(float)
    sums = 3.0 * counts + np.sqrt(counts) * draw.standard_normal(counts.shape)
    estimates = [ratio(s, c) for s, c in zip(sums, counts, strict=True)]
    errors, values = np.array([e.error for e in estimates]), np.array([e.value for e in estimates])
    assert values.mean() == pytest.approx(3.0, abs=4 * values.std() / math.sqrt(4000))
    assert math.sqrt(np.mean(errors**2)) == pytest.approx(values.std(), rel=0.05)


def test_too_few_blocks_have_no_error_and_empty_blocks_do_not_count():
    assert ratio(np.ones(7), np.ones(7)) == Estimate(1.0, None)
    full, with_empty = np.arange(8.0), np.r_[np.arange(8.0), np.zeros(4)]
    assert ratio(with_empty, np.r_[np.ones(8), np.zeros(4)]) == ratio(full, np.ones(8))


def test_infinite_losses_do_not_raise():
    estimate = ratio(np.r_[np.inf, np.ones(9)], np.ones(10))
    assert estimate.value == math.inf
    assert math.isnan(estimate.error)
    assert str(estimate) == "inf"


def test_perplexity_and_bits_per_byte_by_hand():
    """Of 10 blocks, the even ones have 2 ln 2 nats per token, the odd ones 3 ln 2; one of four
    tokens is a hit.
    """
    sums = np.zeros((10, 3, 3))
    sums[..., 0] = [1, 1, 2]
    sums[..., 1] = np.outer([2, 3] * 5, [1, 1, 2]) * np.log(2)
    sums[:, 2, 2] = 1
    means = TextMeans(sums, seq_len=4, stride=4, bytes_per_token=2.0)
    error = 0.5 * math.log(2) / 3  # ten means, half a step from theirs: sqrt(10 / 4 / 9 / 10)
    assert means.tokens == 40
    assert means.loss == pytest.approx((2.5 * math.log(2), error))
    assert means.block_losses == pytest.approx([2 * math.log(2), 3 * math.log(2)] * 5)
    assert means.perplexity == pytest.approx((2**2.5, 2**2.5 * error))
    assert means.bits_per_byte == pytest.approx((1.25, error / math.log(2) / 2))
    assert means.accuracy == pytest.approx((0.25, 0.0))
