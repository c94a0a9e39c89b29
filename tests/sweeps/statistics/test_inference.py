"""Intervals and tests against scipy, corrections by hand, power and error rates by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from lm.sweeps.statistics import inference

A = [2.41, 2.44, 2.38, 2.47, 2.40]
B = [2.43, 2.45, 2.41, 2.48, 2.44]


def within_binomial_error(count: int, n: int, probability: float) -> bool:
    """Return whether a count is plausible; False once in 5000 times if the probability is right."""
    return stats.binom.ppf(1e-4, n, probability) <= count <= stats.binom.ppf(1 - 1e-4, n, probability)


def test_interval_agrees_with_scipy():
    found = inference.interval(A)
    low, high = stats.t.interval(0.95, df=4, loc=np.mean(A), scale=stats.sem(A))
    assert found == pytest.approx((np.mean(A), low, high, stats.tstd(A), 5), rel=1e-12)


def test_interval_by_hand():
    # 1, 2, 3: mean 2, standard deviation 1; t_2 = 4.302653 from a table of Student's t.
    found = inference.interval([1, 2, 3])
    assert (found.mean, found.sd, found.n) == (2, 1, 3)
    assert found.high - 2 == 2 - found.low == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_one_value_has_no_interval():
    found = inference.interval([2.5])
    assert (found.mean, found.low, found.high, found.n) == (2.5, -math.inf, math.inf, 1)
    assert math.isnan(found.sd)
    difference = inference.paired_difference([2.5], [2.0])
    assert (difference.mean, difference.detectable, difference.n) == (0.5, math.inf, 1)
    assert math.isnan(difference.p)


def test_paired_difference_agrees_with_scipy():
    found, expected = inference.paired_difference(A, B), stats.ttest_rel(A, B)
    low, high = expected.confidence_interval(0.95)
    assert found[:5] == pytest.approx((np.mean(A) - np.mean(B), low, high, expected.pvalue, 5), rel=1e-9)
    assert found.p == pytest.approx(stats.ttest_1samp(np.subtract(A, B), 0).pvalue, rel=1e-12)
    assert found.p < 0.05 < stats.ttest_ind(A, B).pvalue  # pairing makes the test sharper


def test_paired_difference_changes_sign_when_swapped():
    there, back = inference.paired_difference(A, B), inference.paired_difference(B, A)
    assert (back.mean, back.low, back.high) == (-there.mean, -there.high, -there.low)
    assert (back.p, back.detectable) == (there.p, there.detectable)


def test_equal_differences():
    same = inference.paired_difference(A, A)
    assert (*same[:5], same.detectable) == (0, 0, 0, 1, 5, 0)
    once = inference.paired_difference([1.5, 2.5], [1, 2])  # without variation over seeds there is no p-value
    assert once[:3] == (0.5, 0.5, 0.5)
    assert math.isnan(once.p)


def test_only_the_detectable_difference_depends_on_the_number_of_comparisons():
    one, four = inference.paired_difference(A, B), inference.paired_difference(A, B, 4)
    assert one[:5] == four[:5]
    assert four.detectable == inference.detectable(np.std(np.subtract(A, B), ddof=1), 5, 4) > one.detectable


def test_the_range_of_the_detectable_difference_is_that_of_the_standard_deviation():
    # Of 5 values with sd 1 the 95 % interval of sigma is sqrt(4 / 11.1433) to sqrt(4 / 0.484419), by a table.
    d = inference.paired_difference([-1, 1, 0, 1, -1], [0] * 5)
    assert (d.sd, d.df) == (1, 4)
    low, high = (bound / d.detectable for bound in d.detectable_range)
    assert (low, high) == pytest.approx((0.599138, 2.873557), rel=1e-5)
    draw = np.random.default_rng(5)
    truth, covered = inference.detectable(1.0, 5), 0
    for x in draw.normal(size=(1000, 5)):
        low, high = inference.paired_difference(x, np.zeros(5)).detectable_range
        covered += low <= truth <= high
    assert within_binomial_error(covered, 1000, 0.95)


def test_simultaneous_intervals_are_those_of_bonferroni():
    d = inference.paired_difference(A, B, 4)
    expected = stats.ttest_rel(A, B).confidence_interval(1 - 0.05 / 4)
    assert d.simultaneous == pytest.approx(tuple(expected), rel=1e-9)
    assert inference.paired_difference(A, B).simultaneous == pytest.approx((d.low, d.high))
    assert inference.paired_difference([2.5], [2.0]).simultaneous == (-math.inf, math.inf)


@pytest.mark.parametrize(("n", "effect"), [(5, 1.682), (10, 0.996), (20, 0.660)])
def test_detectable_agrees_with_power_tables(n, effect):
    # Two-sided paired t test, level 0.05, power 0.8.
    assert inference.detectable(1.0, n) == pytest.approx(effect, abs=5e-4)
    assert inference.detectable(0.02, n) == pytest.approx(0.02 * effect, rel=1e-3)


@pytest.mark.parametrize("comparisons", [1, 4])
@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_detectable_is_found_in_8_of_10_sweeps(n, comparisons):
    sweeps = 40_000
    noise = np.random.default_rng(n).normal(scale=0.3, size=(sweeps, n))
    p = stats.ttest_1samp(noise + inference.detectable(0.3, n, comparisons), 0, axis=1).pvalue
    assert within_binomial_error(np.sum(p < 0.05 / comparisons), sweeps, 0.8)


def test_holm_by_hand():
    # In ascending order: 4 x 0.005 = 0.02, 3 x 0.01 = 0.03, 2 x 0.03 = 0.06, and 1 x 0.04 may not be below 0.06.
    assert inference.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], rel=1e-15)


def test_holm_edge_cases():
    assert inference.holm([]) == []
    assert inference.holm([0.03]) == [0.03]
    assert inference.holm([0.6, 0.9, 0.0]) == [1, 1, 0]


def test_holm_counts_p_values_of_nan():
    assert inference.holm([0.02, math.nan, 0.01]) == pytest.approx([0.04, math.nan, 0.03], nan_ok=True)
    assert all(math.isnan(p) for p in inference.holm([math.nan, math.nan]))


def test_sweeps_without_a_difference_are_rejected_at_the_nominal_rate():
    """4 variants against one baseline, 5 seeds, noise shared within a seed: every rejection is an error."""
    sweeps, draw = 2000, np.random.default_rng(20260101)
    losses = 2 + draw.normal(scale=0.02, size=(sweeps, 5, 5)) + draw.normal(scale=0.05, size=(sweeps, 1, 5))
    p = np.array([[inference.paired_difference(v, w[0], 4).p for v in w[1:]] for w in losses])
    adjusted = np.array([inference.holm(row) for row in p])
    single, any_adjusted, any_raw = (p[:, 0] < 0.05).sum(), (adjusted < 0.05).any(1).sum(), (p < 0.05).any(1).sum()
    assert within_binomial_error(single, sweeps, 0.05)
    assert 0.02 * sweeps < any_adjusted <= stats.binom.ppf(1 - 1e-4, sweeps, 0.05)
    assert any_raw > 0.1 * sweeps


def test_sampling_error_of_equal_blocks():
    # The ratio of sums is then the mean of the blocks' means.
    means = np.random.default_rng(1).normal(2.4, 0.1, size=30)
    assert inference.sampling_error(means * 2048, [2048] * 30) == pytest.approx(stats.sem(means), rel=1e-12)


def test_sampling_error_of_unequal_blocks_agrees_with_the_bootstrap():
    draw = np.random.default_rng(2)
    counts = draw.integers(500, 2048, size=60)
    sums = counts * draw.normal(2.4, 0.1, size=60)
    taken = draw.integers(60, size=(20_000, 60))
    bootstrap = np.std(sums[taken].sum(axis=1) / counts[taken].sum(axis=1))
    # The bootstrap divides by n where the estimate divides by n - 1.
    assert inference.sampling_error(sums, counts) == pytest.approx(bootstrap * math.sqrt(60 / 59), rel=0.03)


def test_sampling_error_edge_cases():
    assert inference.sampling_error([20, 40, 10], [10, 20, 5]) == 0
    assert inference.sampling_error([20], [10]) == math.inf


def test_crossed_interval_of_equal_blocks_is_the_analysis_of_variance():
    """Two-way random model: the variance of the mean is (MS seeds + MS blocks - MS rest) / (n m)."""
    draw, n, m = np.random.default_rng(3), 4, 6
    x = draw.normal(size=(n, m)) + draw.normal(size=(n, 1)) + 3 * draw.normal(size=m)
    found = inference.crossed_interval(10 * x, [10] * m)
    by_seed, by_block, mean = x.mean(axis=1), x.mean(axis=0), x.mean()
    ms_seeds, ms_blocks = m * np.var(by_seed, ddof=1), n * np.var(by_block, ddof=1)
    ms_rest = np.sum((x - by_seed[:, None] - by_block + mean) ** 2) / (n - 1) / (m - 1)
    assert ms_blocks > ms_rest
    assert (found.mean, found.error**2) == pytest.approx((mean, (ms_seeds + ms_blocks - ms_rest) / n / m), rel=1e-12)
    parts = ms_seeds**2 / (n - 1) + (ms_blocks - ms_rest) ** 2 / (m - 1)
    assert found.df == pytest.approx((ms_seeds + ms_blocks - ms_rest) ** 2 / parts, rel=1e-12)
    low, high = stats.t.interval(0.95, found.df, mean, found.error)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)


def test_crossed_interval_without_differences_between_blocks_is_that_of_the_seeds():
    counts = np.array([100, 80, 30])
    found, seeds = inference.crossed_interval(np.outer(A, counts), counts), inference.interval(A)
    assert found[:3] == pytest.approx(seeds[:3], rel=1e-9)
    assert found.df == pytest.approx(4)


def test_crossed_interval_without_differences_between_seeds_is_that_of_the_text():
    sums, counts = [205, 192, 103], [100, 100, 50]
    found = inference.crossed_interval([sums] * 3, counts)
    assert (found.error, found.df) == pytest.approx((inference.sampling_error(sums, counts), 2), rel=1e-12)


def test_crossed_interval_contains_that_of_the_seeds():
    """Here the text error adds more degrees of freedom than variance: t_df error would be 5 % less."""
    r = np.add.outer([1.0, 2.0, 4.0], 0.5 * np.array([1, -1, 2, -2, 0]))
    found, seeds = inference.crossed_interval(r, np.ones(5)), inference.interval(r.mean(axis=1))
    assert found[:3] == pytest.approx(seeds[:3], rel=1e-12)
    assert stats.t.isf(0.025, found.df) * found.error < 0.95 * (found.high - found.mean)


def test_crossed_interval_edge_cases():
    assert inference.crossed_interval([[20, 10]], [10, 5])[:3] == (2, -math.inf, math.inf)
    assert inference.crossed_interval([[20], [22]], [10])[:3] == (2.1, -math.inf, math.inf)
    assert inference.crossed_interval([[20, 10], [20, 10]], [10, 5])[:4] == (2, 2, 2, 0)


@pytest.mark.parametrize("text", [0.0, 1.0, 3.0])
def test_crossed_interval_covers_the_mean_over_seeds_and_text(text):
    """Blocks that are hard for all seeds, in units of the error of 5 seeds; the interval over seeds ignores them."""
    draw, counts, n_sweeps = np.random.default_rng(4), np.array([10.0] * 19 + [4.0]), 1500
    covered = covered_by_seeds = 0
    for _ in range(n_sweeps):
        r = draw.normal(size=(5, 1)) + draw.normal(size=(5, 20)) + text * math.sqrt(20 / 5) * draw.normal(size=20)
        found, seeds = inference.crossed_interval(r * counts, counts), inference.interval(r @ counts / counts.sum())
        covered += found.low <= 0 <= found.high
        covered_by_seeds += seeds.low <= 0 <= seeds.high
    assert 0.935 < covered / n_sweeps < 0.97
    assert text < 1 or covered_by_seeds / n_sweeps < 0.92


def test_learning_rate_sensitivity_by_hand():
    # Means of the rates, with 3 for 5 and for nan: 2.2, 2.0, 2.5, 3.0; their mean is 2.425.
    losses = [[2.1, 2.3], [2.0, 2.0], [2.0, 5.0], [math.nan, 3.5]]
    assert inference.learning_rate_sensitivity(losses, 3.0) == pytest.approx(0.425, rel=1e-12)
    assert inference.learning_rate_sensitivity([[2.0], [2.0]], 3.0) == 0
    assert inference.learning_rate_sensitivity([[math.nan], [9.0]], 3.0) == 0  # nothing is learned at any rate
