"""How a loss falls with the size: the fit of E + A x^-a, and the values of E and a that the losses allow.

x is a number of parameters or of training FLOPs. For a given exponent a the fit is linear in E and A, so only a is
searched. The interval is that of the profile likelihood (Bates and Watts 1988, Nonlinear Regression
Analysis, section 6.1). With mean losses L_s over n seeds at S sizes, RSS = sum_s (L_s - E - A x_s^-a)^2, and the
variance s^2 of the losses over seeds, pooled over sizes with S (n - 1) degrees of freedom, a value of E or a is in the
interval if

    min RSS at this value <= min RSS + t^2 s^2 / n.

Unlike an interval of the form estimate +- error, it may have one end only: a few sizes often show that E is below some
value, but give it no lower bound. Letters in names: S sizes, N seeds, K exponents.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from lm.sweeps.design.spec import MIN_SIZES_OF_FIT
from lm.sweeps.statistics.inference import LEVEL

SMALLEST = 1e-3  # the exponent below which a power law cannot be distinguished from a logarithm, where E is -infinity
LARGEST = 20.0  # limit of a * ln(largest x / smallest x): beyond it only the loss at the smallest x differs from E
N_GRID = 1001  # exponents at which the interval is computed


class Bounded(NamedTuple):
    """An estimate and its confidence interval; an end that the data do not bound is infinite."""

    value: float
    low: float
    high: float


class PowerLaw(NamedTuple):
    """The fit of loss = floor + factor x^-exponent.

    Attributes:
        floor: E, the irreducible loss. Its interval may have no lower end.
        exponent: a. Its interval may begin at 0, or have no upper end.
        factor: A.
        p_misfit: the p-value of "the mean losses are a power law of x".
    """

    floor: Bounded
    exponent: Bounded
    factor: float
    p_misfit: float

    def __call__(self, x):
        """Return the fitted loss at x."""
        return self.floor.value + self.factor * np.asarray(x, float) ** -self.exponent.value


def fit(x_S, losses_SN) -> PowerLaw | None:
    """Fit loss = E + A x^-a to the mean losses of several sizes by least squares.

    Args:
        x_S: parameters or FLOPs of each size, at least `MIN_SIZES_OF_FIT` different ones.
        losses_SN: the losses of at least 2 seeds at each size; no two sizes share a seed.

    Returns:
        The fit; None if the losses determine no exponent: they do not fall, fall along a line over ln x or faster, or
        fall at the smallest size alone.

    Raises:
        ValueError: there are too few sizes or seeds.

    >>> x = np.array([1e4, 3e4, 1e5, 3e5])
    >>> losses = 1.9 + 40 * x[:, None] ** -0.5 + np.array([-0.001, 0.001])
    >>> law = fit(x, losses)
    >>> round(law.floor.value, 4), round(law.exponent.value, 4), round(law.factor, 2)
    (1.9, 0.5, 40.0)
    """
    x_S, losses_SN = np.asarray(x_S, float), np.asarray(losses_SN, float)
    S, n = losses_SN.shape
    if len(set(x_S)) < MIN_SIZES_OF_FIT or n < 2:
        raise ValueError(
            f"a power law needs {MIN_SIZES_OF_FIT} different sizes and 2 seeds, got {len(set(x_S))} and {n}"
        )
    log_S, loss_S = np.log(x_S), losses_SN.mean(axis=1)
    scale = log_S.mean()
    low, high = SMALLEST, LARGEST / np.ptp(log_S)
    grid_K = np.geomspace(low, high, N_GRID)
    near = grid_K[np.argmin(_lines(grid_K, log_S - scale, loss_S).rss_K)]
    step = grid_K[1] / grid_K[0]
    if not low * step < near < high / step:
        return None
    rss = lambda a: _lines(np.array([a]), log_S - scale, loss_S).rss_K[0]  # noqa: E731
    a = optimize.minimize_scalar(rss, bounds=(near / step, near * step), method="bounded", options={"xatol": 1e-12}).x
    best, grid_K = _lines(np.array([a]), log_S - scale, loss_S), np.sort(np.append(grid_K, a))
    if best.factor_K[0] <= 0:
        return None
    df, least = S * (n - 1), float(best.rss_K[0])
    variance = float(losses_SN.var(axis=1, ddof=1).mean()) / n if np.ptp(losses_SN, axis=1).any() else 0.0  # of a mean
    lines = _lines(grid_K, log_S - scale, loss_S)
    spare_K = least + stats.t.ppf((1 + LEVEL) / 2, df) ** 2 * variance - lines.rss_K
    inside_K = (spare_K >= 0) | (grid_K == a)  # rounding may exclude the best exponent if nothing varies over seeds
    half_K = np.sqrt(lines.floor_variance_K * np.maximum(spare_K, 0))
    a_low, a_high = _ends(grid_K, spare_K, inside_K)
    floor_low = float((lines.floor_K - half_K)[inside_K].min()) if not inside_K[0] else -math.inf
    floor_high = float((lines.floor_K + half_K)[inside_K].max())
    misfit = least / (S - 3) / variance if variance > 0 else math.nan
    return PowerLaw(
        Bounded(float(best.floor_K[0]), floor_low, floor_high),
        Bounded(float(a), a_low, a_high),
        float(best.factor_K[0] * math.exp(a * scale)),
        float(stats.f.sf(misfit, S - 3, df)),
    )


def _ends(grid_K: np.ndarray, spare_K: np.ndarray, inside_K: np.ndarray) -> tuple[float, float]:
    """Return the interval of the exponent: the zeros of spare_K; 0 or infinity on a side where the grid ends first."""
    first, last = np.flatnonzero(inside_K)[[0, -1]]
    low, high = 0.0, math.inf
    if first > 0:
        low = float(np.interp(0, spare_K[first - 1 : first + 1], grid_K[first - 1 : first + 1]))
    if last < len(grid_K) - 1:
        high = float(np.interp(0, spare_K[[last + 1, last]], grid_K[[last + 1, last]]))
    return low, high


class _Lines(NamedTuple):
    """The least-squares fits of loss = floor + factor exp(-a x) at given exponents a.

    Attributes:
        floor_K, factor_K: the coefficients.
        floor_variance_K: the variance of the floor, as a multiple of that of a loss.
        rss_K: sums of squared residuals.
    """

    floor_K: np.ndarray
    factor_K: np.ndarray
    floor_variance_K: np.ndarray
    rss_K: np.ndarray


def _lines(exponents_K: np.ndarray, x_S: np.ndarray, loss_S: np.ndarray) -> _Lines:
    power_KS = np.exp(-exponents_K[:, None] * x_S)
    mean_K = power_KS.mean(axis=1)
    centered_KS, loss = power_KS - mean_K[:, None], loss_S.mean()
    squares_K = np.sum(centered_KS**2, axis=1)
    factor_K = centered_KS @ (loss_S - loss) / squares_K
    residual_KS = loss_S - loss - factor_K[:, None] * centered_KS
    floor_variance_K = 1 / len(x_S) + mean_K**2 / squares_K
    return _Lines(loss - factor_K * mean_K, factor_K, floor_variance_K, np.sum(residual_KS**2, axis=1))
