"""Speed beside speed: measurements in turn, differences at equal seconds, and their table."""

import json
import math

import pytest
import sweeping
from synthetic_sweep import sweep

from lm import report
from lm.sweeps import speed
from lm.sweeps.analysis import CELL, CLAIM, MEAN, analyze
from lm.sweeps.report import to_markdown
from lm.sweeps.speed import Speeds
from lm.sweeps.speedometer import ratios_in_turn
from lm.system.errors import UserError

SLOPES = [-0.3, -0.2, -0.25, -0.25]


def test_a_machine_that_slows_down_favors_neither():
    calls = iter(range(1, 100))

    def meter(factor):
        return lambda: factor * 1000 * 0.97 ** next(calls)

    logs = [math.log(x) for x in ratios_in_turn(meter(0.8), meter(1.0), pairs=10)]
    assert sum(logs) / len(logs) == pytest.approx(math.log(0.8), abs=1e-12)
    assert max(logs) - min(logs) > 0.05  # one order alone would be wrong by 3 %


def test_a_slower_variant_is_worse_at_equal_seconds_by_the_slope():
    a = analyze(*sweep())
    speeds = Speeds({"gated": [0.8] * 4, "placebo": [1.0, 1.01, 0.99]}, {"": SLOPES})
    rows = {(row.claim.variant, row.claim.kind): row for row in speed.rows(a, speeds)}
    assert {name for name, _ in rows} == {"gated", "placebo"}  # "wide" was not measured
    row = rows["gated", CLAIM]
    assert row.ratio == pytest.approx(0.8)
    moved = row.at_equal_seconds.mean - row.claim.difference.mean
    assert moved == pytest.approx(-0.25 * math.log(0.8))
    assert row.at_equal_seconds.se > row.claim.difference.se
    text = to_markdown(a, {}, speeds=speeds)
    assert "| gated − plain | × 0.800 | [0.800, 0.800] |" in text
    assert "## Speed" not in to_markdown(a, {})


def test_the_baseline_may_be_compared_with_a_variant():
    """Or two others with each other: ratios are relative to the baseline."""
    record, runs = sweep()
    record["comparisons"] = [["plain", "gated"], ["wide", "gated"]]
    speeds = Speeds({"gated": [0.8, 0.79, 0.81], "wide": [0.4, 0.41, 0.39]}, {"": SLOPES})
    plain, wide = speed.rows(analyze(record, runs), speeds)
    assert plain.ratio == pytest.approx(1 / 0.8, rel=1e-3)
    moved = plain.at_equal_seconds.mean - plain.claim.difference.mean
    assert moved == pytest.approx(-0.25 * math.log(1 / 0.8), rel=1e-3)
    assert wide.ratio == pytest.approx(0.5, rel=1e-3)


def test_a_ratio_beyond_the_straight_line_has_no_difference_at_equal_seconds():
    a = analyze(*sweep())
    (row,) = speed.rows(a, Speeds({"gated": [0.5, 0.51]}, {"": SLOPES}))
    assert row.at_equal_seconds is None
    (row,) = speed.rows(a, Speeds({"gated": [0.9, 0.91]}, {}))
    assert row.at_equal_seconds is None


def test_a_mean_over_cells_needs_all_of_them():
    a = analyze(*sweep({"a": (100, 0.0), "b": (200, -0.1)}, axis="text"))
    both = {"gated, a": [0.9, 0.9], "gated, b": [0.8, 0.8]}
    slopes = {"a": SLOPES, "b": SLOPES}
    mean, *cells = speed.rows(a, Speeds(both, slopes))
    assert (mean.claim.cell, [row.claim.kind for row in cells]) == (MEAN, [CELL, CELL])
    assert mean.ratio == pytest.approx(math.sqrt(0.9 * 0.8))
    expected = sum(row.at_equal_seconds.mean for row in cells) / 2
    assert mean.at_equal_seconds.mean == pytest.approx(expected)
    (only,) = speed.rows(a, Speeds({"gated, a": [0.9, 0.9]}, slopes))
    assert only.claim.cell == "a"


@pytest.mark.parametrize(
    "content",
    [
        {"ratios": {"gated": [1.0, -1.0]}, "slopes": {}},
        {"ratios": {"gated": [1.0]}, "slopes": {}},
        {"ratios": {"gated": "fast"}, "slopes": {}},
        {"ratios": {}},
    ],
)
def test_damaged_speeds_are_refused(tmp_path, content):
    (tmp_path / speed.SPEEDS).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"speeds\.json"):
        speed.read_speeds(tmp_path)


@pytest.mark.slow
def test_a_finished_sweep_is_measured_and_published(bench, tmp_path):
    config = sweeping.changed(
        tmp_path / "speedy.py",
        "variants={'glu': {}, 'post': {'model.norm_placement': 'post'}}, baseline='glu', "
        "comparisons=(('post', 'glu'),), "
        "budgets={'full': Budget(tuning_seeds=1, seeds=5, placebos=1)}",
    )
    arguments = ("--budget", "full", "--workdir", tmp_path / "out", "--speed")
    code, output = sweeping.run(bench, *arguments, config=config)
    assert code == 0, output
    speeds = speed.read_speeds(tmp_path / "out")
    assert set(speeds.ratios) == {"post", "placebo"}
    assert len(speeds.slopes[""]) == 4
    before = (tmp_path / "out" / speed.SPEEDS).read_bytes()
    code, output = sweeping.run(bench, *arguments, config=config)  # nothing is measured twice
    assert (code, (tmp_path / "out" / speed.SPEEDS).read_bytes()) == (0, before)
    publish = (tmp_path / "out", "--publish", tmp_path / "pages")
    code, output = sweeping.run(bench, *publish, main=report.main, config=None)
    assert code == 0, output
    assert "## Speed" in (tmp_path / "pages" / "speedy.md").read_text()
