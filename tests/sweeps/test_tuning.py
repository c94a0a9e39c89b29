"""The choice of tuned values: the vertex in log2, its limits, extensions of lists, and runs that
failed to learn.
"""

import itertools
import math

import numpy as np
import pytest

from lm.sweeps.tuning import LEARNING_RATE, MAX_EXTENSIONS, choose, outcome, parabola_vertex, vertex

DECAY = "optimizer.weight_decay"
RATES = (0.001, 0.002, 0.004, 0.008, 0.016)


def bowl(lists, center, tilt=0.0):
    """Return the outcome of every point of a quadratic in log2 of each value, lowest at `center`."""
    found = {}
    for point in itertools.product(*lists.values()):
        x, y = (math.log2(value / middle) for value, middle in zip(point, center, strict=True))
        found[point] = outcome([2 + 0.1 * x * x + 0.05 * y * y + tilt * x * y])
    return found


def test_the_vertex_agrees_with_a_fitted_polynomial():
    """numpy.polyfit through the same three points, on an uneven grid too."""
    draw = np.random.default_rng(0)
    for _ in range(100):
        x = np.sort(draw.normal(size=3))
        y = draw.normal(size=3)
        y[1] = y.min() - draw.random()
        a, b, _ = np.polyfit(x, y, 2)
        assert parabola_vertex(x, y) == pytest.approx(-b / (2 * a), abs=1e-6)
    rows = np.log2([RATES[:3], RATES[1:4]]), np.array([[3.0, 2.0, 2.0], [3.0, 2.0, 3.0]])
    np.testing.assert_allclose(parabola_vertex(*rows), [np.log2(0.002) + 0.5, np.log2(0.004)])


@pytest.mark.parametrize(
    ("losses", "best", "expected"),
    [
        ([3, 2.5, 2.0, math.inf, 3], 2, 0.004),  # no parabola through a run that diverged
        ([3, 2.5, 2.0, 1.51, 3], 2, 0.008),  # the minimum would be 49 steps away
        ([3, 2.5, 2.0, 1.0, 3], 2, 0.004),  # there is none
        ([2, 2, 2, 2, 2], 2, 0.004),
    ],
)
def test_a_vertex_is_at_most_one_step_from_the_best_value(losses, best, expected):
    assert vertex(RATES, losses, best) == expected


def test_every_tuned_value_moves_to_the_vertex_in_its_own_direction():
    lists = {LEARNING_RATE: RATES, DECAY: (0.03, 0.1, 0.3)}
    choice = choose(lists, bowl(lists, (0.0034, 0.12)))
    assert choice.best == (0.004, 0.1)
    assert choice.point == (0.0034, 0.12)
    assert not choice.missing
    assert not choice.at_edge


def test_a_best_value_at_an_edge_extends_its_list_by_the_same_ratio():
    lists = {LEARNING_RATE: (0.001, 0.002), DECAY: (0.1, 0.3)}
    found = bowl(lists, (0.0035, 0.05))
    assert set(choose(lists, found).missing) == {(0.001, 0.0333333), (0.002, 0.0333333), (0.004, 0.0333333),
                                                 (0.004, 0.1), (0.004, 0.3)}  # fmt: skip
    rounds = 0
    while missing := choose(lists, found).missing:
        wide = {key: tuple({point[i] for point in missing}) for i, key in enumerate(lists)}
        found |= {
            point: result
            for point, result in bowl(wide, (0.0035, 0.05)).items()
            if point in missing
        }
        rounds += 1
    choice = choose(lists, found)
    assert (rounds, choice.point) == (2, (0.0035, 0.05))


def test_extensions_are_bounded():
    lists, found = {LEARNING_RATE: (0.001, 0.002)}, {}
    while missing := choose(lists, found).missing:
        found |= {point: outcome([point[0]]) for point in missing}  # the lower the better
    choice = choose(lists, found)
    assert len(found) == 2 + MAX_EXTENSIONS
    assert (choice.point, choice.at_edge) == ((min(found)[0],), (LEARNING_RATE,))


@pytest.mark.parametrize(
    ("key", "values"),
    [(DECAY, (0.0, 0.1)), ("optimizer.warmup_steps", (10, 40)), ("optimizer.nesterov", (True, False)),
     # the next value, 1.089, is out of range
     ("optimizer.clip_norm", (None, 1.0)), ("optimizer.b2", (0.9, 0.99))],
)  # fmt: skip
def test_lists_without_ratios_take_the_best_value(key, values):
    for best in values:
        if (key, best) != ("optimizer.b2", 0.9):
            found = {(value,): outcome([2.0 + (value != best)]) for value in values}
            assert choose({key: values}, found).point == (best,)


def test_one_value_each_needs_no_tuning():
    assert choose({LEARNING_RATE: (0.1,), DECAY: (0.0,)}, {}).point == (0.1, 0.0)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (
            {0.001: [2.0, 2.0], 0.002: [1.0, None], 0.004: [2.1, 2.1]},
            0.001,
        ),  # a lower loss, but one run diverged
        ({0.001: [2.0, 4.5], 0.002: [2.5, 2.5], 0.004: [2.4, None]}, 0.002),  # 4.5 is stuck
        (
            {0.001: [4.2, 4.5], 0.002: [None, None], 0.004: [4.3, 4.1]},
            0.004,
        ),  # all are stuck or diverged
    ],
)
def test_the_best_point_has_the_fewest_runs_that_diverged_or_got_stuck(losses, expected):
    found = {(rate,): outcome(of_rate, stuck_above=4.0) for rate, of_rate in losses.items()}
    assert min(found, key=lambda point: found[point].rank) == (expected,)
