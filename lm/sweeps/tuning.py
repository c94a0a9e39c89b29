"""Choose the values of tuned hyperparameters, and estimate how far from the optimum they are.

The final runs of a variant train at a vertex in log2 of each value, and not at the best value of a
list: that choice finds false differences, because two variants' optima are rarely at the same
distance from the grid (benchmarks/calibration). A list whose best value is the first or the last is
first extended.

The vertex of the learning rate is that of a curve through all points within two steps of the best
one. Around its vertex c a loss is

    loss(x) = lowest + steepness (exp(s (x - c)) - s (x - c) - 1),    x = log2(rate),

the LINEX function of Varian (1975) and Zellner (1986, J. Am. Stat. Assoc. 81:446): a parabola for
s = 0, and steeper towards high rates for s > 0. All variants of a cell share the shape s; location
and steepness are their own. For a given s the curve is linear in 1, x and exp(s x).

This module does not import jax.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.config.schema import schema
from lm.config.values import checked

LEARNING_RATE = "optimizer.learning_rate"
MAX_EXTENSIONS = 3  # of a list; a best value that is at the edge after them is used as it is

# Where the final runs train, the "design" of sweep.json.
GRID = "grid"  # at the best value of a list; pages of five fresh seeds
# at the vertex of the parabola through the best point of the product of the lists and its
# neighbors; records without a design
VERTEX = "vertex"
CURVE = "curve"  # at the vertex of the common curve, list after list

NEAR = 2  # steps of a list from its best value to the points of its curve
SHAPES = np.linspace(-1.0, 1.0, 21)  # a coarse grid: a little noise must not change the vertices
# Mean and standard deviation of the shapes of the published cells (benchmarks/calibration), with
# which a cell of few variants is estimated better.
USUAL_SHAPE = 0.2
SPREAD_OF_SHAPES = 0.35
ROUNDING = 1e-6  # nats; smaller differences between losses are no noise

Lists = Mapping[str, Sequence[Any]]  # by config key, the values to choose from, in ascending order
Point = tuple  # one value of each list, in their order


class Outcome(NamedTuple):
    """The tuning runs of one point."""

    n_diverged: int
    n_stuck: int
    # mean validation loss of the runs that learned, else of the stuck ones; infinite if all
    # diverged
    loss: float
    losses: tuple[float | None, ...] = ()  # of its runs, in the order of the seeds; None: diverged

    @property
    def learned(self) -> bool:
        """Return whether all runs did: others are on no curve."""
        return not (self.n_diverged or self.n_stuck)

    @property
    def rank(self) -> tuple[int, int, float]:
        """Return what the best point has the least of: runs that diverged or got stuck, then the
        loss.
        """
        return self.n_diverged + self.n_stuck, self.n_diverged, self.loss


def outcome(losses: Sequence[float | None], stuck_above: float = math.inf) -> Outcome:
    """Summarize the validation losses of the tuning runs of a point.

    Args:
        losses: one per run; None if it diverged.
        stuck_above: the loss above which a run has learned less than the frequencies of the tokens.

    >>> outcome([2.0, 3.0, None, 4.5], stuck_above=4.0)[:3]
    (1, 1, 2.5)
    """
    finite = [loss for loss in losses if loss is not None]
    learned = [loss for loss in finite if loss <= stuck_above]
    used = learned or finite
    mean = math.fsum(used) / len(used) if used else math.inf
    return Outcome(
        len(losses) - len(finite), len(finite) - len(learned), mean, losses=tuple(losses)
    )


def parabola_vertex(x: npt.ArrayLike, y: npt.ArrayLike) -> np.ndarray:
    """Return where the parabolas through three points each are lowest, between the first and the
    last point.

    Args:
        x: ascending positions (..., 3).
        y: the values there (..., 3); the middle one is the lowest.

    Returns:
        Positions (...); the middle one where a parabola has no minimum.

    >>> parabola_vertex(np.array([-1.0, 0.0, 2.0]), np.array([(x - 0.25) ** 2 for x in (-1.0, 0.0, 2.0)])).item()
    0.25
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    left, right = x[..., 1] - x[..., 0], x[..., 2] - x[..., 1]
    rise_left, rise_right = (y[..., 0] - y[..., 1]) / left, (y[..., 2] - y[..., 1]) / right
    bend = rise_left + rise_right
    shift = np.where(
        bend > 0, (rise_left * right - rise_right * left) / (2 * np.where(bend > 0, bend, 1)), 0
    )
    return x[..., 1] + np.clip(shift, -left, right)


def vertex(values: Sequence[float], losses: Sequence[float], best: int) -> float:
    """Return the value at the vertex of the parabola in log2(value) through the best value and its
    two neighbors.

    It is at most one step of the grid from the best value. The best value itself is returned if it
    is at an edge, or if a neighbor's loss is infinite. Three significant digits: the rounding of
    losses must not change it.

    Args:
        values: positive, in ascending order.
        losses: the loss at each value.
        best: the index of the best value.

    >>> rates = [0.001, 0.002, 0.004, 0.008]
    >>> vertex(rates, [3.0, 2.0, 2.0, 3.0], 1)  # half-way between 0.002 and 0.004, in log2
    0.00283
    >>> vertex(rates, [3.0, 2.5, 2.0, 2.5], 2), vertex(rates, [2.0, 2.1, 2.2, 2.4], 0)
    (0.004, 0.001)
    """
    near = slice(best - 1, best + 2)
    if not 0 < best < len(values) - 1 or not all(map(math.isfinite, losses[near])):
        return values[best]
    return float(f"{2 ** parabola_vertex(np.log2(values[near]), losses[near]).item():.3g}")


class Curve(NamedTuple):
    """A curve of given shape through the losses of a variant."""

    vertex: np.ndarray  # in the units of x; nan where the curve has no minimum
    curvature: np.ndarray  # the second derivative there
    # variance of the fitted slope at the vertex if each loss has a variance of 1
    slope_variance: np.ndarray
    rss: np.ndarray  # residual sum of squares
    # The second derivative at 0, which may be negative by chance, and its variance for such losses.
    bend: np.ndarray
    bend_variance: np.ndarray

    @property
    def excess(self) -> np.ndarray:
        """Return the expected loss at the fitted vertex above the lowest one, for losses of
        variance 1.

        To first order the fitted vertex is off by d = (error of the slope) / curvature, and the
        loss there is curvature d^2 / 2 above the lowest.
        """
        return self.slope_variance / (2 * self.curvature)


def fit_curve(x: npt.ArrayLike, losses: npt.ArrayLike, used: npt.ArrayLike, shape) -> Curve:
    """Fit the curve of a given shape by least squares.

    Args:
        x: positions (..., P); 0 is near the vertex.
        losses: at each position (..., P).
        used: which positions count (..., P), at least three each.
        shape: s (...).

    >>> x = np.arange(-2.0, 3.0)
    >>> curve = fit_curve(x, 3 + 0.5 * (x - 0.25) ** 2, x == x, 0.0)
    >>> [round(v.item(), 9) for v in (curve.vertex, curve.curvature, curve.rss)]
    [0.25, 1.0, 0.0]
    """
    x = np.asarray(x, float)
    used = np.asarray(used, float)
    y = np.where(used > 0, losses, 0.0)
    is_parabola = np.asarray(shape) == 0
    s = np.where(is_parabola, 1.0, shape)
    s1 = s[..., None]
    curved_P = np.where(is_parabola[..., None], x**2, 2 * (np.expm1(s1 * x) - s1 * x) / s1**2)
    design_P3 = np.stack(np.broadcast_arrays(1.0, x, curved_P), axis=-1) * used[..., None]
    inverse_33 = np.linalg.inv(np.swapaxes(design_P3, -1, -2) @ design_P3)
    fitted_3 = (inverse_33 @ (np.swapaxes(design_P3, -1, -2) @ y[..., None]))[..., 0]
    rss = np.sum((y - (design_P3 @ fitted_3[..., None])[..., 0]) ** 2, axis=-1)
    slope, steepness = fitted_3[..., 1], fitted_3[..., 2]
    # At the vertex c the slope is 0 = slope + steepness 2 (exp(s c) - 1) / s.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(steepness > 0, -slope / (2 * steepness), np.nan)  # (exp(s c) - 1) / s
        growth = np.where(is_parabola, 1.0, 1 + s * ratio)  # exp(s c)
        growth = np.where((growth > 0) & (steepness > 0), growth, np.nan)
        vertex = np.where(is_parabola, ratio, np.log(growth) / s)
    of_slope_3 = np.stack(np.broadcast_arrays(0.0, 1.0, 2 * ratio), axis=-1)
    slope_variance = (of_slope_3[..., None, :] @ inverse_33 @ of_slope_3[..., None])[..., 0, 0]
    bend_variance = 4 * inverse_33[..., 2, 2]
    return Curve(vertex, 2 * steepness * growth, slope_variance, rss, 2 * steepness, bend_variance)


class Line(NamedTuple):
    """The tuning runs of a variant along one list, the other values fixed."""

    values: tuple[float, ...]
    outcomes: tuple[Outcome, ...]  # of each value
    best: int  # the index of the best value

    @property
    def x(self) -> np.ndarray:
        """Return the positions of the values in log2; the best one is at 0."""
        return np.log2(np.array(self.values) / self.values[self.best])

    @property
    def used(self) -> np.ndarray:
        """Return which values are within two steps of the best one, and whose runs all learned."""
        steps = np.abs(np.arange(len(self.values)) - self.best)
        return (steps <= NEAR) & [tried.learned for tried in self.outcomes]

    @property
    def is_valley(self) -> bool:
        """Return whether the best value and both of its neighbors are on a curve."""
        inside = 0 < self.best < len(self.values) - 1
        return inside and all(self.used[self.best - 1 : self.best + 2])

    def curve(self, shape: float) -> Curve:
        return fit_curve(self.x, [tried.loss for tried in self.outcomes], self.used, shape)

    def vertex(self, shape: float) -> float:
        """Return the value at the vertex, at most one step from the best value.

        The best value itself is returned without a valley. Three significant digits: the rounding
        of losses must not change it.
        """
        best = self.values[self.best]
        if not self.is_valley:
            return best
        curve = self.curve(shape)
        x = self.x
        at = float(curve.vertex)
        if math.isnan(at):
            return best
        at = min(max(at, x[self.best - 1]), x[self.best + 1])
        return float(f"{best * 2**at:.3g}")

    def parabola_vertex(self) -> float:
        """Return the value at the vertex of the parabola through the best value and its neighbors,
        where final runs of the rule VERTEX train.
        """
        return vertex(
            self.values,
            [tried.loss if tried.learned else math.inf for tried in self.outcomes],
            self.best,
        )

    def residuals(self, shape: float) -> tuple[float, int]:
        """Return the sum of squares of the runs around the curve and a mean of each seed, and its
        degrees of freedom.
        """
        rows = [
            tried.losses for tried, is_used in zip(self.outcomes, self.used, strict=True) if is_used
        ]
        losses_PS = np.array(rows, float)
        n_points, n_seeds = losses_PS.shape
        of_points_P1 = losses_PS.mean(axis=1, keepdims=True)
        of_seeds_S = losses_PS.mean(axis=0) - losses_PS.mean()
        between_seeds = float(np.sum((losses_PS - of_points_P1 - of_seeds_S) ** 2))
        df = (n_points - 1) * (n_seeds - 1) + n_points - 3
        return between_seeds + n_seeds * float(self.curve(shape).rss), df


def line_of(values: Sequence[float], outcomes: Sequence[Outcome]) -> Line:
    """Return the line of the values of a list, with its best one."""
    ranks = [tried.rank for tried in outcomes]
    return Line(tuple(values), tuple(outcomes), ranks.index(min(ranks)))


def common_shape(lines: Sequence[Line]) -> float:
    """Return the shape that the lines of the learning rate of a cell share.

    It is the most probable one of SHAPES: the likelihood of normal residuals of unknown variance,
    RSS^(-df / 2), times the normal distribution of the shapes of published cells.

    >>> x = np.arange(-2.0, 3.0)
    >>> losses = np.exp(0.5 * (x - 0.2)) - 0.5 * (x - 0.2)
    >>> line = line_of(tuple(0.01 * 2**x), [outcome([loss]) for loss in losses])
    >>> common_shape([line, line]), line.vertex(0.5)
    (0.5, 0.0115)
    >>> common_shape([])
    0.2
    """
    fitted = [line for line in lines if line.is_valley and np.count_nonzero(line.used) > 3]
    if not fitted:
        return USUAL_SHAPE
    rss = sum(np.array([line.curve(shape).rss for shape in SHAPES]) for line in fitted)
    df = sum(np.count_nonzero(line.used) - 3 for line in fitted)
    deviance = df * np.log(np.maximum(rss, 1e-18))
    prior = ((SHAPES - USUAL_SHAPE) / SPREAD_OF_SHAPES) ** 2
    return round(float(SHAPES[np.argmin(deviance + prior)]), 1)


class Error(NamedTuple):
    """The error of tuning in the loss of a variant: it is the same in all of its final runs."""

    variance: float = 0.0
    df: float = math.inf


def excess_of_tuning(
    rule: str,
    shape: float,
    curvatures: npt.ArrayLike,
    sd: float,
    n_values: int = 5,
    n: int = 4000,
    seed: int = 0,
) -> np.ndarray:
    """Return how far above its lowest loss a variant ends in n simulated tunings of one list.

    A parametric bootstrap (Efron and Tibshirani 1993, chapter 6): the losses are those of the
    fitted curve plus normal noise, and the optimum is anywhere within a step of the list. A formula
    for small errors, curvature / 2 times the variance of the vertex, is too small by a factor of 2
    to 4, because the fitted curvature is uncertain, too.

    Args:
        rule: GRID, VERTEX or CURVE.
        shape: of the curve, per step of the list.
        curvatures: second derivatives at the optimum, per step; each tuning has one of them.
        sd: the standard deviation of the mean loss of the runs of a point.
        n_values: of the list, before it is extended; at least 3.
        n: how many tunings.
    """
    draw = np.random.default_rng(seed)
    half = n_values // 2
    # The values of the list, one more on each side if the best one is at the edge, and one more.
    x_P = np.arange(-half - 2.0, half + 3.0)
    optimum_N1 = draw.uniform(-0.5, 0.5, (n, 1))
    curvature_N1 = draw.choice(curvatures, (n, 1))
    noise_NP = draw.normal(0, sd, (n, len(x_P)))
    losses_NP = above_optimum(x_P - optimum_N1, shape, curvature_N1) + noise_NP
    best_N1 = x_P[2:-2][losses_NP[:, 2:-2].argmin(axis=1)][:, None]
    chosen_N1 = best_N1
    if rule != GRID:
        steps_NP = x_P - best_N1
        is_tuned_NP = (np.abs(x_P) <= half) | (np.abs(steps_NP) <= 1)
        near = 1 if rule == VERTEX else NEAR
        used_NP = is_tuned_NP & (np.abs(steps_NP) <= near)
        vertex_N = fit_curve(steps_NP, losses_NP, used_NP, 0.0 if rule == VERTEX else shape).vertex
        chosen_N1 = best_N1 + np.clip(np.nan_to_num(vertex_N), -1, 1)[:, None]
    return above_optimum(chosen_N1 - optimum_N1, shape, curvature_N1)[:, 0]


def above_optimum(x: np.ndarray, shape: float, curvature: np.ndarray | float) -> np.ndarray:
    """Return the curve of a shape and curvature at distances x from its vertex, where it is 0."""
    if not shape:
        return curvature * x**2 / 2
    return curvature * (np.expm1(shape * x) - shape * x) / shape**2


def tuning_errors(lines: Mapping[str, Sequence[Line]], shape: float, rule: str) -> dict[str, Error]:
    """Return by variant of a cell the error of tuning in its mean loss.

    The expected excess cancels between two variants that are tuned alike, its variance does not.
    The noise of a run and the curvatures are those of all variants: those of a single one are too
    uncertain.

    There is none for GRID, whose pages say how often they are wrong: there the distance from the
    optimum is no noise, and variants of almost equal runs share it.

    Args:
        lines: of each variant, those of its lists through the chosen point.
    """
    valleys = {name: [line for line in own if line.is_valley] for name, own in lines.items()}
    residuals = [own[0].residuals(shape) for own in valleys.values() if own]
    df = sum(df for _, df in residuals)
    if not df or rule == GRID:
        return dict.fromkeys(lines, Error())
    n_seeds = min(len(own[0].outcomes[0].losses) for own in valleys.values() if own)
    sd = math.sqrt(math.fsum(squares for squares, _ in residuals) / df / n_seeds)
    if sd < ROUNDING:
        return dict.fromkeys(lines, Error())
    of_list = []  # of the rate, and of the second list
    for i in range(max(map(len, valleys.values()))):
        of_variants = [own[i] for own in valleys.values() if len(own) > i]
        of_list.append(_excess_variance(of_variants, 0.0 if i else shape, rule, sd))
    # The variance goes with the square of that of a run, whose relative variance is 2 / df.
    return {name: Error(sum(of_list[: len(own)]), df / 4) for name, own in lines.items()}


def _excess_variance(lines: Sequence[Line], shape: float, rule: str, sd: float) -> float:
    """Return the variance of the excess in one direction, from the lines of all variants."""
    step = float(
        np.median([(x[line.best + 1] - x[line.best - 1]) / 2 for line in lines for x in [line.x]])
    )
    curves = [line.curve(shape) for line in lines]
    bends = np.array([float(curve.bend) for curve in curves])
    noise = sd**2 * np.array([float(curve.bend_variance) for curve in curves])
    n_values = min(len(line.values) for line in lines)
    curvatures = true_curvatures(bends, noise) * step**2
    return float(excess_of_tuning(rule, shape * step, curvatures, sd, n_values).var())


def true_curvatures(bends_A: np.ndarray, noise_A: np.ndarray) -> np.ndarray:
    """Return curvatures (..., A) with the mean of the fitted ones, and the variance that the noise
    of the fits leaves.

    The method of moments, as in empirical Bayes estimates (Efron and Morris 1975), with the spread
    of the true values and not of their estimates. At least a tenth of the mean.
    """
    mean = bends_A.mean(axis=-1, keepdims=True)
    spread = np.mean((bends_A - mean) ** 2, axis=-1, keepdims=True)
    left = np.maximum(0.0, 1 - noise_A.mean(axis=-1, keepdims=True) / np.maximum(spread, 1e-30))
    floor = np.maximum(mean / 10, 1e-9)
    return np.maximum(mean + np.sqrt(left) * (bends_A - mean), floor)


class Choice(NamedTuple):
    """What the finished tuning runs of a variant say."""

    # the points that are still to be trained; the rest is unset then
    missing: tuple[Point, ...] = ()
    best: Point | None = None  # of the points that were tried
    # where the final runs train; None without missing points: the cell's shape is not known yet
    point: Point | None = None
    at_edge: tuple[str, ...] = ()  # the keys whose best value is still at the edge of its list
    # of missing points: key, its best value, the one beyond the edge
    added: tuple[tuple[str, float, float], ...] = ()
    lines: tuple[Line, ...] = ()  # of the lists of several positive fractions, in their order
    shape: float = 0.0  # of the line of the learning rate


def choose_in_cell(
    lists: Mapping[str, Lists],
    outcomes: Mapping[str, Mapping[Point, Outcome]],
    rule: str = CURVE,
    shape: float | None = None,
) -> dict[str, Choice]:
    """Choose the values of the variants of a cell, or say which points their tuning lacks.

    Args:
        lists: the declared lists of each variant. One value each needs no tuning.
        outcomes: by variant, the outcome of every point whose tuning runs are finished.
        rule: GRID, VERTEX or CURVE.
        shape: that of the cell's curves; None: of these variants, when all of them have their
            points of the learning rate.
    """
    choices = {name: choose(lists[name], outcomes[name], rule, shape) for name in lists}
    if shape is not None or any(choice.missing for choice in choices.values()):
        return choices
    rates = [
        choices[name].lines[0] for name in lists if is_scale(lists[name].get(LEARNING_RATE, ()))
    ]
    shape = common_shape(rates)
    if rule != CURVE:  # the shape counts in the error of tuning alone
        return {name: choice._replace(shape=shape) for name, choice in choices.items()}
    return {name: choose(lists[name], outcomes[name], rule, shape) for name in lists}


def choose(
    lists: Lists, outcomes: Mapping[Point, Outcome], rule: str, shape: float | None
) -> Choice:
    """Choose the values of one variant; see `choose_in_cell`.

    >>> rates = {LEARNING_RATE: (0.001, 0.002, 0.004)}
    >>> outcomes = {(0.001,): outcome([2.0]), (0.002,): outcome([2.5]), (0.004,): outcome([3.5])}
    >>> choose(rates, outcomes, CURVE, None).missing  # the best one is at the edge
    ((0.0005,),)
    >>> choose(rates, outcomes, CURVE, None).added
    (('optimizer.learning_rate', 0.001, 0.0005),)
    >>> choose(rates, outcomes | {(0.0005,): outcome([2.0])}, CURVE, None).missing
    ((0.00025,),)
    >>> choose(rates, outcomes | {(0.0005,): outcome([2.5])}, CURVE, 0.0).point
    (0.00102,)
    >>> choose(rates, outcomes, GRID, None).point
    (0.001,)
    """
    if rule == CURVE:
        return _choose_in_turn(lists, outcomes, shape)
    return _choose_in_product(lists, outcomes, rule)


def _choose_in_turn(lists: Lists, outcomes: Mapping[Point, Outcome], shape: float | None) -> Choice:
    """Tune list after list: the first at the middle values of the others, the next at the vertex
    of the first.
    """
    point = {key: values[len(values) // 2] for key, values in lists.items()}
    best = dict(point)
    edges: list[str] = []
    lines: list[Line] = []
    for key, declared in lists.items():
        if len(declared) == 1:
            continue
        values = tuple(declared)
        added: tuple[tuple[str, float, float], ...] = ()
        while True:
            points = [tuple({**point, key: value}.values()) for value in values]
            if missing := tuple(p for p in points if p not in outcomes):
                return Choice(missing, added=added)
            line = line_of(values, [outcomes[p] for p in points])
            best[key] = point[key] = values[line.best]
            is_at_edge = is_scale(values) and line.best in (0, len(values) - 1)
            longer = values
            if is_at_edge and len(values) < len(declared) + MAX_EXTENSIONS:
                longer = extended(key, values, values[line.best])
            if longer == values:
                break
            added = tuple((key, point[key], value) for value in longer if value not in values)
            values = longer
        if is_at_edge:
            edges.append(key)
        if not is_scale(values):
            continue
        lines.append(line)
        if key == LEARNING_RATE and shape is None:
            return Choice(lines=tuple(lines))
        point[key] = line.vertex((shape or 0.0) if key == LEARNING_RATE else 0.0)
    return Choice(
        best=tuple(best.values()),
        point=tuple(point.values()),
        at_edge=tuple(edges),
        lines=tuple(lines),
        shape=shape or 0.0,
    )


def _choose_in_product(lists: Lists, outcomes: Mapping[Point, Outcome], rule: str) -> Choice:
    """Tune over the product of the lists, as published pages without the design CURVE did."""
    longer = {key: tuple(values) for key, values in lists.items()}
    added: list[tuple[str, float, float]] = []
    while True:
        points: list[Point] = list(itertools.product(*longer.values()))
        if len(points) == 1:
            return Choice((), points[0], points[0])
        if missing := tuple(point for point in points if point not in outcomes):
            return Choice(missing, added=tuple(added))
        ranks = [outcomes[point].rank for point in points]
        lowest = points[ranks.index(min(ranks))]
        best = dict(zip(longer, lowest, strict=True))
        edges = [
            key
            for key, values in longer.items()
            if is_scale(values) and best[key] in (values[0], values[-1])
        ]
        before = longer
        added = []
        for key in edges if rule == VERTEX else ():
            if len(longer[key]) < len(lists[key]) + MAX_EXTENSIONS:
                longer = longer | {key: extended(key, longer[key], best[key])}
                added += [
                    (key, best[key], value) for value in longer[key] if value not in before[key]
                ]
        if longer == before:
            break
    lines = {
        key: Line(
            values,
            tuple(outcomes[tuple({**best, key: value}.values())] for value in values),
            values.index(best[key]),
        )
        for key, values in longer.items()
        if is_scale(values)
    }
    point = lowest
    if rule == VERTEX:
        at_vertex = {key: line.parabola_vertex() for key, line in lines.items()}
        point = tuple((best | at_vertex).values())
    return Choice((), lowest, point, tuple(edges), lines=tuple(lines.values()))


def extended(key: str, values: tuple[float, ...], best: float) -> tuple[float, ...]:
    """Return a list with one more value beyond the edge at which its best value is, at the ratio of
    the step there.

    The values are positive and at least two. A list whose next value the config does not allow is
    returned unchanged.

    >>> extended(LEARNING_RATE, (0.001, 0.002, 0.008), 0.008)
    (0.001, 0.002, 0.008, 0.032)
    >>> extended("optimizer.b2", (0.9, 0.99), 0.99)
    (0.9, 0.99)
    """
    beyond, inside = (values[0], values[1]) if best == values[0] else (values[-1], values[-2])
    new = float(f"{beyond * beyond / inside:.6g}")
    try:
        checked(new, *schema()[key])
    except ValueError:
        return values
    return (new, *values) if best == values[0] else (*values, new)


def is_scale(values: Sequence[Any]) -> bool:
    """Return whether a list has ratios: several values, all of them positive fractions."""
    return len(values) > 1 and all(type(value) is float and value > 0 for value in values)
