"""Moderated variances: the variance of a difference over few seeds borrows strength from the other variants.

With 5 seeds a variance has 4 degrees of freedom, so the t test needs a large difference. The variances of the paired
differences of all variants of a sweep are similar. As in limma (Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3(1):3), they
are taken as draws from one scaled inverse chi-square distribution: a prior of variance s0^2 with d0 degrees of freedom,
fitted to the sweep itself. The test of a difference then uses (d0 s0^2 + d s^2) / (d0 + d) with d0 + d degrees of
freedom in the place of its own s^2 with d. If s^2 is larger than s0^2, d0 is reduced, because the variant may vary more
than the others. `benchmarks/calibration/moderation.py` simulates the error rate and the power.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, special, stats

ROUNDING = 1e-5  # nats per token; differences that vary less over seeds are rounding errors between equal models


class Prior(NamedTuple):
    """The prior of the variance of any paired difference of a sweep: s0^2 and d0, its degrees of freedom."""

    variance: float
    df: float


NO_PRIOR = Prior(0.0, 0.0)


def fit_prior(losses) -> Prior:
    """Fit the prior to the variances of the paired differences of all pairs of variants.

    d0 is Smyth's (2004, section 6.2): the variance of log(s^2) over the pairs exceeds trigamma(d / 2), that of sampling
    alone, by trigamma(d0 / 2). There are three changes for sweeps, which have few variants:

    * Two pairs that share a variant have correlated differences (1/2 if all variances are equal, so 1/4 for s^2). Over
      all pairs of k variants this lowers the expected variance of log(s^2) to about k / (k + 1) of trigamma(d / 2).
    * d0 is at most (k - 2) (n - 1), so that a test never has more degrees of freedom than the residuals of k variants
      and n seeds, (k - 1) (n - 1).
    * s0^2 is the mean of all s^2, which is twice the residual variance after removing the effects of variants and
      seeds. Smyth's s0^2 is smaller, so its test rejects more often.

    Args:
        losses: of comparable variants on the same seeds (variants, seeds). Variants that are equal but for ROUNDING
            count once.

    Returns:
        The Prior; NO_PRIOR for fewer than 3 variants or 2 seeds.

    >>> prior = fit_prior([[1.0, 2.0, 3.0], [1.0, 2.5, 2.5], [1.5, 2.0, 2.5]])
    >>> round(prior.variance, 3), prior.df
    (0.25, 2.0)
    """
    distinct = []
    for x in np.asarray(losses, float):
        if len(x) > 1 and all(np.std(x - other, ddof=1) > ROUNDING for other in distinct):
            distinct.append(x)
    if len(distinct) < 3:
        return NO_PRIOR
    k, n = np.shape(distinct)
    d = n - 1
    variances = np.array([np.var(a - b, ddof=1) for a, b in itertools.combinations(distinct, 2)])
    excess = np.var(np.log(variances), ddof=1) - special.polygamma(1, d / 2) * k / (k + 1)
    most = (k - 2) * d
    df = min(most, 2 * trigamma_inverse(float(excess))) if excess > 0 else most
    return Prior(float(variances.mean()), float(df))


def trigamma_inverse(x: float) -> float:
    """Return y with trigamma(y) = x, for x > 0.

    >>> round(trigamma_inverse(math.pi**2 / 6), 12)
    1.0
    """
    # 1/y < trigamma(y) < 1/y + 1/y^2 brackets the solution.
    return optimize.brentq(lambda y: special.polygamma(1, y) - x, 1 / x, (1 + math.sqrt(1 + 4 * x)) / (2 * x))


def moderate(variance: float, df: float, prior: Prior) -> tuple[float, float]:
    """Return the variance moderated by the prior (Smyth 2004, eq. 2), and its degrees of freedom.

    The larger the variance is relative to the prior, the smaller is the weight of the prior, as in Phipson et al.
    (2016, Ann. Appl. Stat. 10:946). With F = variance / s0^2, d0 is multiplied by the square of min(1, p(F) / p(1)),
    where p is the upper tail of the F distribution with d and d0 degrees of freedom. The square keeps the error over
    all comparisons below 1 - LEVEL even if one variant varies five times as much as the others.

    Args:
        variance, df: of the differences of one pair, and its degrees of freedom, n - 1.
        prior: that of the sweep.

    >>> moderate(1.0, 4, Prior(4.0, 2.0))
    (2.0, 6.0)
    >>> [round(x, 2) for x in moderate(4.0, 4, Prior(1.0, 2.0))]
    [3.8, 4.29]
    """
    if prior.df == 0:
        return variance, df
    larger, at_prior = stats.f.sf([variance / prior.variance, 1.0], df, prior.df)
    d0 = prior.df * min(1.0, float(larger / at_prior)) ** 2
    return (d0 * prior.variance + df * variance) / (d0 + df), d0 + df
