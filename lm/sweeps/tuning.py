"""Choose the values of tuned hyperparameters: the vertex of a parabola through the best point of a
grid.

The tuning runs of a variant cover the product of its lists of values. Where the best value of a
list is the first or the last, the list is first extended. The final runs then train at the vertex,
in log2 of each value, of the parabola through the best value and its two neighbors, and not at the
best value: that choice finds false differences, because two variants' optima are rarely at the same
distance from the grid (benchmarks/calibration). This module does not import jax.
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

Lists = Mapping[str, Sequence[Any]]  # by config key, the values to choose from, in ascending order
Point = tuple  # one value of each list, in their order


class Outcome(NamedTuple):
    """The tuning runs of one point."""

    n_diverged: int
    n_stuck: int
    # mean validation loss of the runs that learned, else of the stuck ones; infinite if all
    # diverged
    loss: float

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

    >>> outcome([2.0, 3.0, None, 4.5], stuck_above=4.0)
    Outcome(n_diverged=1, n_stuck=1, loss=2.5)
    """
    finite = [loss for loss in losses if loss is not None]
    learned = [loss for loss in finite if loss <= stuck_above]
    used = learned or finite
    mean = math.fsum(used) / len(used) if used else math.inf
    return Outcome(len(losses) - len(finite), len(finite) - len(learned), mean)


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


class Choice(NamedTuple):
    """What the finished tuning runs of a variant say."""

    # the points that are still to be trained; the rest is unset then
    missing: tuple[Point, ...] = ()
    best: Point | None = None  # of the grid
    point: Point | None = None  # where the final runs train
    at_edge: tuple[str, ...] = ()  # the keys whose best value is still at the edge of its list
    # of missing points: key, its best value, the one beyond the edge
    added: tuple[tuple[str, float, float], ...] = ()


def choose(lists: Lists, outcomes: Mapping[Point, Outcome], at_vertex: bool = True) -> Choice:
    """Choose the values of a variant, or say which points its tuning lacks.

    Args:
        lists: the declared lists. One value each needs no tuning.
        outcomes: the outcome of every point whose tuning runs are finished.
        at_vertex: False: lists are not extended, and the final runs train at the best point of the
            grid.

    >>> rates = {LEARNING_RATE: (0.001, 0.002, 0.004)}
    >>> found = {(0.001,): outcome([2.0]), (0.002,): outcome([2.5]), (0.004,): outcome([3.5])}
    >>> choose(rates, found).missing  # the best one is at the edge
    ((0.0005,),)
    >>> choose(rates, found).added
    (('optimizer.learning_rate', 0.001, 0.0005),)
    >>> choose(rates, found | {(0.0005,): outcome([2.0])}).missing
    ((0.00025,),)
    >>> choose(rates, found | {(0.0005,): outcome([2.5])}).point
    (0.001,)
    >>> choose(rates, found, at_vertex=False).point
    (0.001,)
    """
    longer = {key: tuple(values) for key, values in lists.items()}
    added: list[tuple[str, float, float]] = []
    while True:
        points: list[Point] = list(itertools.product(*longer.values()))
        if len(points) == 1:
            return Choice((), points[0], points[0])
        if missing := tuple(point for point in points if point not in outcomes):
            return Choice(missing, added=tuple(added))
        found = [outcomes[point].rank for point in points]
        lowest = points[found.index(min(found))]
        best = dict(zip(longer, lowest, strict=True))
        edges = [
            key
            for key, values in longer.items()
            if _is_scale(values) and best[key] in (values[0], values[-1])
        ]
        if not at_vertex:
            return Choice((), lowest, lowest, tuple(edges))
        before = longer
        added = []
        for key in edges:
            if len(longer[key]) < len(lists[key]) + MAX_EXTENSIONS:
                longer = longer | {key: extended(key, longer[key], best[key])}
                added += [
                    (key, best[key], value) for value in longer[key] if value not in before[key]
                ]
        if longer == before:
            break
    point = tuple(_vertex_along(key, values, best, outcomes) for key, values in longer.items())
    return Choice((), lowest, point, tuple(edges))


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


def _is_scale(values: Sequence[Any]) -> bool:
    """Return whether a list has ratios: several values, all of them positive fractions."""
    return len(values) > 1 and all(type(value) is float and value > 0 for value in values)


def _vertex_along(
    key: str, values: tuple, best: dict[str, Any], outcomes: Mapping[Point, Outcome]
) -> Any:
    """Return the vertex in the direction of one list, through the best point."""
    if not _is_scale(values):
        return best[key]
    line = [outcomes[tuple({**best, key: value}.values())] for value in values]
    # A run that diverged or got stuck is not on a parabola.
    losses = [math.inf if found.n_diverged or found.n_stuck else found.loss for found in line]
    return vertex(values, losses, values.index(best[key]))
