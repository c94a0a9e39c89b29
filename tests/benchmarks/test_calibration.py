"""The simulations that justify the design of sweeps use its code, and agree with theory where there
is one.
"""

import numpy as np
import pytest
from scipy import stats

from benchmarks.calibration import __main__ as command
from benchmarks.calibration import cells, designs
from lm.sweeps import tuning


def within(share: float, expected: float, n: int) -> bool:
    """Return whether a simulated share is the expected one, within 4 standard errors."""
    return abs(share - expected) < 4 * (expected * (1 - expected) / n) ** 0.5


def test_the_vertex_is_that_of_a_sweep(monkeypatch):
    """Without noise both find the optimum of the parabola; the best rate does not."""
    monkeypatch.setattr(designs, "NOISE_SD", 0.0)
    optima = np.array([1.7, 2.0, 2.3])
    assert designs.chosen("vertex", optima, np.random.default_rng(0)) == pytest.approx(optima)
    assert list(designs.chosen("best rate", optima, np.random.default_rng(0))) == [2.0, 2.0, 2.0]
    rates = [2.0**i for i in range(5)]
    for optimum in optima:
        found = tuning.vertex(rates, [(i - optimum) ** 2 for i in range(5)], 2)
        assert np.log2(found) == pytest.approx(optimum, abs=5e-3)  # three significant digits


def test_two_lists_reach_the_minimum_if_neither_shifts_the_other(monkeypatch):
    monkeypatch.setattr(designs, "NOISE_SD", 0.0)
    shifts = np.array([-0.3, 0.0, 0.3])
    monkeypatch.setattr(designs, "CROSS", 0.0)
    assert designs.above_by_two_lists(2, shifts, np.random.default_rng(0)) == pytest.approx(
        0.0, abs=1e-12
    )
    monkeypatch.setattr(designs, "CROSS", 0.4)
    found = designs.above_by_two_lists(2, shifts, np.random.default_rng(0))
    assert np.all((found > 0) & (found < designs.DECAY_CURVATURE / 4))


def test_without_tuning_errors_the_power_is_that_of_the_t_test(monkeypatch):
    monkeypatch.setattr(designs, "CURVATURE", 0.0)
    n, sd = 20_000, designs.NOISE_SD * 2**0.5
    for difference in (0.0, 0.01):
        p = designs.p_values("vertex", 8, difference, None, n, np.random.default_rng(0))
        bound = stats.t.isf(0.025, 7)
        shift = difference / (sd / 8**0.5)
        expected = stats.nct.sf(bound, 7, shift) + stats.nct.cdf(-bound, 7, shift)
        assert within(np.mean(p < 0.05), expected, n)


def test_the_vertex_is_calibrated_and_the_best_rate_is_not():
    vertex, best = (
        designs.p_values(rule, 10, 0.0, 0.5, 20_000, np.random.default_rng(0))
        for rule in ("vertex", "best rate")
    )
    assert 0.045 < np.mean(vertex < 0.05) < 0.062
    assert np.mean(best < 0.05) > 0.2


def test_intervals_over_cells_cover():
    found = cells.simulate(4, 0.01, 10, 2000, np.random.default_rng(0))
    assert all(within(found[name].mean(), 0.95, 2000) for name in ("mean", "prediction"))


def test_the_command_prints_three_tables(capsys):
    assert command.main(["--sweeps", "80"]) == 0
    assert capsys.readouterr().out.count("\n| --- |") == 3
