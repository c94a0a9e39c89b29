"""What a few seeds can tell: intervals, paired differences, corrections for many comparisons, sampling error."""

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95  # of every interval
POWER = 0.8  # with which the smallest detectable difference would have been found


class Interval(NamedTuple):
    """A mean of n values with its confidence interval (infinite for one value) and their standard deviation."""

    mean: float
    low: float
    high: float
    sd: float
    n: int


class Difference(NamedTuple):
    """The mean of n paired differences, its confidence interval, and the two-sided p-value of "there is none".

    detectable: the smallest true difference that would have been found with a probability of POWER, given the spread
    of these differences: with p < 0.05, divided by the number of comparisons as in the first step of Holm's correction.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int
    detectable: float


def interval(values) -> Interval:
    """The mean and its t interval (Student 1908): mean +- t_{n-1} s / sqrt(n)."""
    x = np.asarray(values, float)
    n, mean = len(x), float(np.mean(x))
    if n < 2:
        return Interval(mean, -math.inf, math.inf, math.nan, n)
    sd = float(np.std(x, ddof=1))
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * sd / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, sd, n)


def paired_difference(a, b, comparisons: int = 1) -> Difference:
    """a - b, paired by position (by seed): the one-sample t test of the differences, one of `comparisons` tests.

    Only `detectable` takes their number into account; the interval and p do not (see `holm`).
    """
    d = np.asarray(a, float) - np.asarray(b, float)
    mean, low, high, sd, n = interval(d)
    if n < 2:
        return Difference(mean, low, high, math.nan, n, math.inf)
    error = sd / math.sqrt(n)
    if error == 0:  # seeds that do not vary are one measurement, which has no p-value; without a difference p is 1
        return Difference(mean, low, high, 1.0 if mean == 0 else math.nan, n, 0.0)
    p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
    return Difference(mean, low, high, p, n, detectable(sd, n, comparisons))


def detectable(sd: float, n: int, comparisons: int = 1) -> float:
    """The true mean that a two-sided t test of n values with this spread finds with probability POWER."""
    return _shift(n, comparisons) * sd / math.sqrt(n)


@functools.cache
def _shift(n: int, comparisons: int) -> float:
    """The same in standard errors: the non-central t distribution solved for its shift (Cohen 1988, chapter 2)."""
    critical = stats.t.isf((1 - LEVEL) / 2 / comparisons, n - 1)

    def power(shift: float) -> float:  # without the far tail: below 0.0001 at this power, and scipy's is often nan
        return stats.nct.sf(critical, n - 1, shift)

    low, high = 0.0, 1.0
    while power(high) < POWER:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle) < POWER else (low, middle)
    return high


def holm(p_values) -> list[float]:
    """p-values adjusted for their number so that the chance of any false rejection stays below the level (Holm 1979).

    A p-value that is not a number stays one, and counts.
    """
    p = np.asarray(p_values, float)
    adjusted, running = np.full(len(p), math.nan), 0.0
    for rank, i in enumerate(np.argsort(p)):  # not a number sorts last
        if not math.isnan(p[i]):
            running = max(running, min(1.0, (len(p) - rank) * p[i]))
            adjusted[i] = running
    return adjusted.tolist()


def sampling_error(sums, counts) -> float:
    """The standard error of sum(sums) / sum(counts) over the text: what other text of this kind would change.

    sums, counts: of blocks of consecutive text, taken as independent (a ratio estimate, Cochran 1977, eq. 6.4).
    """
    s, c = np.asarray(sums, float), np.asarray(counts, float)
    residuals = s - s.sum() / c.sum() * c
    n = len(s)
    return math.inf if n < 2 else float(math.sqrt(n / (n - 1) * np.sum(residuals**2)) / c.sum())
