"""Whole simulated sweeps: every arm is tuned, trained at its tuned values and compared, in all cells.

The arms are equal, so that a significant difference is a false positive; a true difference is added
to the estimate. The optima of the arms are independent, anywhere within a step of the list. The
choices, the error of tuning and the intervals are those of lm/sweeps, vectorized. Axis letters: W
sweeps, A arms, P points of a list, N fresh seeds.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.calibration.published import Cell, draw_starts
from lm.sweeps.tuning import (
    CURVE,
    GRID,
    NEAR,
    SHAPES,
    SPREAD_OF_SHAPES,
    USUAL_SHAPE,
    VERTEX,
    Curve,
    above_optimum,
    excess_of_tuning,
    fit_curve,
    true_curvatures,
)

N_TUNING = 2  # tuning seeds
CROSS = 0.4  # correlation of the rate and the decay in the loss
CHUNK = 250  # sweeps at a time
# By the number of values of a list, their positions, and those beyond its edges.
POSITIONS = {5: np.arange(-4.0, 5.0), 3: np.arange(-3.0, 4.0)}
FARTHEST = 2.0  # no best value lies farther out


class Design(NamedTuple):
    """How a sweep is made and analyzed."""

    name: str
    rule: str  # GRID, VERTEX or CURVE
    n_seeds: int
    n_controls: int  # the baseline and its placebos
    counts_error: bool  # whether the error of tuning is in the interval
    n_lists: int = 1  # 1: the rate; 2: the rate and the decay
    n_arms: int = 24  # besides the controls
    n_rates: int = 5  # 5 or 3
    shape: float | None = None  # of the curves along the rate; None: estimated from all arms
    first_to_last: bool = False  # whether the answer is of the last cell minus the first

    @property
    def runs_per_arm(self) -> int:
        """Return the runs of an arm in a cell, without extensions of the lists."""
        points = self.n_rates
        if self.n_lists == 2:
            points = points + 3 if self.rule == CURVE else points * 3
        return points * N_TUNING + self.n_seeds


class Answers(NamedTuple):
    """The estimated differences of equal arms (W, A) and what their tests need."""

    mean: np.ndarray
    se: np.ndarray
    df: np.ndarray

    def p(self, difference: float = 0.0) -> np.ndarray:
        """Return the two-sided p-values if the true difference is this one."""
        return 2 * stats.t.sf(np.abs(self.mean + difference) / self.se, self.df)


def simulate(cells: Sequence[Cell], design: Design, n_sweeps: int, seed: int) -> Answers:
    """Return the mean differences over the cells, as `lm.sweeps.statistics.mean_over_cells` does, or
    the change of a difference from the first cell to the last.
    """
    draw = np.random.default_rng(seed)
    weights_C = np.full(len(cells), 1 / len(cells))
    if design.first_to_last:
        weights_C = np.array([-1.0, 1.0])
    parts = []
    for first in range(0, n_sweeps, CHUNK):
        n = min(CHUNK, n_sweeps - first)
        of_cells = [_in_cell(cell, design, n, draw) for cell in cells]
        mean_CWA, se_CWA, df_CWA = (np.array(part) for part in zip(*of_cells, strict=True))
        variance_CWA = (weights_C[:, None, None] * se_CWA) ** 2
        mean_WA = np.tensordot(weights_C, mean_CWA, axes=1)
        total_WA = variance_CWA.sum(axis=0)
        df_WA = total_WA**2 / (variance_CWA**2 / df_CWA).sum(axis=0)
        parts.append(Answers(mean_WA, np.sqrt(total_WA), df_WA))
    return Answers(*map(np.concatenate, zip(*parts, strict=True)))


def _in_cell(cell: Cell, design: Design, n_sweeps: int, draw) -> Answers:
    """Return the differences of the arms from the mean of the controls."""
    excess_WA, error_W, df_W = tune(cell, design, n_sweeps, draw)
    n_controls = design.n_controls
    # The order of the data is the same in all arms, so its part cancels.
    noise_WAN = draw.normal(0, cell.of_run, (*excess_WA.shape, design.n_seeds))
    sizes_WN = (n_sweeps, design.n_seeds)
    starts_WAN = draw_starts(cell.of_start, n_controls, design.n_arms, sizes_WN, draw)
    losses_WAN = excess_WA[..., None] + starts_WAN + noise_WAN
    control_W1N = losses_WAN[:, :n_controls].mean(axis=1, keepdims=True)
    differences_WAN = losses_WAN[:, n_controls:] - control_W1N
    of_seeds = differences_WAN.var(axis=-1, ddof=1) / design.n_seeds
    df = np.full(of_seeds.shape, design.n_seeds - 1.0)
    variance = of_seeds
    if design.counts_error:
        error_W1 = (error_W * (1 + 1 / n_controls))[:, None]
        variance = of_seeds + error_W1
        df = variance**2 / (of_seeds**2 / df + error_W1**2 / df_W[:, None])
    return Answers(differences_WAN.mean(axis=-1), np.sqrt(variance), df)


def tune(
    cell: Cell, design: Design, n_sweeps: int, draw
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the excess loss of all arms at their tuned values (W, A), the estimated variance of
    that excess (W), and its degrees of freedom (W).
    """
    shape_WA = (n_sweeps, design.n_controls + design.n_arms)
    of_arms = draw.normal(cell.log_curvature, cell.log_curvature_sd, shape_WA)
    curvature_WA = np.exp(of_arms)
    optimum_WA = draw.uniform(-0.5, 0.5, shape_WA)
    decay_WA = np.zeros(shape_WA)
    if design.n_lists == 2:
        decay_WA = draw.uniform(-0.5, 0.5, shape_WA)

    def above(rates, decays):
        """Return the loss at positions (W, A, ...) above the lowest."""
        axes = (...,) + (None,) * (np.ndim(rates) - 2)
        x = rates - optimum_WA[axes]
        y = decays - decay_WA[axes]
        k = curvature_WA[axes]
        product = CROSS * np.sqrt(k * cell.decay_curvature) * x * y
        both = cell.decay_curvature * y**2 / 2 + product if design.n_lists == 2 else 0.0
        return cell.above(x, k) + both

    def train(rates, decays):
        """Return mean tuning losses, and half-differences of the two seeds, at positions."""
        axes = (...,) + (None,) * (np.ndim(rates) - 2)
        noise = cell.noise_at(rates - optimum_WA[axes])
        noise = np.broadcast_to(noise, np.broadcast_shapes(np.shape(rates), np.shape(decays)))
        half = draw.normal(0, noise)
        return above(rates, decays) + draw.normal(0, noise) / math.sqrt(N_TUNING), half

    if design.n_lists == 2 and design.rule != CURVE:
        return _tune_in_product(design, shape_WA, train, above)
    rates_P = POSITIONS[design.n_rates]
    rates_WAP = np.broadcast_to(rates_P, (*shape_WA, len(rates_P)))
    losses_WAP, half_WAP = train(rates_WAP, np.zeros(len(rates_P)))
    rate_WA, lines = choose_on_line(design.n_rates, losses_WAP, half_WAP, design.rule, design.shape)
    chosen_decay_WA = np.zeros(shape_WA)
    decay_lines = None
    if design.n_lists == 2:
        decays_P = POSITIONS[3]
        decays_WAP = np.broadcast_to(decays_P, (*shape_WA, len(decays_P)))
        losses_WAP, half_WAP = train(rate_WA[..., None], decays_WAP)
        chosen_decay_WA, decay_lines = choose_on_line(3, losses_WAP, half_WAP, CURVE, 0.0)
    excess_WA = above(rate_WA, chosen_decay_WA)
    return excess_WA, *estimated_error(design, lines, decay_lines)


def _tune_in_product(design: Design, shape_WA, train, above):
    """Tune the rate and the decay over the product of their lists, with a parabola in each."""
    rates_P, decays_P = POSITIONS[5], POSITIONS[3]
    rates, decays = np.meshgrid(rates_P, decays_P, indexing="ij")
    losses_WAXY, half_WAXY = train(np.broadcast_to(rates, (*shape_WA, *rates.shape)), decays)
    inner = losses_WAXY[..., 2:-2, 1:-1]
    best_WA = inner.reshape(*shape_WA, -1).argmin(axis=-1)
    i_WA = best_WA // inner.shape[-1] + 2
    j_WA = best_WA % inner.shape[-1] + 1

    def along(values_WAXY, axis, index_WA):
        index = index_WA[..., None, None]
        return np.squeeze(np.take_along_axis(values_WAXY, index, axis=axis), axis=axis)

    of_rates = [along(values, -1, j_WA) for values in (losses_WAXY, half_WAXY)]
    of_decays = [along(values, -2, i_WA) for values in (losses_WAXY, half_WAXY)]
    rate_WA, lines = choose_on_line(5, *of_rates, design.rule, None)
    decay_WA, decay_lines = choose_on_line(3, *of_decays, design.rule, 0.0)
    return above(rate_WA, decay_WA), *estimated_error(design, lines, decay_lines)


class Lines(NamedTuple):
    """The tuning losses of all arms along a list."""

    n_values: int  # of the list, before it is extended
    steps_WAP: np.ndarray  # from the best value
    losses_WAP: np.ndarray
    half_WAP: np.ndarray  # half-differences of the seeds
    used_WAP: np.ndarray
    shape_W1: np.ndarray
    curve: Curve


def choose_on_line(
    n_values: int,
    losses_WAP: np.ndarray,
    half_WAP: np.ndarray,
    rule: str,
    shape: float | None,
) -> tuple[np.ndarray, Lines]:
    """Return the chosen position of every arm (W, A), and the lines from which it was chosen.

    Args:
        n_values: of the list; its losses are at POSITIONS[n_values].
        rule: of `lm.sweeps.tuning`.
        shape: of the curves, 0 for decays; None: estimated from all arms.
    """
    x_P = POSITIONS[n_values]
    may_be_best_P = np.abs(x_P) <= FARTHEST
    best_WA = x_P[may_be_best_P][losses_WAP[..., may_be_best_P].argmin(axis=-1)]
    steps_WAP = x_P - best_WA[..., None]
    tuned_WAP = (np.abs(x_P) <= n_values // 2) | (np.abs(steps_WAP) <= 1)
    used_WAP = tuned_WAP & (np.abs(steps_WAP) <= NEAR)
    if shape is None and rule != GRID:
        shape_W1 = common_shapes(steps_WAP, losses_WAP, used_WAP)
    else:
        shape_W1 = np.full((len(best_WA), 1), shape or 0.0)
    shape_WA = np.broadcast_to(shape_W1, best_WA.shape)
    curve = fit_curve(steps_WAP, losses_WAP, used_WAP, shape_WA)
    lines = Lines(n_values, steps_WAP, losses_WAP, half_WAP, used_WAP, shape_W1, curve)
    if rule == GRID:
        return best_WA, lines
    vertex_WA = curve.vertex
    if rule == VERTEX:
        near_WAP = np.abs(steps_WAP) <= 1
        vertex_WA = fit_curve(steps_WAP, losses_WAP, near_WAP, np.zeros(best_WA.shape)).vertex
    return best_WA + np.clip(np.nan_to_num(vertex_WA), -1, 1), lines


def common_shapes(
    steps_WAP: np.ndarray, losses_WAP: np.ndarray, used_WAP: np.ndarray
) -> np.ndarray:
    """Return the shape that the arms of each sweep share (W, 1), as `tuning.common_shape` does.

    Arms with the same best value have the same points, and so the same projection to residuals.
    """
    n_points_WA = used_WAP.sum(axis=-1)
    is_long_WA = n_points_WA > 3
    df_W = np.sum((n_points_WA - 3) * is_long_WA, axis=1)
    rss_SWA = np.zeros((len(SHAPES), *is_long_WA.shape))
    for first in np.unique(steps_WAP[..., 0]):
        here_WA = steps_WAP[..., 0] == first
        used_P = used_WAP[here_WA][0]
        if used_P.sum() > 3:
            x_P = steps_WAP[here_WA][0][used_P]
            losses_NP = losses_WAP[here_WA][:, used_P]
            for i, shape in enumerate(SHAPES):
                residuals_NP = losses_NP @ residual_projection(x_P, shape)
                rss_SWA[i][here_WA] = (residuals_NP**2).sum(axis=1)
    prior_S1 = (((SHAPES - USUAL_SHAPE) / SPREAD_OF_SHAPES) ** 2)[:, None]
    deviance_SW = df_W * np.log(np.maximum(rss_SWA.sum(axis=-1), 1e-18)) + prior_S1
    return SHAPES[np.argmin(deviance_SW, axis=0)][:, None]


def residual_projection(x_P: np.ndarray, shape: float) -> np.ndarray:
    """Return the symmetric matrix (P, P) that takes losses to their residuals around the curve."""
    identity = np.eye(len(x_P))
    curved_P = above_optimum(x_P, shape, 1.0)
    design_P3 = np.stack([np.ones_like(x_P), x_P, curved_P], axis=1)
    return identity - design_P3 @ np.linalg.pinv(design_P3)


def estimated_error(
    design: Design, lines: Lines, decay_lines: Lines | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the variance of the excess that each sweep estimates (W), and its degrees of freedom,
    as `tuning.tuning_errors` does.
    """
    n_sweeps = len(lines.shape_W1)
    if not design.counts_error:
        return np.zeros(n_sweeps), np.full(n_sweeps, math.inf)
    n_points_WA = lines.used_WAP.sum(axis=-1)
    half_WAP = np.where(lines.used_WAP, lines.half_WAP, 0.0)
    between_seeds = (half_WAP**2).sum(axis=-1) - half_WAP.sum(axis=-1) ** 2 / n_points_WA
    squares_W = np.sum(between_seeds + N_TUNING * lines.curve.rss, axis=1)
    df_W = np.sum(2 * n_points_WA - 4, axis=1)
    sd_W = np.sqrt(squares_W / df_W / N_TUNING)
    variance_W = _excess_variance(design.rule, lines, sd_W)
    if decay_lines is not None:
        variance_W += _excess_variance(design.rule, decay_lines, sd_W)
    return variance_W, df_W / 4


def _excess_variance(rule: str, lines: Lines, sd_W: np.ndarray) -> np.ndarray:
    """Return the variance of the excess in one direction, over the curvatures of all arms."""
    noise_WA = sd_W[:, None] ** 2 * lines.curve.bend_variance
    curvature_WA = true_curvatures(lines.curve.bend, noise_WA)
    shape_WA = np.broadcast_to(lines.shape_W1, curvature_WA.shape)
    relative_WA = sd_W[:, None] / curvature_WA
    mean_WA, square_WA = excess_moments(rule, lines.n_values, shape_WA, relative_WA)
    mean_W = np.mean(mean_WA * curvature_WA, axis=1)
    return np.mean(square_WA * curvature_WA**2, axis=1) - mean_W**2


def excess_moments(
    rule: str, n_values: int, shape: np.ndarray, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the mean square of the excess of tuning for a curvature of 1.

    Interpolated between bootstraps at the noise levels of a table, the sd of a loss in units of the
    curvature.
    """
    mean = np.zeros(noise.shape)
    square = np.zeros(noise.shape)
    level = np.log(noise)
    for s in np.unique(shape):
        levels, means, squares = _excess_table(rule, n_values, round(float(s), 1))
        is_here = shape == s
        mean[is_here] = np.interp(level[is_here], levels, means)
        square[is_here] = np.interp(level[is_here], levels, squares)
    return mean, square


@functools.cache
def _excess_table(
    rule: str, n_values: int, shape: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    levels = np.linspace(math.log(1e-2), math.log(10), 29)
    excess = np.array(
        [excess_of_tuning(rule, shape, [1.0], math.exp(level), n_values) for level in levels]
    )
    return levels, excess.mean(axis=-1), (excess**2).mean(axis=-1)
