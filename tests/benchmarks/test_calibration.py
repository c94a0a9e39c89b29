"""The simulations that justify the design of sweeps use its rules, and agree with theory where there
is one.
"""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.calibration import __main__ as command
from benchmarks.calibration import cells, procedure
from benchmarks.calibration.procedure import POSITIONS, Design, simulate
from benchmarks.calibration.published import Cell, draw_starts, final_noise, published_cells
from lm.sweeps import statistics
from lm.sweeps.statistics import Estimate, mean_over_cells, with_error
from lm.sweeps.tuning import (
    CURVE,
    LEARNING_RATE,
    VERTEX,
    choose_in_cell,
    outcome,
    tuning_errors,
)

RATES = POSITIONS[5]
CELL = Cell("a", (0.5, 0.02, 0.005), math.log(0.05), 0.2, (0.012,) * 5, 0.03, 0.015, 0.013)


def within(share: float, expected: float, n: int) -> bool:
    """Return whether a simulated share is the expected one, within 4 standard errors."""
    return abs(share - expected) < 4 * (expected * (1 - expected) / n) ** 0.5


@pytest.mark.parametrize("rule", [VERTEX, CURVE])
def test_a_simulated_sweep_chooses_and_estimates_as_lm_sweep_does(rule):
    draw = np.random.default_rng(0)
    optima = draw.uniform(-0.5, 0.5, (1, 12, 1))
    losses = CELL.above(RATES - optima, 0.05) + draw.normal(0, 0.008, (1, 12, len(RATES)))
    half = draw.normal(0, 0.008 * 2**0.5, losses.shape)
    chosen, lines = procedure.choose_on_line(5, losses, half, rule, None)
    design = Design("", rule, 10, 1, True, n_arms=11)
    variance, df = procedure.estimated_error(design, lines, None)

    rates = {x: float(f"{0.01 * 2**x:.6g}") for x in RATES}
    lists = {str(arm): {LEARNING_RATE: tuple(rates[x] for x in RATES[2:-2])} for arm in range(12)}
    runs = losses[0, ..., None] + half[0, ..., None] * np.array([1, -1]) / 2**0.5
    outcomes = {
        str(arm): {(rates[x],): outcome(of_x) for x, of_x in zip(RATES, own, strict=True)}
        for arm, own in enumerate(runs.tolist())
    }
    choices = choose_in_cell(lists, outcomes, rule)
    found = [math.log2(choice.point[0] / 0.01) for choice in choices.values()]
    assert found == pytest.approx(chosen[0].tolist(), abs=0.01)  # three significant digits
    (shape,) = {choice.shape for choice in choices.values()}
    assert shape == pytest.approx(lines.shape_W1.item())
    errors = tuning_errors({name: c.lines for name, c in choices.items()}, shape, rule)
    assert (errors["0"].variance, errors["0"].df) == pytest.approx(
        (variance.item(), df.item()), rel=0.15
    )


def test_the_intervals_of_a_simulated_sweep_are_those_of_a_report(monkeypatch):
    """The same numbers through lm.sweeps.statistics, sweep by sweep."""
    kept = []
    of_cell = procedure._in_cell

    def keep(*arguments):
        kept.append(of_cell(*arguments))
        return kept[-1]

    monkeypatch.setattr(procedure, "_in_cell", keep)
    found = simulate([CELL, CELL], Design("", CURVE, 8, 2, True, n_arms=3), 4, 0)
    parts = [Estimate(a.mean[1, 2], a.se[1, 2], a.df[1, 2], 8) for a in kept]
    mean = mean_over_cells(parts).mean
    assert (found.mean[1, 2], found.se[1, 2], found.df[1, 2], found.p()[1, 2]) == pytest.approx(
        (*mean[:3], mean.p)
    )
    kept.clear()
    lengths = Design("", CURVE, 8, 2, True, n_arms=3, n_rates=3, shape=0.2, first_to_last=True)
    found = simulate([CELL, CELL], lengths, 4, 0)
    first, last = [Estimate(a.mean[1, 2], a.se[1, 2], a.df[1, 2], 8) for a in kept]
    change = statistics.difference(last, first)
    assert (found.mean[1, 2], found.se[1, 2], found.df[1, 2]) == pytest.approx(change[:3])
    plain = Estimate(0.0, 0.01, 7, 8)
    assert with_error(plain, 0.01**2, 7).df == pytest.approx(14)


def test_without_tuning_errors_the_power_is_that_of_the_t_test():
    flat = CELL._replace(quartic=(0.0, 0.0, 0.0))
    found = simulate([flat], Design("", VERTEX, 8, 1, False, n_arms=1), 20_000, 0)
    se = flat.of_run * (2 / 8) ** 0.5
    for difference in (0.0, 0.01):
        bound = stats.t.isf(0.025, 7)
        shift = difference / se
        expected = stats.nct.sf(bound, 7, shift) + stats.nct.cdf(-bound, 7, shift)
        assert within(np.mean(found.p(difference) < 0.05), expected, 20_000)


def test_the_earlier_design_finds_false_differences_and_the_present_one_is_calibrated():
    of_study = published_cells()
    earlier = simulate(of_study, Design("", VERTEX, 10, 1, False), 250, 0)
    present = simulate(of_study, Design("", CURVE, 15, 4, True), 250, 0)
    assert np.mean(earlier.p() < 0.05) > 0.07
    assert 0.035 < np.mean(present.p() < 0.05) < 0.065
    assert present.mean.std() < 0.7 * earlier.mean.std()
    assert present.mean.std() == pytest.approx(np.sqrt(np.mean(present.se**2)), rel=0.1)


def test_the_noise_of_final_runs_is_found_and_simulated():
    """Drawn with known parts, a table gives them back; the simulation has the same variances."""
    draw = np.random.default_rng(0)
    starts_1AS = draw_starts(0.02, 3, 6, (1, 400), draw)
    losses_AS = starts_1AS[0] + draw.normal(0, 0.01, (9, 400)) + draw.normal(0, 0.05, 400)
    assert final_noise(losses_AS[0], losses_AS[1:3], losses_AS[3:]) == pytest.approx(
        (0.01, 0.02), rel=0.1
    )
    flat = CELL._replace(quartic=(0.0, 0.0, 0.0))
    for n in (1, 3):
        found = simulate([flat], Design("", VERTEX, 8, n, False, n_arms=1), 20_000, 0)
        expected = flat.of_run**2 * (1 + 1 / n) + flat.of_start**2 * (1 - 1 / n)
        assert found.mean.var() == pytest.approx(expected / 8, rel=0.05)
        assert np.mean(found.se**2) == pytest.approx(expected / 8, rel=0.05)


def test_intervals_over_cells_cover():
    """The prediction interval covers at least as often: it is never narrower than the seeds allow."""
    found = cells.simulate(4, 0.01, 10, 2000, np.random.default_rng(0))
    assert within(found["mean"].mean(), 0.95, 2000)
    assert 0.94 < found["prediction"].mean() < 0.985


def test_the_command_prints_four_tables(tmp_path, capsys):
    assert command.main(["--sweeps", "4", "--csv", str(tmp_path / "a.csv")]) == 0
    assert capsys.readouterr().out.count("\n| --- |") == 4
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert len(lines) == 1 + len(command.DESIGNS + command.ALONE + command.LENGTHS)
