"""Compute multipliers: known truths, derivations, and the jackknife beside scipy and the paired t test."""

import numpy as np
import pytest
from scipy import stats

from lm.sweeps.statistics import inference, scaling

FLOPS = np.array([1e11, 5e11, 2e12, 8e12])
BOTH = np.stack([FLOPS, FLOPS], axis=1)


def losses(multipliers, noise=0.0, seeds=5, floor=1.4):
    """Return the losses (S, N, 2) of runs on a power law, where the first variant has `multipliers` times the FLOPs."""
    compute_S2 = np.stack([FLOPS * multipliers, FLOPS], axis=1)
    draw = np.random.default_rng(0)
    return (floor + 60 * compute_S2**-0.17)[:, None] + draw.normal(0, noise, (4, seeds, 2))


@pytest.mark.parametrize("truth", [1.0, 1.15, 0.9, np.array([1.05, 1.1, 1.2, 1.3])])
def test_known_multipliers_are_found(truth):
    """Without noise the only error is that of the parabola and of the first order: below 2 % of m."""
    found = scaling.multipliers(BOTH, losses(truth))
    expected = np.log(np.broadcast_to(truth, 4))
    np.testing.assert_allclose([e.value for e in found.at_sizes], expected, atol=0.02)
    assert found.pooled.value == pytest.approx(np.mean([e.value for e in found.at_sizes]))
    assert found.trend.value == pytest.approx(np.polyfit(np.log10(FLOPS), expected, 1)[0], abs=0.02)


def test_more_compute_of_the_variant_counts_against_it():
    """At the same losses with 1.5 times the FLOPs, ln m is ln(1 / 1.5) for a loss that is linear in ln C."""
    compute_S2 = np.stack([1.5 * FLOPS, FLOPS], axis=1)
    loss_S2 = np.tile(9 - 0.1 * np.log(FLOPS)[:, None], (1, 2))
    np.testing.assert_allclose(scaling.log_multipliers(compute_S2, loss_S2), -np.log(1.5))


def test_exchanging_the_variants_changes_the_sign():
    data = losses(1.2, noise=0.01)
    one, other = scaling.multipliers(BOTH, data), scaling.multipliers(BOTH, data[:, :, ::-1])
    for a, b in zip([*one.at_sizes, one.pooled, one.trend], [*other.at_sizes, other.pooled, other.trend], strict=True):
        assert (a.value, a.low, a.high, a.p) == pytest.approx((-b.value, -b.high, -b.low, b.p))


def test_a_loss_that_does_not_fall_has_no_multiplier():
    rising = losses(1.2)[::-1]
    assert scaling.multipliers(BOTH, rising) is None


def test_the_interval_of_one_group_is_that_of_the_paired_t_test():
    data = np.random.default_rng(1).normal(0, 1, (1, 6, 2))
    found = scaling.jackknife(lambda means_S2: means_S2[0, :1] - means_S2[0, 1:], data)[0]
    expected = inference.paired_difference(data[0, :, 0], data[0, :, 1])
    assert found == pytest.approx((expected.mean, expected.low, expected.high, expected.p))


def test_groups_of_unequal_variance_are_pooled_as_by_welch():
    a, b = np.random.default_rng(2).normal(0, [[1.0], [5.0]], (2, 5))
    found = scaling.jackknife(lambda means_S: means_S[:1] - means_S[1:], np.stack([a, b]))[0]
    expected = stats.ttest_ind(a, b, equal_var=False)
    assert found[1:] == pytest.approx((*expected.confidence_interval(), expected.pvalue))


def test_runs_without_variation_have_no_p_value():
    found = scaling.multipliers(BOTH, losses(1.2))
    for e in (*found.at_sizes, found.pooled, found.trend):
        assert e.low == e.high == e.value
        assert np.isnan(e.p)


def test_intervals_cover_the_truth():
    """In 100 simulated sweeps, at least 0.90 of the intervals cover the truth of m = 1.2 at all sizes."""
    draw, covered = np.random.default_rng(3), []
    for _ in range(100):
        found = scaling.multipliers(BOTH, losses(1.2) + draw.normal(0, 0.01, (4, 5, 2)))
        covered.append([e.low <= truth <= e.high for e, truth in ((found.pooled, np.log(1.2)), (found.trend, 0))])
    assert (np.mean(covered, axis=0) > 0.9).all()


def test_the_power_law_is_that_of_the_losses():
    floor, factors, exponent = scaling.power_law(BOTH, losses(1.3).mean(axis=1))
    assert (floor, exponent) == pytest.approx((1.4, 0.17), rel=1e-3)
    assert (factors[1] / factors[0]) ** (1 / exponent) == pytest.approx(1.3, rel=1e-3)
