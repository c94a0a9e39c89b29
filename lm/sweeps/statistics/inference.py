"""Statistics of few seeds: intervals, paired tests, corrections, power, errors over text, the jackknife."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from lm.sweeps.statistics.moderation import NO_PRIOR, ROUNDING, Prior, moderate

LEVEL = 0.95  # of every confidence interval; a test is significant below 1 - LEVEL
POWER = 0.8  # at which detectable differences are computed


class Interval(NamedTuple):
    """Mean, confidence interval (infinite if n = 1) and standard deviation of n values."""

    mean: float
    low: float
    high: float
    sd: float
    n: int


class Difference(NamedTuple):
    """Mean of n paired differences, its confidence interval, and the two-sided p-value of "the mean is 0".

    Attributes:
        mean, low, high, p, n: as above.
        sd: the standard deviation of the differences, moderated if there was a prior.
        df: its degrees of freedom, n - 1 plus those of the prior.
        comparisons: the number of tests in the sweep, for `detectable` and `simultaneous`.
        share: the share of the error 1 - LEVEL that this look may spend; p and the interval include it.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int
    sd: float
    df: float
    comparisons: int = 1
    share: float = 1.0

    @property
    def error(self) -> float:
        """Return the standard error of the mean."""
        return self.sd / math.sqrt(self.n)

    @property
    def simultaneous(self) -> tuple[float, float]:
        """Return the Bonferroni interval, for all comparisons to cover at once with probability LEVEL (Dunn 1961)."""
        if self.n < 2:
            return -math.inf, math.inf
        half = float(stats.t.isf(self.share * (1 - LEVEL) / 2 / self.comparisons, self.df)) * self.error
        return self.mean - half, self.mean + half

    @property
    def detectable(self) -> float:
        """Return the smallest true difference that such a test finds with probability POWER; see `detectable`."""
        return detectable(self.sd, self.n, self.comparisons / self.share, self.df)

    @property
    def detectable_range(self) -> tuple[float, float]:
        """Return the confidence interval of `detectable`, which is as uncertain as the standard deviation it uses.

        With v degrees of freedom, v s^2 / sigma^2 has a chi-square distribution.
        """
        if self.n < 2:
            return 0.0, math.inf
        quantiles = stats.chi2.ppf([(1 + LEVEL) / 2, (1 - LEVEL) / 2], self.df)
        low, high = self.detectable * np.sqrt(self.df / quantiles)
        return float(low), float(high)


class CrossedInterval(NamedTuple):
    """Mean over seeds and text, its confidence interval, its standard error and that error's degrees of freedom."""

    mean: float
    low: float
    high: float
    error: float
    df: float


def interval(values) -> Interval:
    """Return the mean and its t interval, mean +- t_{n-1} s / sqrt(n) (Student 1908).

    >>> [round(x, 4) for x in interval([1, 2, 3])[:4]]
    [2.0, -0.4841, 4.4841, 1.0]
    """
    x = np.asarray(values, float)
    n, mean = len(x), float(np.mean(x))
    if n < 2:
        return Interval(mean, -math.inf, math.inf, math.nan, n)
    sd = float(np.std(x, ddof=1))
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * sd / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, sd, n)


def paired_difference(a, b, comparisons: int = 1, prior: Prior = NO_PRIOR, share: float = 1.0) -> Difference:
    """Test a - b, paired by position (by seed), with the one-sample t test of the differences.

    Args:
        a, b: the values of the same seeds in the same order.
        comparisons: the number of tests in the sweep. p does not depend on it; see `holm`.
        prior: the prior of the variance of the differences; with it the test is Smyth's moderated t test (2004, eq. 3).
            It is not used for differences that vary by ROUNDING only.
        share: the share of the error 1 - LEVEL that this look may spend; see `shares`. p is divided by it. The interval
            has the level 1 - share (1 - LEVEL), so it excludes 0 if p is below 1 - LEVEL: a repeated confidence
            interval (Jennison and Turnbull 1989).

    Returns:
        The Difference. p is nan for one pair, and where all differences are the same number other than 0.

    >>> d = paired_difference([2.1, 2.3, 2.2], [2.0, 2.1, 2.1])
    >>> round(d.mean, 4), round(d.p, 4)
    (0.1333, 0.0572)
    """
    d = np.asarray(a, float) - np.asarray(b, float)
    mean, low, high, sd, n = interval(d)
    if n < 2:
        return Difference(mean, low, high, math.nan, n, math.inf, 0.0, comparisons, share)
    if sd == 0:  # seeds without variation are one measurement, which has no p-value
        return Difference(mean, low, high, 1.0 if mean == 0 else math.nan, n, 0.0, n - 1, comparisons, share)
    variance, df = moderate(sd**2, n - 1, prior if sd > ROUNDING else NO_PRIOR)
    sd = math.sqrt(variance)
    error = sd / math.sqrt(n)
    half = float(stats.t.isf(share * (1 - LEVEL) / 2, df)) * error
    p = min(1.0, 2 * float(stats.t.sf(abs(mean) / error, df)) / share)
    return Difference(mean, mean - half, mean + half, p, n, sd, df, comparisons, share)


def shares(looks) -> list[float]:
    """Return the share of the error 1 - LEVEL that each look at growing data may spend: n_k / sum(n).

    The shares add up to 1. By Bonferroni's inequality the chance that any look rejects a true hypothesis is then at
    most 1 - LEVEL, for any test, any dependence of the looks, and any level that Holm's correction sets.

    Args:
        looks: the number of pairs at each look.

    >>> [round(0.05 * share, 4) for share in shares([5, 8, 12, 20])]
    [0.0056, 0.0089, 0.0133, 0.0222]
    """
    return [n / sum(looks) for n in looks]


def detectable(sd: float, n: int, comparisons: float = 1, df: float | None = None) -> float:
    """Return the smallest true difference that a two-sided paired t test finds with probability POWER.

    Args:
        sd: the standard deviation of the paired differences.
        n: the number of pairs.
        comparisons: the level of the test is (1 - LEVEL) / comparisons, as in the first step of Holm's correction.
        df: the degrees of freedom of sd, if not n - 1.

    >>> round(detectable(1.0, 10), 3)
    0.996
    """
    if n < 2:
        return math.inf
    return _noncentrality(n - 1 if df is None else df, comparisons) * sd / math.sqrt(n)


@functools.cache
def _noncentrality(df: float, comparisons: float) -> float:
    """Return the noncentrality of Student's t at which the test has power POWER (Cohen 1988, chapter 2)."""
    critical = stats.t.isf((1 - LEVEL) / 2 / comparisons, df)

    def missing_power(shift: float) -> float:  # without the far tail: below 0.0001 here, and scipy's is often nan
        return float(stats.nct.sf(critical, df, shift)) - POWER

    high = 1.0
    while missing_power(high) < 0:
        high *= 2
    return optimize.brentq(missing_power, 0, high, xtol=1e-12)


def holm(p_values) -> list[float]:
    """Adjust p-values for their number so that the chance of any false rejection is at most 1 - LEVEL (Holm 1979).

    A p-value of nan stays nan and counts as one of the tests.

    >>> [round(p, 4) for p in holm([0.01, 0.04, 0.03, 0.005])]
    [0.03, 0.06, 0.06, 0.02]
    """
    p = np.asarray(p_values, float)
    adjusted, running = np.full(len(p), math.nan), 0.0
    for rank, i in enumerate(np.argsort(p)):  # nan sorts last
        if not math.isnan(p[i]):
            running = max(running, min(1.0, (len(p) - rank) * p[i]))
            adjusted[i] = running
    return adjusted.tolist()


def sampling_error(sums, counts) -> float:
    """Return the standard error of r = sum(sums) / sum(counts) over n blocks of text.

    This is the linearized error of a ratio (Cochran 1977, Sampling Techniques, chapter 6, eq. 6.4): for blocks i of
    count c_i and sum s_i, error^2 = n / (n - 1) * sum((s_i - r c_i)^2) / sum(c)^2.

    Args:
        sums: the loss of each block in nats.
        counts: its number of tokens. The blocks are consecutive text and are taken as independent.

    >>> round(sampling_error([205, 192, 103], [100, 100, 50]), 4)
    0.0485
    """
    s, c = np.asarray(sums, float), np.asarray(counts, float)
    residuals = s - s.sum() / c.sum() * c
    n = len(s)
    return math.inf if n < 2 else float(math.sqrt(n / (n - 1) * np.sum(residuals**2)) / c.sum())


def crossed_interval(sums, counts, over_seeds: Difference | None = None) -> CrossedInterval:
    """Return the mean of r_i = sum_j(sums_ij) / sum_j(counts_j) and its interval over other seeds i and other text j.

    All n seeds are evaluated on the same m blocks of text, so a block that is harder than others is so for every seed,
    and more seeds do not reduce this error. In the two-way random model r_ij = mean + seed_i + block_j + rest_ij the
    variance of the mean is var(seed) / n + var(block) / m + var(rest) / (n m). It is estimated by s^2 / n, where s is
    the standard deviation of the r_i, plus the part of `sampling_error`^2 of the summed seeds that is not due to
    rest_ij, and at least 0 (Hillis 2007, Stat. Med. 26:596, with seeds for readers and blocks for cases). The degrees
    of freedom are Satterthwaite's (1946). The interval contains that of the seeds alone: a small text error would
    otherwise narrow it, because it adds degrees of freedom.

    Args:
        sums: for each seed and block the difference of two losses, or a loss, in nats (n, m).
        counts: the number of tokens of each block (m,). Blocks are taken as independent.
        over_seeds: the test of the same differences over seeds. Its variance, which may be moderated, takes the place
            of s^2, its degrees of freedom that of n - 1, and its share of the error is that of the interval.

    Returns:
        The CrossedInterval; infinite for one seed or one block.

    >>> found = crossed_interval([[1, 2, 6], [2, 3, 7]], [1, 1, 1])
    >>> round(found.mean, 4), round(found.error, 4), round(found.df, 2)
    (3.5, 1.6073, 2.4)
    """
    x_SB, c_B = np.asarray(sums, float), np.asarray(counts, float)
    (n, m), total = x_SB.shape, c_B.sum()
    r_S = x_SB.sum(axis=1) / total
    mean = float(r_S.mean())
    if n < 2 or m < 2:
        return CrossedInterval(mean, -math.inf, math.inf, math.inf, math.nan)
    residuals_SB = (x_SB - np.outer(r_S, c_B)) / total
    shared_B = residuals_SB.mean(axis=0)
    seeds, df_of_seeds, share = float(r_S.var(ddof=1)) / n, n - 1, 1.0
    if over_seeds:
        seeds, df_of_seeds, share = over_seeds.error**2, over_seeds.df, over_seeds.share
    blocks = m / (m - 1) * float(np.sum(shared_B**2))
    rest = m / (m - 1) / (n - 1) / n * float(np.sum((residuals_SB - shared_B) ** 2))
    text = max(blocks - rest, 0.0)
    variance = seeds + text
    if variance == 0:
        return CrossedInterval(mean, mean, mean, 0.0, math.nan)
    df = variance**2 / (seeds**2 / df_of_seeds + text**2 / (m - 1))
    t, t_of_seeds = stats.t.isf(share * (1 - LEVEL) / 2, [df, df_of_seeds])
    half = float(max(t * math.sqrt(variance), t_of_seeds * math.sqrt(seeds)))
    return CrossedInterval(mean, mean - half, mean + half, math.sqrt(variance), df)


def learning_rate_sensitivity(losses, ceiling: float) -> float:
    """Return the expected deviation from the best loss when the learning rate is drawn from a grid.

    This is E[min(loss, ceiling)] - min(loss) over the rates (Wortsman et al. 2023, arXiv:2309.14322, section 2.2; their
    ceiling is the loss at initialization). 0: the rate does not matter.

    Args:
        losses: the loss of each rate and seed (rates, seeds); nan where a run diverged, which counts as the ceiling.
            The mean over the seeds is the loss of a rate.
        ceiling: larger losses count as this one, so that all rates at which nothing is learned have the same weight.

    >>> round(learning_rate_sensitivity([[2.2], [2.0], [float("nan")]], 3.0), 4)
    0.4
    """
    clipped = np.fmin(np.asarray(losses, float), ceiling).mean(axis=1)
    return float(clipped.mean() - clipped.min())


def parabola_minimum(x, y) -> tuple[float, float]:
    """Return (x, y) at the minimum of the parabola through three points; nan if it lies outside of them.

    Args:
        x, y: three abscissas in ascending order, and their ordinates.

    >>> parabola_minimum([0, 1, 2], [3.0, 1.0, 1.0])
    (1.5, 0.75)
    >>> parabola_minimum([0, 1, 2], [1.0, 2.0, 2.5])
    (nan, nan)
    """
    (x0, x1, x2), (y0, y1, y2) = np.asarray(x, float), np.asarray(y, float)
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)  # Newton's divided differences
    curvature = (right - left) / (x2 - x0)
    at = (x0 + x1) / 2 - left / (2 * curvature) if curvature > 0 else math.nan
    if not x0 <= at <= x2:
        return math.nan, math.nan
    return float(at), float(y0 + left * (at - x0) + curvature * (at - x0) * (at - x1))


def pseudo_values(estimate: Callable[[np.ndarray], float], data: np.ndarray) -> np.ndarray:
    """Return the jackknife's pseudo-values, n estimate(data) - (n-1) estimate(data without row i) (Tukey 1958).

    Their mean is the estimate without its bias of order 1/n (Quenouille 1956). Their t interval is an approximate
    interval of the estimate.

    Args:
        estimate: a smooth function of the rows of an array.
        data: an array of n rows, at least 2.

    Returns:
        The pseudo-values (n,). Those of the mean are the data.

    >>> pseudo_values(np.mean, np.array([1.0, 2.0, 6.0])).tolist()
    [1.0, 2.0, 6.0]
    """
    n, full = len(data), estimate(data)
    return np.array([n * full - (n - 1) * estimate(np.delete(data, i, axis=0)) for i in range(n)])
