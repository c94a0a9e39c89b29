"""Moderated variances: limiting cases with known answers, and error rates and power by simulation."""

import math

import numpy as np
import pytest
from scipy import special, stats

from lm.sweeps.statistics import inference
from lm.sweeps.statistics.moderation import NO_PRIOR, Prior, fit_prior, moderate, trigamma_inverse

DRAW = np.random.default_rng(20260201)
LOSSES = 2 + DRAW.normal(scale=0.02, size=5) + DRAW.normal(size=(4, 5)) * np.array([[0.001], [0.02], [0.002], [0.04]])


@pytest.mark.parametrize(
    ("y", "x"), [(0.5, math.pi**2 / 2), (1, math.pi**2 / 6), (2, math.pi**2 / 6 - 1), (1e5, 1.000005e-5), (1e-4, 1e8)]
)
def test_trigamma_inverse(y, x):
    assert trigamma_inverse(x) == pytest.approx(y, rel=1e-6)


def test_the_prior_satisfies_the_equations_of_smyth():
    """For k = 4 variants and d = 4: var(log s^2) = 4/5 trigamma(d/2) + trigamma(d0/2) over the 6 pairs."""
    pairs = [(i, j) for i in range(4) for j in range(i)]
    logs = [math.log(stats.tstd(LOSSES[i] - LOSSES[j]) ** 2) for i, j in pairs]
    prior = fit_prior(LOSSES)
    assert 0 < prior.df < 8  # below the largest possible one
    assert stats.tvar(logs) == pytest.approx(0.8 * special.polygamma(1, 2) + special.polygamma(1, prior.df / 2))
    assert prior.variance == pytest.approx(np.mean(np.exp(logs)))


def test_the_mean_variance_of_all_pairs_is_twice_the_residual_variance():
    residuals = LOSSES - LOSSES.mean(axis=0) - LOSSES.mean(axis=1, keepdims=True) + LOSSES.mean()
    assert fit_prior(LOSSES).variance == pytest.approx(2 * np.sum(residuals**2) / (3 * 4))


def test_equal_variances_give_the_t_test_of_a_two_way_analysis_of_variance():
    """If the differences of all pairs vary alike, d0 is the largest possible one, and the test pools all residuals."""
    basis = np.linalg.qr(np.column_stack([np.ones(5), DRAW.normal(size=(5, 3))]))[0][:, 1:]  # orthogonal to the mean
    losses = 2 + DRAW.normal(size=5) + 0.01 * basis.T + np.array([[0.0], [0.007], [0.002]])
    prior = fit_prior(losses)
    assert prior.df == (3 - 2) * (5 - 1)
    found = inference.paired_difference(losses[1], losses[0], prior=prior)
    # Least squares with the effects of variants and seeds.
    design = np.array([[v == 1, v == 2, *(s == i for i in range(5))] for v in range(3) for s in range(5)], float)
    effects, (squares,), *_ = np.linalg.lstsq(design, losses.ravel(), rcond=None)
    error = math.sqrt(squares / 8 * np.linalg.inv(design.T @ design)[0, 0])
    assert (found.mean, found.error, found.df) == pytest.approx((effects[0], error, 8))
    assert found.p == pytest.approx(2 * stats.t.sf(effects[0] / error, 8))


def test_a_prior_that_is_certain_gives_the_normal_test():
    wide = inference.paired_difference(LOSSES[0], LOSSES[1], prior=Prior(0.1**2, 1e12))
    assert wide.p == pytest.approx(2 * stats.norm.sf(abs(wide.mean) / (0.1 / math.sqrt(5))), rel=1e-6)


def test_the_prior_loses_weight_where_the_variance_is_larger():
    assert moderate(0.5, 4, Prior(1.0, 8)) == (10 / 12, 12)
    assert moderate(1.0, 4, Prior(1.0, 8)) == pytest.approx((1, 12))
    weight = (stats.f.sf(3, 4, 8) / stats.f.sf(1, 4, 8)) ** 2
    assert moderate(3.0, 4, Prior(1.0, 8)) == pytest.approx(((8 * weight + 12) / (8 * weight + 4), 8 * weight + 4))
    assert moderate(100.0, 4, Prior(1.0, 8)) == pytest.approx((100, 4), rel=1e-4)
    assert moderate(2.0, 4, NO_PRIOR) == (2, 4)


@pytest.mark.parametrize("losses", [[], LOSSES[:1], LOSSES[:2], LOSSES[:, :1], [LOSSES[0], LOSSES[1], LOSSES[0] + 0.5]])
def test_two_variants_or_one_seed_give_the_ordinary_t_test(losses):
    assert fit_prior(losses) == NO_PRIOR
    found = inference.paired_difference(LOSSES[0], LOSSES[1], prior=fit_prior(losses))
    assert found.p == pytest.approx(stats.ttest_rel(LOSSES[0], LOSSES[1]).pvalue)


def test_effects_of_seeds_and_of_variants_do_not_change_the_prior():
    shifted = LOSSES + DRAW.normal(size=5) + DRAW.normal(size=(4, 1))
    assert fit_prior(shifted) == pytest.approx(fit_prior(LOSSES), rel=1e-6)


def test_variants_that_differ_by_rounding_neither_change_nor_use_the_prior():
    rounded = LOSSES[0] + 1e-8 * np.arange(5)
    prior = fit_prior([*LOSSES, rounded])
    assert prior == pytest.approx(fit_prior(LOSSES), rel=1e-5)
    found = inference.paired_difference(rounded, LOSSES[0], prior=prior)
    assert (found.df, found.p) == (4, pytest.approx(stats.ttest_1samp(1e-8 * np.arange(5), 0).pvalue, rel=1e-3))


@pytest.mark.parametrize("k", [3, 5, 8])
def test_pairs_that_share_variants_spread_less_by_the_stated_factor(k):
    """With equal variances, log(s^2) over all pairs of k variants varies by about k / (k + 1) of trigamma(d / 2)."""
    x = np.random.default_rng(k).normal(size=(20_000, k, 5))
    first, second = np.triu_indices(k, 1)
    spread = np.log((x[:, first] - x[:, second]).var(axis=2, ddof=1)).var(axis=1, ddof=1).mean()
    assert spread == pytest.approx(k / (k + 1) * special.polygamma(1, 2), rel=0.06)


def test_moderation_keeps_the_error_rate_and_raises_the_power():
    """4 comparisons with one variant under Holm's correction, 5 seeds; the first difference is 0 or 0.02."""
    sweeps, draw = 400, np.random.default_rng(7)
    rejected = {False: [], True: []}
    for _ in range(sweeps):
        sds = np.exp(draw.uniform(*np.log([0.006, 0.016]), (5, 1)))
        losses = draw.normal(scale=0.01, size=5) + draw.normal(size=(5, 5)) * sds
        for is_moderated, found in rejected.items():
            prior = fit_prior(losses) if is_moderated else NO_PRIOR
            null = [inference.paired_difference(v, losses[0], prior=prior).p for v in losses[1:]]
            found.append((*null, inference.paired_difference(losses[1] + 0.02, losses[0], prior=prior).p))
    p = np.array(rejected[True])
    wrong = np.sum(p[:, :4].min(axis=1) < 0.05 / 4)
    assert wrong <= stats.binom.ppf(1 - 1e-4, sweeps, 0.05)
    power = {is_moderated: np.mean(np.array(found)[:, 4] < 0.05 / 4) for is_moderated, found in rejected.items()}
    assert power[True] > power[False] + 0.15


def test_moderation_of_a_noisy_variant():
    """11 equal variants, one with five times the standard deviation of the others: its weight of the prior is small."""
    draw, wrong = np.random.default_rng(11), {"weighted": 0, "always": 0}
    for _ in range(1000):
        losses = draw.normal(size=(11, 5)) * np.where(np.arange(11) == 1, 5, 1)[:, None]
        prior = fit_prior(losses)
        wrong["weighted"] += inference.paired_difference(losses[1], losses[0], prior=prior).p < 0.05
        d, df = losses[1] - losses[0], prior.df + 4
        error = math.sqrt((prior.df * prior.variance + 4 * stats.tvar(d)) / df / 5)
        wrong["always"] += 2 * stats.t.sf(abs(d.mean()) / error, df) < 0.05
    assert wrong["weighted"] <= 90 < 110 < wrong["always"]
