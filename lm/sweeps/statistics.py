"""Statistics of paired differences over seeds: intervals, verdicts, means over cells, compute.

`benchmarks/calibration` measures how often the answers are wrong.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95  # of intervals; 1 - LEVEL is the bound on p
BETTER = "better"
WORSE = "worse"
DIFFERENT = "different"
SAME = "the same"
NOT_SHOWN = "not shown"
VERDICTS = (BETTER, WORSE, DIFFERENT, SAME, NOT_SHOWN)


class Estimate(NamedTuple):
    """A mean, with what every interval and the p-value follow from."""

    mean: float
    se: float
    df: float
    n: int  # pairs of runs, or cells

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the t interval, infinite without degrees of freedom."""
        if not self.df > 0:
            return -math.inf, math.inf
        half = float(stats.t.ppf(0.5 + level / 2, self.df)) * self.se
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        """Return the two-sided p-value of "the mean is 0"; nan if nothing varies: no test then."""
        if self.se > 0 and self.df > 0:
            return float(2 * stats.t.sf(abs(self.mean) / self.se, self.df))
        return math.nan


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value; for differences paired by seed, the paired t test.

    >>> e = estimate([0.1, 0.2, 0.6])
    >>> [round(x, 4) for x in (e.mean, e.se, e.p, *e.interval())]
    [0.3, 0.1528, 0.1885, -0.3572, 0.9572]
    """
    x = np.asarray(values, float)
    n = len(values)
    se = float(x.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(float(x.mean()), se, n - 1, n)


def difference(first: Estimate, second: Estimate) -> Estimate:
    """Return the first of two independent estimates minus the second: Welch's t test (1947).

    >>> e = difference(estimate([0.1, 0.2, 0.6]), estimate([0.3, 0.4]))
    >>> [round(x, 4) for x in (e.mean, e.se, e.df)]
    [-0.05, 0.1607, 2.3965]
    """
    variances = np.array([first.se, second.se]) ** 2
    total = float(variances.sum())
    df = first.df + second.df  # if nothing varies
    if total > 0:
        df = total**2 / float((variances**2 / np.array([first.df, second.df])).sum())
    return Estimate(first.mean - second.mean, math.sqrt(total), df, first.n)


def with_error(e: Estimate, variance: float, df: float) -> Estimate:
    """Return an estimate whose standard error contains an error that its values share.

    The degrees of freedom of the sum of both variances are Satterthwaite's (1946).

    >>> e = with_error(Estimate(0.01, 0.004, 9, 10), 0.003**2, 36)
    >>> round(e.se, 6), round(e.df, 2), e.mean
    (0.005, 20.36, 0.01)
    """
    if not (variance > 0 and e.df > 0):
        return e
    total = e.se**2 + variance
    return e._replace(se=math.sqrt(total), df=total**2 / (e.se**4 / e.df + variance**2 / df))


def detectable(se: float, df: float, level: float = LEVEL, power: float = 0.8) -> float:
    """Return the smallest true difference that is found with this power.

    The test excludes 0 from the t interval of the level. The formula is that of Bloom (1995,
    Evaluation Review 19:547): the sum of two quantiles of t, times the standard error.

    >>> round(detectable(0.004, 27), 4), round(detectable(0.004, 27, 1 - 0.05 / 29), 4)
    (0.0116, 0.0173)
    """
    if not (se > 0 and df > 0):
        return math.nan
    return float(stats.t.ppf(0.5 + level / 2, df) + stats.t.ppf(power, df)) * se


def ratio(first: Estimate, second: Estimate) -> tuple[float, float, float]:
    """Return the ratio of two independent estimates, and its interval by Fieller's theorem (1954).

    The interval has all r for which first - r second may be 0. It is infinite if the second may be
    0. The degrees of freedom are Welch's at the ratio itself. The ratio is nan if the second is 0.

    >>> [round(x, 3) for x in ratio(Estimate(0.5, 0.1, 9, 10), Estimate(1.0, 0.1, 9, 10))]
    [0.5, 0.276, 0.772]
    """
    if second.mean == 0:
        return math.nan, -math.inf, math.inf
    r = first.mean / second.mean
    low, high = second.interval()
    if low <= 0 <= high:
        return r, -math.inf, math.inf
    df = difference(first, second._replace(se=abs(r) * second.se)).df
    t = float(stats.t.ppf(0.5 + LEVEL / 2, df))
    a = second.mean**2 - (t * second.se) ** 2
    b = first.mean * second.mean
    c = first.mean**2 - (t * first.se) ** 2
    if a <= 0:
        return r, -math.inf, math.inf
    half = math.sqrt(b**2 - a * c)
    return r, (b - half) / a, (b + half) / a


def holm_factors(p_values: Sequence[float]) -> list[float]:
    """Return by how much Holm's correction multiplies each p-value (Holm 1979); nan for nan.

    The factor is not cut at 1 / p, so that 1 - (1 - LEVEL) / factor is the level at which an
    interval excludes 0 if and only if the corrected p-value is below 1 - LEVEL. A p-value that is
    nan is not a test and is not counted.

    >>> [round(k, 4) for k in holm_factors([0.02, 0.001, math.nan, 0.03])]
    [2.0, 3.0, nan, 1.3333]
    """
    p = np.asarray(p_values, float)
    order = np.argsort(p, kind="stable")[: np.count_nonzero(~np.isnan(p))]  # nan is last
    ranks = np.arange(len(order), 0, -1)
    corrected = np.maximum.accumulate(p[order] * ranks)
    factors = np.full(len(p), math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors[order] = np.where(p[order] > 0, corrected / p[order], ranks)  # p = 0: underflow
    return factors.tolist()


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values after Holm's correction.

    >>> holm([0.02, 0.001, math.nan, 0.03])
    [0.04, 0.003, nan, 0.04]
    """
    corrected = np.asarray(p_values, float) * holm_factors(p_values)
    return np.minimum(1.0, corrected).tolist()


def verdict(low: float, high: float, margin: float) -> str:
    """Return what an interval of a difference in loss shows.

    BETTER or WORSE by more than the margin, DIFFERENT (not 0), the SAME within the margin, or
    NOT_SHOWN. An interval inside the margin that excludes 0 is the same: a difference too small to
    matter.

    >>> [verdict(*ends, 0.005) for ends in ((-0.02, -0.006), (0.006, 0.02), (0.001, 0.02), (-0.004, -1e-9), (-1, 1))]
    ['better', 'worse', 'different', 'the same', 'not shown']
    """
    if high < -margin:
        return BETTER
    if low > margin:
        return WORSE
    if -margin < low and high < margin:
        return SAME
    return DIFFERENT if low > 0 or high < 0 else NOT_SHOWN


class MeanOverCells(NamedTuple):
    """The mean of an effect over cells (texts or sizes), and how much it varies from cell to cell."""

    mean: Estimate  # over these cells; its variance comes from the seeds of each cell
    # the standard deviation of the true effects over cells (method of moments, at least 0)
    tau: float
    # 95 % interval for the estimate in another cell of this kind, with as many seeds
    prediction: tuple[float, float]


def mean_over_cells(cells: Sequence[Estimate]) -> MeanOverCells:
    """Return the unweighted mean of independent estimates, one per cell; at least 2 cells.

    The degrees of freedom of the mean are Satterthwaite's (1946). The prediction is that of one
    more draw from the normal distribution of the estimates. Its variance is that between the cells,
    but at least the one that the seeds alone must give: the mean of the cells' squared standard
    errors. A few cells that agree by chance would else predict more precisely than each is known.
    """
    k = len(cells)
    effects = np.array([c.mean for c in cells], float)
    variances = np.array([c.se for c in cells], float) ** 2
    df = np.array([c.df for c in cells], float)
    total = float(variances.sum())
    if not (df > 0).all():
        df_of_mean = 0.0
    elif total > 0:
        df_of_mean = float(total**2 / sum(variances**2 / df))
    else:  # nothing varies
        df_of_mean = float(df.sum())
    mean = float(effects.mean())
    between = float(effects.var(ddof=1))
    of_one_cell = max(between, total / k)
    half = float(stats.t.ppf(0.5 + LEVEL / 2, k - 1)) * math.sqrt(of_one_cell * (1 + 1 / k))
    return MeanOverCells(
        Estimate(mean, math.sqrt(total) / k, df_of_mean, k),
        tau=math.sqrt(max(0.0, between - total / k)),
        prediction=(mean - half, mean + half),
    )


def log_multipliers(
    compute_S2: np.ndarray, losses_S2N: list, errors_S: Sequence[tuple[float, float]] = ()
) -> list[Estimate] | None:
    """Return ln m at each size: the second variant needs m times the training compute of the first
    for its loss.

    ln m = (loss of the second - loss of the first) / slope + ln(compute of the second / that of the
    first). The slope is the fall of the mean loss of both variants with ln(compute): the mean of
    the secants to the next smaller and the next larger size. Its own error is not in the interval.

    Args:
        compute_S2: training FLOPs per run at each size, of the two variants.
        losses_S2N: test losses by size, variant and seed; the seeds of a size are paired.
        errors_S: variance and degrees of freedom of the error of tuning in each difference.

    Returns:
        None if there are fewer than 2 sizes, or if the loss does not fall from each size to the
            next.
    """
    if len(compute_S2) < 2:
        return None
    x_S2 = np.log(np.asarray(compute_S2, float))
    means_S = np.array([np.mean(pair) for pair in losses_S2N])
    secants = -np.diff(means_S) / np.diff(x_S2.mean(axis=1))
    if not (secants > 0).all():
        return None
    slopes = [np.mean(secants[max(0, i - 1) : i + 1]) for i in range(len(means_S))]
    multipliers = [
        estimate((np.asarray(b) - np.asarray(a)) / slope + (x[1] - x[0]))
        for (a, b), slope, x in zip(losses_S2N, slopes, x_S2, strict=True)
    ]
    if not errors_S:
        return multipliers
    return [
        with_error(m, variance / slope**2, df)
        for m, slope, (variance, df) in zip(multipliers, slopes, errors_S, strict=True)
    ]


def compute_saved(log_m: float) -> float:
    """Return the share of the training compute that a multiplier saves: 1 - 1 / m."""
    return 1 - math.exp(-min(max(log_m, -700.0), 700.0))
