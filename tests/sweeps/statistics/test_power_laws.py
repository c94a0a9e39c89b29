"""Fits of E + A x^-a: known truths, scipy's general least squares, the F test, and intervals that cover the truth."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from lm.sweeps.statistics.inference import LEVEL
from lm.sweeps.statistics.power_laws import fit

X = np.array([4e3, 7e3, 1.6e4, 2.8e4, 6e4, 1.1e5])


def losses(exponent, floor, noise=0.0, seeds=5, random=0):
    draw = np.random.default_rng(random)
    return floor + 0.4 * (X[:, None] / X[0]) ** -exponent + draw.normal(0, noise, (len(X), seeds))


@pytest.mark.parametrize("exponent", [0.1, 0.35, 0.8, 1.5])
@pytest.mark.parametrize("floor", [0.0, 1.9])
def test_exponents_of_synthetic_losses_are_recovered(exponent, floor):
    law = fit(X, losses(exponent, floor))
    assert law.exponent == pytest.approx([exponent] * 3, rel=1e-6)
    assert law.floor == pytest.approx([floor] * 3, abs=1e-6)
    assert law.factor == pytest.approx(0.4 * X[0] ** exponent, rel=1e-5)
    np.testing.assert_allclose(law(X), floor + 0.4 * (X / X[0]) ** -exponent)
    assert math.isnan(law.p_misfit)  # no variation over seeds to compare with


def test_the_fit_is_that_of_general_least_squares():
    data = losses(0.4, 1.9, noise=0.01)
    law = fit(X, data)
    curve = lambda x, floor, factor, exponent: floor + factor * (x / X[0]) ** -exponent  # noqa: E731
    (floor, factor, exponent), _ = optimize.curve_fit(curve, X, data.mean(axis=1), p0=(1.8, 0.5, 0.3))
    found = law.floor.value, law.factor * X[0] ** -law.exponent.value, law.exponent.value
    assert found == pytest.approx((floor, factor, exponent), rel=1e-5)
    rss = np.sum((curve(X, floor, factor, exponent) - data.mean(axis=1)) ** 2)
    statistic = rss / 3 / (data.var(axis=1, ddof=1).mean() / 5)
    assert law.p_misfit == pytest.approx(stats.f.sf(statistic, 3, 24), rel=1e-4)


@pytest.mark.parametrize("which", ["floor", "exponent"])
def test_the_ends_of_an_interval_satisfy_its_definition(which):
    """At an end, the best fit over the other two parameters has t^2 s^2 / n more squared error than the best of all."""
    data = losses(0.4, 1.9, noise=0.01)
    law, mean = fit(X, data), data.mean(axis=1)
    spare = stats.t.ppf((1 + LEVEL) / 2, 24) ** 2 * data.var(axis=1, ddof=1).mean() / 5
    least = np.sum((law(X) - mean) ** 2)
    for end in getattr(law, which)[1:]:

        def residuals(free, end=end):
            floor, exponent = (end, free[1]) if which == "floor" else (free[1], end)
            return floor + free[0] * (X / X[0]) ** -exponent - mean

        start = [0.4, law.exponent.value if which == "floor" else law.floor.value]
        rss = 2 * optimize.least_squares(residuals, start, x_scale=[1, 0.1], xtol=1e-12, ftol=1e-12).cost
        assert (rss - least) / spare == pytest.approx(1, abs=0.01)  # the grid of exponents is finite


def test_other_units_of_the_size_change_the_factor_alone():
    data = losses(0.4, 1.9, noise=0.01)
    one, other = fit(X, data), fit(6 * X, data)
    assert (*other.floor, *other.exponent) == pytest.approx((*one.floor, *one.exponent), rel=1e-6)
    assert other.factor == pytest.approx(one.factor * 6**one.exponent.value, rel=1e-5)


def test_a_straight_line_over_the_logarithm_has_no_lower_limit():
    line = 3 - 0.1 * np.log(X)[:, None]
    assert fit(X, line + np.zeros((6, 5))) is None
    law = fit(X, losses(0.05, 1.0, noise=0.01))
    assert law.floor.low == -math.inf
    assert law.exponent.low == 0
    assert math.isfinite(law.floor.high)


@pytest.mark.parametrize("data", [3 + 0.1 * np.log(X), 9 - 0.1 * np.log(X) ** 2, [2, 1, 1, 1, 1, 1], 0 * X])
def test_losses_that_fall_in_another_way_have_no_exponent(data):
    assert fit(X, np.tile(np.array(data)[:, None], 3)) is None


def test_too_few_sizes_or_seeds_are_refused():
    with pytest.raises(ValueError, match="needs 4 different sizes and 2 seeds, got 3 and 5"):
        fit(X[:3], losses(0.4, 1.9)[:3])
    with pytest.raises(ValueError, match="got 6 and 1"):
        fit(X, losses(0.4, 1.9)[:, :1])


def test_intervals_cover_the_truth():
    """In 300 simulated sweeps the 95 % intervals of E and a miss the truth as often as they should: 0.05 +- 0.04."""
    found = [fit(X, losses(0.4, 1.9, noise=0.01, random=i)) for i in range(300)]
    for truth, intervals in ((1.9, [law.floor for law in found]), (0.4, [law.exponent for law in found])):
        missed = np.mean([not low <= truth <= high for _, low, high in intervals])
        assert 0.01 < missed < 0.09
    assert 0.01 < np.mean([law.p_misfit < 0.05 for law in found]) < 0.09
