"""Statistics of few seeds: intervals, paired differences, Holm's correction, detectable differences, sampling error."""

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

LEVEL = 0.95  # of every confidence interval; tests are at 1 - LEVEL
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

    detectable: the smallest true difference that such a test finds with probability POWER; see `detectable`.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int
    detectable: float


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


def paired_difference(a, b, comparisons: int = 1) -> Difference:
    """Test a - b, paired by position (by seed), with the one-sample t test of the differences.

    Args:
        a, b: the values of the same seeds in the same order.
        comparisons: the number of tests in the sweep. Only `detectable` depends on it; for p see `holm`.

    Returns:
        The Difference. p is nan for one pair, and where all differences are the same number other than 0.

    >>> d = paired_difference([2.1, 2.3, 2.2], [2.0, 2.1, 2.1])
    >>> round(d.mean, 4), round(d.p, 4)
    (0.1333, 0.0572)
    """
    d = np.asarray(a, float) - np.asarray(b, float)
    mean, low, high, sd, n = interval(d)
    if n < 2:
        return Difference(mean, low, high, math.nan, n, math.inf)
    error = sd / math.sqrt(n)
    if error == 0:  # seeds without variation are one measurement, which has no p-value
        return Difference(mean, low, high, 1.0 if mean == 0 else math.nan, n, 0.0)
    p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
    return Difference(mean, low, high, p, n, detectable(sd, n, comparisons))


def detectable(sd: float, n: int, comparisons: int = 1) -> float:
    """Return the smallest true difference that a two-sided paired t test finds with probability POWER.

    Args:
        sd: the standard deviation of the paired differences.
        n: the number of pairs.
        comparisons: the level of the test is (1 - LEVEL) / comparisons, as in the first step of Holm's correction.

    >>> round(detectable(1.0, 10), 3)
    0.996
    """
    return _noncentrality(n, comparisons) * sd / math.sqrt(n)


@functools.cache
def _noncentrality(n: int, comparisons: int) -> float:
    """Return the noncentrality of Student's t at which the test has power POWER (Cohen 1988, chapter 2)."""
    critical = stats.t.isf((1 - LEVEL) / 2 / comparisons, n - 1)

    def missing_power(shift: float) -> float:  # without the far tail: below 0.0001 here, and scipy's is often nan
        return float(stats.nct.sf(critical, n - 1, shift)) - POWER

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
    """Return the standard error of sum(sums) / sum(counts) over blocks of text (ratio estimate, Cochran 1977, eq. 6.4).

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
