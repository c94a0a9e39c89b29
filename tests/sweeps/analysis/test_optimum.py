"""The estimate of a variant's loss between the learning rates of its grid."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest
from running import ROOT
from synthetic_sweep import LOSSES, diverge, select, sweep, write

from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.optimum import estimate_optimum
from lm.sweeps.report import tables
from lm.sweeps.statistics import inference


def published(name: str) -> tuple[SimpleNamespace, dict, dict]:
    """Return results and record of a sweep as it was published on 2026-11-22, and the best rate of each variant."""
    with open(ROOT / "tests" / "references" / "runs" / f"{name}.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "final"]
    runs, grids = {}, {}
    for row in rows:
        key = "final", row["variant"], float(row["learning_rate"]), int(row["seed"])
        runs[key] = {"test_loss": float(row["test_loss"])}
        grids.setdefault(row["variant"], set()).add(key[2])
    unigram = {"data": {"unigram": {"test": 3.362}}}
    variants = {name: unigram | {"grid": sorted(rates)} for name, rates in grids.items()}
    record = {"variants": variants, "seeds": sorted({key[3] for key in runs})}
    return SimpleNamespace(runs=runs), record, {name: v["grid"][1] for name, v in variants.items()}


def test_differences_of_published_sweeps_equal_those_of_an_independent_analysis():
    """The expected values were computed by other code from the published runs."""
    results, record, best = published("swiglu_vs_silu")
    geglu, gelu = (estimate_optimum(results, record, name, best[name]).losses for name in ("GeGLU", "GELU"))
    assert inference.paired_difference(geglu, gelu).mean == pytest.approx(-0.0091, abs=5e-5)
    results, record, best = published("norms")
    layer, rms, no_bias = (
        estimate_optimum(results, record, name, best[name]).losses
        for name in ("LayerNorm", "RMSNorm", "LayerNorm without bias")
    )
    p_values = [inference.paired_difference(layer, other).p for other in (rms, no_bias)]
    assert inference.holm(p_values)[0] == pytest.approx(0.044, abs=5e-4)


def test_the_minimum_is_that_of_the_parabola_through_the_mean_losses():
    draw = np.random.default_rng(0)
    for _ in range(20):
        x = np.sort(draw.normal(size=3))
        at, low, curvature = draw.uniform(x[0], x[2]), draw.normal(), draw.uniform(0.1, 5)
        found = inference.parabola_minimum(x, low + curvature * (x - at) ** 2)
        assert found == pytest.approx((at, low), abs=1e-9)
        assert np.isnan(inference.parabola_minimum(x, low - curvature * (x - at) ** 2)).all()  # a maximum
        assert np.isnan(inference.parabola_minimum(x, low + curvature * (x - x[2] - 0.1) ** 2)).all()  # outside


def test_pseudo_values_correct_the_bias_of_the_variance():
    """The jackknife turns the variance with divisor n into the one with n - 1 exactly (Quenouille 1956)."""
    x = np.array([1.0, 4.0, 2.0, 7.0, 11.0])
    assert inference.pseudo_values(np.var, x).mean() == pytest.approx(np.var(x, ddof=1), rel=1e-12)


def test_the_optimum_of_a_symmetric_grid_is_its_middle():
    record, runs = sweep()
    results = SimpleNamespace(runs={(r["phase"], r["variant"], r["learning_rate"], r["seed"]): r for r in runs})
    found = estimate_optimum(results, record, "gated", 0.002)
    assert found.rate == pytest.approx(0.002)
    np.testing.assert_allclose(found.losses, LOSSES["gated"], rtol=1e-9)


@pytest.mark.parametrize(
    ("grid", "best", "reason"),
    [
        ([0.001, 0.002, 0.004], 0.001, "the best learning rate is at the edge of its grid, or the only one"),
        ([0.002], 0.002, "the best learning rate is at the edge of its grid, or the only one"),
        ([0.001, 0.003, 0.009], 0.003, "neighboring learning rates differ by a factor of 3, more than 2"),
    ],
)
def test_grids_that_give_no_estimate(grid, best, reason):
    record, runs = sweep(grid=grid, best=best)
    results = SimpleNamespace(runs={(r["phase"], r["variant"], r["learning_rate"], r["seed"]): r for r in runs})
    assert estimate_optimum(results, record, "plain", best).missing == reason


def test_diverged_stuck_or_concave_runs_give_no_estimate_and_the_table_has_the_reason(tmp_path):
    record, runs = sweep()
    diverge(select(runs, "final", "gated", 0.004)[3])
    select(runs, "final", "wide", 0.001)[0]["test_loss"] = 2.74  # stuck: above 0.95 times the unigram baseline, 2.75
    a = analyze(write(tmp_path / "s", record, runs))
    reason = "a run at the best learning rate or a neighboring one diverged or got stuck"
    assert [v.optimum.missing for v in a.variants.values()] == ["", reason, reason]
    assert [c.at_optimum for c in a.comparisons] == [None, None]
    assert (a.comparisons[0].verdict, a.comparisons[0].is_significant) == ("no claim", False)
    assert a.answers[0].startswith(
        f"No claim about gated and plain, because there is no estimate at the optimum: {reason} (n = 5 paired seeds, "
    )
    assert "after Holm's correction; p leaves out how far the best rates of the grids are from" in a.answers[0]
    table = tables.comparisons(a)
    assert [row[4] for row in table.rows] == ["no estimate"] * 2
    assert f"No estimate for gated, wide: {reason}." in table.notes[table.header[4]]
    for r in select(runs, "final", "plain", 0.004) + select(runs, "final", "plain", 0.001):
        r["test_loss"] -= 0.5
    a = analyze(write(tmp_path / "t", record, runs))
    assert "have no minimum" in a.variants["plain"].optimum.missing


def test_a_claim_needs_both_estimates(tmp_path):
    """gated is 0.104 better at the best rate of the grid, but plain has its optimum between two rates."""
    record, runs = sweep()
    for r in select(runs, "final", "plain", 0.004):
        r["test_loss"] -= 0.2  # as low as at 0.002, so that the parabola's minimum is 0.025 lower
    a = analyze(write(tmp_path / "s", record, runs))
    c = a.comparisons[0]
    expected = np.array(LOSSES["gated"]) - (np.array(LOSSES["plain"]) - 0.025)
    assert c.at_optimum.mean == pytest.approx(expected.mean(), abs=1e-9)
    assert c.is_significant
    for seed, r in enumerate(select(runs, "final", "plain", 0.004)):
        r["test_loss"] += 0.25 * (-1) ** seed * (seed < 4)  # the mean stays, the spread of the minimum grows
    c = analyze(write(tmp_path / "t", record, runs)).comparisons[0]
    assert c.p_adjusted < 0.05 < c.p_at_optimum
    assert not c.is_significant
    assert c.answer.startswith("Undecided between gated and plain: no significant difference")
    assert f"; at the estimated optima difference {c.at_optimum.mean:+.4f}, 95 % CI" in c.answer
    assert "must both be significant, with the same sign" in c.answer
    assert not math.isnan(c.p_at_optimum)
