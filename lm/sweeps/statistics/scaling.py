"""Statistics over several sizes: the training compute that one variant saves against another.

The compute multiplier of a variant is m if the other needs m times its compute for the same loss: the variant reaches
with compute C the loss that the other reaches with m C. To first order, with the slope of the loss over ln C,

    ln m = (loss of the other - loss of the variant) / (- d loss / d ln C).

Letters in names: S sizes, N seeds, 2 the variant and the other.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from lm.sweeps.statistics.inference import LEVEL


class Estimate(NamedTuple):
    """An estimate, its confidence interval, and the two-sided p-value of "it is 0".

    Without variation over the data the interval is a point, and p is nan.
    """

    value: float
    low: float
    high: float
    p: float


class Multipliers(NamedTuple):
    """Natural logarithms of compute multipliers.

    Attributes:
        at_sizes: ln m at each size.
        pooled: their mean.
        trend: the change of ln m per factor of 10 in compute: the slope of a straight line through `at_sizes`.
    """

    at_sizes: list[Estimate]
    pooled: Estimate
    trend: Estimate


def multipliers(compute_S2, losses_SN2) -> Multipliers | None:
    """Estimate the compute multipliers of a variant from the losses of its runs and of the other's.

    Args:
        compute_S2: training FLOPs per run, sizes in any order.
        losses_SN2: the loss of each run.

    Returns:
        The multipliers with jackknife intervals; see `jackknife`. None unless the loss falls with the compute over
        the sizes, with all seeds and without any one of them.
    """
    compute_S2 = np.asarray(compute_S2, float)
    decades_S = np.log10(compute_S2).mean(axis=1)
    centered_S = decades_S - decades_S.mean()

    def estimates(loss_S2: np.ndarray) -> np.ndarray:
        found_S = log_multipliers(compute_S2, loss_S2)
        return np.append(found_S, [found_S.mean(), found_S @ centered_S / (centered_S @ centered_S)])

    found = jackknife(estimates, np.asarray(losses_SN2, float))
    if any(math.isnan(number) for e in found for number in (e.value, e.low)):
        return None
    return Multipliers(found[:-2], found[-2], found[-1])


def log_multipliers(compute_S2: np.ndarray, loss_S2: np.ndarray) -> np.ndarray:
    """Return ln m at each size; nan where the loss does not fall with the compute.

    The slope is that of the parabola in ln C through the means of both variants' losses, so both have the same slope.

    >>> compute = np.array([[1e3, 1e3], [1e4, 1e4], [1e5, 1e5]])
    >>> loss = 9 - np.log(compute * [2, 1])  # the variant does as well as the other does with twice the compute
    >>> np.exp(log_multipliers(compute, loss)).round(6).tolist()
    [2.0, 2.0, 2.0]
    """
    log_S2 = np.log(compute_S2)
    x_S = log_S2.mean(axis=1) - log_S2.mean()
    parabola = np.linalg.pinv(np.vander(x_S, 3)) @ loss_S2.mean(axis=1)
    fall_S = -(2 * parabola[0] * x_S + parabola[1])
    fall_S[fall_S <= 0] = np.nan
    return (loss_S2[:, 1] - loss_S2[:, 0]) / fall_S + log_S2[:, 1] - log_S2[:, 0]


def jackknife(estimate: Callable[[np.ndarray], np.ndarray], data_SN: np.ndarray) -> list[Estimate]:
    """Return functions of the means of several groups, with jackknife intervals.

    The estimates are repeated with one member left out, for every member of every group. The variance is the sum over
    groups of (n - 1) / n times the sum of squared deviations of these n estimates from their mean: the jackknife of a
    stratified sample (Jones 1974, Biometrika 61, 343-348). The degrees of freedom are those of Welch (1947) and
    Satterthwaite (1946) for a sum of variances of unequal size.

    Args:
        estimate: maps the means of the groups (S, ...) to numbers (K,).
        data_SN: S groups of N members each, at least 2.

    >>> means = lambda data_S: data_S[:1] - data_S[1:]  # of two groups: the interval is that of Welch's t test
    >>> e = jackknife(means, np.array([[5.0, 6.0, 7.0], [1.0, 3.0, 8.0]]))[0]
    >>> test = stats.ttest_ind([5, 6, 7], [1, 3, 8], equal_var=False)
    >>> np.allclose([e.low, e.high, e.p], [*test.confidence_interval(), test.pvalue])
    True
    """
    means_S, n = data_SN.mean(axis=1), data_SN.shape[1]
    variances = [np.zeros(len(estimate(means_S)))]
    for s, group in enumerate(data_SN):
        if not np.ptp(group, axis=0).any():
            continue  # rounding would give a constant group a variance
        without = [means_S.copy() for _ in range(n)]
        for i in range(n):
            without[i][s] = np.delete(group, i, axis=0).mean(axis=0)
        variances.append((n - 1) ** 2 / n * np.var([estimate(means) for means in without], axis=0, ddof=1))
    variance_K = np.sum(variances, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):  # without variation p is nan
        df_K = variance_K**2 / np.sum(np.square(variances) / (n - 1), axis=0)
        error_K, value_K = np.sqrt(variance_K), estimate(means_S)
        half_K = np.where(variance_K == 0, 0, stats.t.ppf((1 + LEVEL) / 2, df_K) * error_K)
        p_K = np.where(variance_K == 0, np.nan, 2 * stats.t.sf(np.abs(value_K) / error_K, df_K))
    columns = zip(value_K, value_K - half_K, value_K + half_K, p_K, strict=True)
    return [Estimate(*map(float, column)) for column in columns]


def power_law(compute_S2, loss_S2) -> tuple[float, np.ndarray, float]:
    """Fit loss = E + A C^-a by least squares, with E and a shared by both variants; for figures only.

    Returns:
        E, A of both variants, and a.

    >>> compute = np.array([[1e3, 1e3], [1e4, 1e4], [1e5, 1e5]])
    >>> floor, factors, exponent = power_law(compute, 1.5 + np.array([4, 5]) * compute**-0.3)
    >>> round(floor, 3), factors.round(3).tolist(), round(exponent, 3)
    (1.5, [4.0, 5.0], 0.3)
    """
    compute_S2, loss_S2 = np.asarray(compute_S2, float), np.asarray(loss_S2, float)
    relative_S2 = compute_S2 / np.exp(np.log(compute_S2).mean())

    def fit(exponent: float):
        """Return (coefficients, sum of squared errors) at a given exponent, where the fit is linear."""
        power_S2, zero_S = relative_S2**-exponent, np.zeros(len(relative_S2))
        columns = [np.ones(loss_S2.size), np.append(power_S2[:, 0], zero_S), np.append(zero_S, power_S2[:, 1])]
        matrix, losses = np.stack(columns, axis=1), loss_S2.T.ravel()
        coefficients = np.linalg.lstsq(matrix, losses, rcond=None)[0]
        return coefficients, float(np.sum((matrix @ coefficients - losses) ** 2))

    exponent = optimize.minimize_scalar(
        lambda a: fit(a)[1], bounds=(0.01, 2), method="bounded", options={"xatol": 1e-8}
    ).x
    floor, *factors = fit(exponent)[0]
    scale = (compute_S2 / relative_S2)[0, 0]
    return float(floor), np.array(factors) * scale**exponent, float(exponent)
