"""Tests against a margin: agreement with scipy, with intervals, and error rates and power by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from lm.sweeps.statistics import inference
from lm.sweeps.statistics.inference import Difference, detectable, paired_difference
from lm.sweeps.statistics.margins import p_beyond, p_equivalent, seeds_to_decide

X = np.array([0.004, -0.001, 0.003, 0.002, 0.0005])


def difference(values) -> Difference:
    return paired_difference(values, np.zeros(len(values)))


@pytest.mark.parametrize("margin", [0.002, 0.005, 0.02])
def test_equivalence_is_two_one_sided_tests_of_scipy(margin):
    one_sided = [stats.ttest_1samp(X, -margin, alternative="greater"), stats.ttest_1samp(X, margin, alternative="less")]
    assert p_equivalent(difference(X), margin) == pytest.approx(max(test.pvalue for test in one_sided))
    assert p_equivalent(difference(-X), margin) == p_equivalent(difference(X), margin)


def test_equivalence_agrees_with_the_90_percent_interval():
    d = difference(X)
    low, high = stats.ttest_1samp(X, 0).confidence_interval(0.9)
    assert -low < high
    assert p_equivalent(d, high * 1.001) < 0.05 < p_equivalent(d, high * 0.999)


def test_beyond_a_margin_of_0_is_the_t_test():
    assert p_beyond(difference(X), 0) == pytest.approx(stats.ttest_1samp(X, 0).pvalue)
    assert p_beyond(difference(X), 0.0017) == pytest.approx(  # the mean: half of the distribution, and the far tail
        0.5 + stats.t.sf(2 * 0.0017 / stats.sem(X), 4)
    )


def test_an_interval_beyond_the_margin_is_always_significant():
    d = difference(X + 0.02)
    assert p_beyond(d, d.low) < 0.05
    assert p_beyond(d, d.mean) > 0.5


def test_seeds_without_variation_have_no_p_value():
    for d in (difference([0.1] * 5), difference([0.0] * 5), difference([0.1])):
        assert math.isnan(p_beyond(d, 0.005))
        assert math.isnan(p_equivalent(d, 0.005))


@pytest.mark.parametrize(("test", "true"), [(p_beyond, 0.005), (p_beyond, -0.005), (p_equivalent, 0.005)])
def test_a_true_difference_of_the_margin_is_rejected_at_the_nominal_rate(test, true):
    sweeps, draw = 1000, np.random.default_rng(3)
    p = [test(difference(true + draw.normal(scale=0.004, size=8)), 0.005) for _ in range(sweeps)]
    assert stats.binom.ppf(1e-4, sweeps, 0.05) <= np.sum(np.less(p, 0.05)) <= stats.binom.ppf(1 - 1e-4, sweeps, 0.05)


@pytest.mark.parametrize(("ratio", "n"), [(0.5, 34), (0.8, 15), (0.2, 199)])
def test_the_number_of_seeds_agrees_with_power_tables(ratio, n):
    # Two-sided paired t test, level 0.05, power 0.8, effect sizes 0.5, 0.8 and 0.2 (Cohen 1988).
    d = Difference(0, -1, 1, 0.5, 5, sd=0.01, df=4)
    assert seeds_to_decide(d, 0.01 * ratio) == n
    assert detectable(0.01, n) <= 0.01 * ratio < detectable(0.01, n - 1)


def test_more_comparisons_need_more_seeds_and_a_prior_needs_fewer():
    one = Difference(0, -1, 1, 0.5, 5, sd=0.01, df=4)
    assert seeds_to_decide(one._replace(df=16), 0.01) < seeds_to_decide(one, 0.01)
    assert seeds_to_decide(one._replace(comparisons=4), 0.01) > seeds_to_decide(one, 0.01)
    assert seeds_to_decide(one, 1.0) == 2
    assert 31 < seeds_to_decide(one._replace(sd=10.0), 0.005) / 1e6 < 32  # (1.960 + 0.842)^2 (sd / margin)^2


def test_the_number_of_seeds_shows_equal_variants_equivalent_in_three_of_four_sweeps():
    """The docs state 0.75 for sd 0.01, margin 0.005 and 34 seeds."""
    sweeps, draw = 1000, np.random.default_rng(4)
    p = [p_equivalent(difference(draw.normal(scale=0.01, size=34)), 0.005) for _ in range(sweeps)]
    assert np.mean(np.less(p, 1 - inference.LEVEL)) == pytest.approx(0.75, abs=0.05)
