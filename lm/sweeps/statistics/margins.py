"""Tests of a difference against a margin, the smallest difference that matters, and the seeds that they need.

"The true difference is 0" is never quite true, and with enough seeds any difference is significant. The two tests here
ask instead whether the true difference is larger than the margin, and whether it is smaller. As in a Difference, their
p-values are divided by the share of the error that a look may spend.
"""

import math

import numpy as np
from scipy import stats

from lm.sweeps.statistics.inference import Difference, detectable


def p_beyond(d: Difference, margin: float) -> float:
    """Return the p-value of "the true difference is at most the margin, in either direction" (McCarthy & Smyth 2009).

    This is limma's test relative to a threshold, the p-value at the worst case, a true difference of +-margin:
    P(T > (|mean| - margin) / error) + P(T > (|mean| + margin) / error). With a margin of 0 it is the t test.

    >>> from lm.sweeps.statistics.inference import paired_difference
    >>> d = paired_difference([2.1, 2.3, 2.2], [2.0, 2.1, 2.1])
    >>> round(p_beyond(d, 0), 4), round(p_beyond(d, 0.02), 4)
    (0.0572, 0.0604)
    """
    if not d.error > 0:
        return math.nan
    t = (abs(d.mean) + margin * np.array([-1, 1])) / d.error
    return float(np.minimum(1, stats.t.sf(t, d.df).sum() / d.share))  # nan for one pair


def p_equivalent(d: Difference, margin: float) -> float:
    """Return the p-value of "the true difference is at least the margin", by two one-sided t tests (Schuirmann 1987).

    The larger of the p-values of "at least margin" and of "at most -margin". It is below 0.05 if the 90 % interval lies
    within the margin.

    >>> from lm.sweeps.statistics.inference import paired_difference
    >>> d = paired_difference([2.01, 2.0, 2.0, 1.99], [2.0, 2.0, 2.0, 2.0])
    >>> round(p_equivalent(d, 0.015), 4)
    0.0174
    """
    if not d.error > 0:
        return math.nan
    return float(np.minimum(1, stats.t.sf((margin - abs(d.mean)) / d.error, d.df) / d.share))


def seeds_to_decide(d: Difference, margin: float) -> int:
    """Return the number of pairs with which a true difference of the margin is found with probability POWER.

    The test is that of `detectable`. The standard deviation stays that of `d`, as do the degrees of freedom that a
    prior adds to n - 1.

    >>> seeds_to_decide(Difference(0, -1, 1, 0.9, 5, sd=0.01, df=4), 0.005)
    34
    """
    extra, comparisons = d.df - (d.n - 1), d.comparisons / d.share
    high = 2
    while detectable(d.sd, high, comparisons, extra + high - 1) > margin:
        high *= 2
    low = high // 2  # too few, or 1
    while high - low > 1:
        middle = (low + high) // 2
        enough = detectable(d.sd, middle, comparisons, extra + middle - 1) <= margin
        low, high = (low, middle) if enough else (middle, high)
    return high
