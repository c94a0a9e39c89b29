"""Plain statistics: against SciPy, published examples and identities."""

import math

import numpy as np
import pytest
from scipy import stats

from lm.sweeps import statistics
from lm.sweeps.statistics import BETTER, DIFFERENT, NOT_SHOWN, SAME, WORSE, Estimate, estimate

A = [2.00, 2.03, 1.98, 2.05, 1.95, 2.01]
B = [1.91, 1.99, 1.90, 1.97, 1.93, 1.88]


def test_the_paired_t_test_is_that_of_scipy():
    found, expected = estimate(np.subtract(A, B)), stats.ttest_rel(A, B)
    assert (found.p, found.df, found.n) == (pytest.approx(expected.pvalue, rel=1e-12), 5, 6)
    for level in (0.9, 0.95, 1 - 0.05 / 7):
        assert found.interval(level) == pytest.approx(
            tuple(expected.confidence_interval(level)), rel=1e-12
        )


def test_estimates_without_a_test():
    single, same = estimate([0.3]), estimate([0.25, 0.25])
    assert (single.mean, single.interval()) == (0.3, (-math.inf, math.inf))
    for e in (same, statistics.mean_over_cells([same, same]).mean):
        assert (e.mean, e.interval()) == (0.25, (0.25, 0.25))
    assert math.isnan(single.p)
    assert math.isnan(same.p)


def test_holm_is_that_of_a_published_example_and_of_its_definition():
    """The example is R's p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.005), "holm")."""
    assert statistics.holm([0.01, 0.02, 0.03, 0.04, 0.005]) == pytest.approx(
        [0.04, 0.06, 0.06, 0.06, 0.025]
    )
    assert statistics.holm([0.9, 0.8, math.nan]) == pytest.approx([1, 1, math.nan], nan_ok=True)
    assert statistics.holm([]) == []


def test_an_interval_at_holms_level_excludes_0_where_the_corrected_p_is_small():
    """The property by which verdicts and p-values cannot disagree, with and without true
    differences.
    """
    draw = np.random.default_rng(0)
    n_significant = 0
    for _ in range(300):
        found = [estimate(draw.normal(draw.choice([0, 0.8]), 1, 8)) for _ in range(6)]
        p_values = [e.p for e in found]
        corrected, factors = statistics.holm(p_values), statistics.holm_factors(p_values)
        for e, p, factor in zip(found, corrected, factors, strict=True):
            low, high = e.interval(1 - 0.05 / factor)
            assert (low > 0 or high < 0) == (p < 0.05)
            n_significant += p < 0.05
    assert 100 < n_significant < 1700


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-0.02, -0.006, BETTER), (0.006, 0.02, WORSE), (0.001, 0.02, DIFFERENT), (-0.02, -0.001, DIFFERENT),
     (-0.004, 0.004, SAME), (0.001, 0.004, SAME), (0.0, 0.0, SAME), (-0.006, 0.004, NOT_SHOWN),
     (-math.inf, math.inf, NOT_SHOWN), (-0.005, 0.005, NOT_SHOWN)],
)  # fmt: skip
def test_verdicts(low, high, expected):
    assert statistics.verdict(low, high, 0.005) == expected


def test_the_mean_over_two_cells_is_welchs_test():
    """The mean of A and -B is half of Welch's difference of two means, with Satterthwaite's degrees
    of freedom.
    """
    a, b = estimate(A), estimate([-2 * x for x in B])
    found, expected = (
        statistics.mean_over_cells([a, b]),
        stats.ttest_ind(A, [2 * x for x in B], equal_var=False),
    )
    assert (found.mean.p, found.mean.df) == pytest.approx((expected.pvalue, expected.df), rel=1e-12)
    assert found.mean.interval() == pytest.approx(
        [x / 2 for x in expected.confidence_interval()], rel=1e-12
    )


def test_the_spread_over_cells():
    """The effects 1, 2, 3 have variance 1. Standard errors of 1 explain all of it, and errors of 0
    nothing. Equal effects are predicted no better than the seeds allow.
    """
    exact = statistics.mean_over_cells([Estimate(x, 0.0, 4, 5) for x in (1.0, 2.0, 3.0)])
    noisy = statistics.mean_over_cells([Estimate(x, 1.0, 4, 5) for x in (1.0, 2.0, 3.0)])
    assert (exact.tau, noisy.tau) == (1.0, 0.0)
    # of the prediction of one more draw from a normal distribution
    half = stats.t.ppf(0.975, 2) * math.sqrt(1 + 1 / 3)
    assert exact.prediction == noisy.prediction == pytest.approx((2 - half, 2 + half))
    equal = statistics.mean_over_cells([Estimate(2.0, 1.0, 4, 5)] * 3)
    assert equal.prediction == pytest.approx((2 - half, 2 + half))


def test_an_error_that_values_share_widens_the_interval_and_keeps_the_test_right():
    draw = np.random.default_rng(4)
    values = draw.normal(0, 1, (4000, 10)) + draw.normal(0, 0.3, (4000, 1))
    plain = [estimate(row) for row in values]
    wider = [statistics.with_error(e, 0.3**2, 40) for e in plain]
    assert np.mean([e.p < 0.05 for e in plain]) > 0.09
    assert np.mean([e.p < 0.05 for e in wider]) == pytest.approx(0.05, abs=0.012)
    assert all(w.se > e.se for w, e in zip(wider, plain, strict=True))


def test_the_detectable_difference_is_detected_in_4_of_5():
    """The exact power of the t test, by the noncentral t distribution."""
    for df, level in ((9, 0.95), (27, 1 - 0.05 / 29)):
        limit = stats.t.ppf(0.5 + level / 2, df)
        found = statistics.detectable(0.004, df, level)
        assert stats.nct.sf(limit, df, found / 0.004) == pytest.approx(0.8, abs=0.025)


def test_multipliers_of_a_known_power_law():
    """Losses fall by 0.1 per factor e of compute; the first variant is as good as the second with
    1.5 times as much.
    """
    compute = np.array([[1.0, 1.0], [3.0, 3.5], [10.0, 9.0]]) * 1e12
    losses = 10 - 0.1 * np.log(compute * [1.5, 1.0])
    runs = [[[x - 0.001, x + 0.001] for x in pair] for pair in losses]
    found = statistics.log_multipliers(compute, runs)
    assert [math.exp(e.mean) for e in found] == pytest.approx([1.5] * 3, rel=1e-9)
    assert statistics.compute_saved(found[0].mean) == pytest.approx(1 / 3)
    assert statistics.log_multipliers(compute[::-1], runs) is None  # the loss rises
    assert statistics.log_multipliers(compute[:1], runs[:1]) is None
