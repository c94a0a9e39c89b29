"""The choice of tuned values: the vertex in log2, its limits, extensions of lists, and runs that
failed to learn.
"""

import itertools
import math

import numpy as np
import pytest

from lm.sweeps.tuning import (
    CURVE,
    GRID,
    LEARNING_RATE,
    MAX_EXTENSIONS,
    VERTEX,
    above_optimum,
    choose_in_cell,
    common_shape,
    excess_of_tuning,
    fit_curve,
    line_of,
    outcome,
    parabola_vertex,
    tuning_errors,
    vertex,
)

DECAY = "optimizer.weight_decay"
RATES = (0.001, 0.002, 0.004, 0.008, 0.016)


def choose(lists, outcomes, rule=CURVE, shape=None):
    """Return the choice of a variant that is alone in its cell."""
    return choose_in_cell({"a": lists}, {"a": outcomes}, rule, shape)["a"]


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
    choice = choose(lists, bowl(lists, (0.0034, 0.12)), VERTEX)
    assert choice.best == (0.004, 0.1)
    assert choice.point == (0.0034, 0.12)
    assert not choice.missing
    assert not choice.at_edge


def trained(lists, center, rule=CURVE):
    """Return the points of a bowl that are trained until the choice, and the choice."""
    found = {}
    while missing := choose(lists, found, rule).missing:
        of_points = {key: tuple({point[i] for point in missing}) for i, key in enumerate(lists)}
        bowls = bowl(of_points, center)
        found |= {point: bowls[point] for point in missing}
    return found, choose(lists, found, rule)


def test_the_decay_is_tuned_at_the_vertex_of_the_rate_and_not_in_a_product():
    lists = {LEARNING_RATE: RATES, DECAY: (0.03, 0.1, 0.3)}
    found, choice = trained(lists, (0.0034, 0.12))
    assert (len(found), len(trained(lists, (0.0034, 0.12), VERTEX)[0])) == (5 + 3, 5 * 3)
    assert set(found) == {(rate, 0.1) for rate in RATES} | {
        (choice.point[0], decay) for decay in (0.03, 0.1, 0.3)
    }
    assert choice.point == pytest.approx((0.0034, 0.12), rel=0.02)


def test_a_best_value_at_an_edge_extends_its_list_by_the_same_ratio():
    lists = {LEARNING_RATE: (0.001, 0.002), DECAY: (0.1, 0.3)}
    found = bowl(lists, (0.0035, 0.05))
    assert set(choose(lists, found, VERTEX).missing) == {(0.001, 0.0333333), (0.002, 0.0333333), (0.004, 0.0333333),
                                                         (0.004, 0.1), (0.004, 0.3)}  # fmt: skip
    assert trained(lists, (0.0035, 0.05), VERTEX)[1].point == (0.0035, 0.05)
    found, choice = trained(lists, (0.0035, 0.05))
    assert {rate for rate, decay in found if decay == 0.3} >= {0.001, 0.002, 0.004, 0.008}
    assert {decay for rate, decay in found} == {0.3, 0.1, 0.0333333, 0.0111111}
    assert choice.point == pytest.approx((0.0035, 0.05), rel=0.02)


def test_a_curve_agrees_with_a_fitted_polynomial_and_with_its_own_formula():
    """numpy.polyfit for shape 0; for others the curve and its curvature are recovered."""
    draw = np.random.default_rng(0)
    x = np.arange(-2.0, 3.0)
    y = x**2 + draw.normal(0, 0.3, (20, 5))
    found = fit_curve(np.broadcast_to(x, y.shape), y, np.ones(y.shape), 0.0)
    for i, losses in enumerate(y):
        a, b, _ = np.polyfit(x, losses, 2)
        assert (found.vertex[i], found.curvature[i]) == pytest.approx((-b / (2 * a), 2 * a))
    for shape in (-0.6, 0.3, 1.0):
        one = fit_curve(x, 2 + above_optimum(x - 0.4, shape, 0.07), x > -2, shape)
        assert (one.vertex.item(), one.curvature.item()) == pytest.approx((0.4, 0.07))


def test_the_first_order_excess_is_that_of_simulated_fits():
    draw = np.random.default_rng(1)
    x = np.broadcast_to(np.arange(-2.0, 3.0), (20_000, 5))
    noise = 0.005  # small: the formula is of first order
    fitted = fit_curve(x, above_optimum(x, 0.5, 0.1) + draw.normal(0, noise, x.shape), x == x, 0.5)
    exact = fit_curve(x[0], above_optimum(x[0], 0.5, 0.1), x[0] == x[0], 0.5)
    excess = above_optimum(fitted.vertex, 0.5, 0.1).mean()
    assert excess == pytest.approx(noise**2 * exact.excess.item(), rel=0.1)


def test_variants_of_a_cell_share_the_shape_of_their_curves():
    draw = np.random.default_rng(2)

    def lines(n, shape, noise):
        steps = np.arange(-2.0, 3.0)
        for _ in range(n):
            losses = above_optimum(steps - draw.uniform(-0.5, 0.5), shape, 0.06)
            yield line_of(
                0.01 * 2**steps, [outcome(loss + draw.normal(0, noise, 2)) for loss in losses]
            )

    assert common_shape(list(lines(20, 0.7, 0.005))) == pytest.approx(0.7, abs=0.11)
    assert common_shape(list(lines(20, -0.3, 0.005))) == pytest.approx(-0.3, abs=0.11)
    # Two noisy ones say little, and the shape is near the usual one.
    assert common_shape(list(lines(2, -0.9, 0.3))) == pytest.approx(0.2, abs=0.31)


def test_the_error_of_tuning_is_that_of_simulated_variants():
    """The variance of the loss at the tuned values is estimated from the tuning runs alone."""
    draw = np.random.default_rng(3)
    steps = np.arange(-2.0, 3.0)
    own = {}
    for i in range(40):
        losses = above_optimum(steps - draw.uniform(-0.4, 0.4), 0.2, 0.05)
        runs = [outcome(loss + draw.normal(0, 0.01, 2)) for loss in losses]
        own[str(i)] = (line_of(0.01 * 2**steps, runs),)
    for rule in (VERTEX, CURVE):
        found = tuning_errors(own, 0.2, rule)["0"]
        expected = excess_of_tuning(rule, 0.2, [0.05], 0.01 / math.sqrt(2), n=20_000, seed=1).std()
        assert math.sqrt(found.variance) == pytest.approx(expected, rel=0.4)
        assert 20 < found.df < 80
    curve, parabola = (tuning_errors(own, 0.2, rule)["0"].variance for rule in (CURVE, VERTEX))
    assert curve < parabola / 4
    assert tuning_errors(own, 0.2, GRID)["0"].variance == 0


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
