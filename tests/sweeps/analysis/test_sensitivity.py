"""Differences at each learning rate, learning-rate sensitivity, and their tables."""

import math

import numpy as np
import pytest
from synthetic_sweep import BASE, LOSSES, diverge, select, sweep, write

from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.sensitivity import rate_differences, sensitivity
from lm.sweeps.report import rate_tables, tables
from lm.sweeps.statistics import inference

WIDE_GRID = [0.0005, 0.001, 0.002, 0.004]


def differences(a):
    return rate_differences(a.results, a.record, "gated", "plain")


def test_fresh_seeds_are_used_where_both_variants_have_them_else_tuning_seeds(tmp_path):
    """At 0.0005 only the tuning seeds trained, where gated is 0.3 and 0.5 lower."""
    record, runs = sweep(grid=WIDE_GRID)
    for r, gain in zip(select(runs, "tuning", "gated", 0.0005), (0.3, 0.5), strict=True):
        r["test_loss"] -= gain
    found = differences(analyze(write(tmp_path / "s", record, runs)))
    assert [(d.rate, d.phase, d.n) for d in found] == [
        (0.0005, "tuning", 2),
        (0.001, "final", 5),
        (0.002, "final", 5),
        (0.004, "final", 5),
    ]
    assert found[0].difference.mean == pytest.approx(-0.4)
    assert found[0].difference.high == pytest.approx(-0.4 + 12.7062 * 0.1, abs=1e-4)  # t_1 from a table
    for d in found[1:]:  # all rates are equally worse for both variants
        assert d.difference[:5] == pytest.approx(inference.paired_difference(LOSSES["gated"], BASE)[:5])


def test_the_table_names_the_seeds_and_what_diverged_or_got_stuck(tmp_path):
    record, runs = sweep(grid=WIDE_GRID)
    diverge(select(runs, "final", "gated", 0.004)[2])
    select(runs, "final", "plain", 0.001)[0]["test_loss"] = 2.74  # stuck: above 0.95 times the unigram baseline, 2.75
    a = analyze(write(tmp_path / "s", record, runs))
    rows = rate_tables.differences(a).rows
    stuck, best = (d.difference for d in differences(a)[1:3])
    assert best.mean == pytest.approx(a.comparisons[0].difference.mean)
    assert rows[1:4] == [
        ["gated − plain", "0.001", f"{tables.with_interval(stuck)} (1 of 10 runs stuck)", "5 fresh"],
        ["gated − plain", "0.002", tables.with_interval(best), "5 fresh"],
        ["gated − plain", "0.004", "1 of 10 runs diverged", "5 fresh"],
    ]
    assert rows[0][3] == "2 tuning"
    assert [row[0] for row in rows] == ["gated − plain"] * 4 + ["wide − plain"] * 4


def test_one_tuning_seed_has_no_interval(tmp_path):
    record, runs = sweep(grid=WIDE_GRID)
    record["tuning_seeds"] = record["tuning_seeds"][:1]
    runs = [r for r in runs if r["seed"] != 1_000_001]
    select(runs, "tuning", "gated", 0.0005)[0]["test_loss"] -= 0.25
    row = rate_tables.differences(analyze(write(tmp_path / "s", record, runs))).rows[0]
    assert row[1:] == ["0.0005", "-0.2500", "1 tuning"]


def test_only_shared_rates_and_texts_are_compared(tmp_path):
    record, runs = sweep()
    record["variants"]["gated"]["grid"] = [0.001, 0.002]
    runs = [r for r in runs if (r["variant"], r["learning_rate"]) != ("gated", 0.004)]
    a = analyze(write(tmp_path / "s", record, runs))
    assert [d.rate for d in differences(a)] == [0.001, 0.002]
    record["variants"]["gated"]["data"] = record["variants"]["gated"]["data"] | {"fingerprint": "another"}
    assert differences(analyze(write(tmp_path / "texts", record, runs))) == []
    assert [row[0] for row in rate_tables.differences(a).rows] == ["gated − plain"] * 2 + ["wide − plain"] * 3
    assert rate_tables.differences(analyze(write(tmp_path / "one", *sweep(grid=[0.002])))) is None  # nothing to add


def test_sensitivity_is_over_the_tuning_runs_and_clipped_at_the_unigram_baseline(tmp_path):
    # plain: validation losses 2.3, 2.1, 2.3 at the three rates. gated: one of two runs diverges at 0.004, so that the
    # mean there is (2.3 + 2.5) / 2 = 2.4. wide: both runs end above the baseline, 2.5.
    record, runs = sweep()
    diverge(select(runs, "tuning", "gated", 0.004)[1])
    for r in select(runs, "tuning", "wide", 0.004):
        r["val_loss"] = 30.0
    a = analyze(write(tmp_path / "s", record, runs))
    found = [sensitivity(a.results, a.record, name) for name in LOSSES]
    assert found == pytest.approx([0.4 / 3, 0.5 / 3, 0.6 / 3])
    shown = rate_tables.rates(a)
    assert shown.header[2] == "LR sensitivity"
    assert [row[2] for row in shown.rows] == ["0.1333", "0.1667", "0.2000"]
    csv = [row["learning_rate_sensitivity"] for row in tables.variant_rows(a)]
    assert csv == found
    one = analyze(write(tmp_path / "one", *sweep(grid=[0.002])))
    assert math.isnan(sensitivity(one.results, one.record, "plain"))
    assert np.isnan([row["learning_rate_sensitivity"] for row in tables.variant_rows(one)]).all()
