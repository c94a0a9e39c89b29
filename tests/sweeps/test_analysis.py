"""The analysis of a small synthetic sweep: numbers checked with scipy and by hand, answers, warnings and tables."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from synthetic_sweep import BASE, GRID, LOSSES, diverge, run, select, speeds_json, sweep, write

from lm.sweeps import figures, tables
from lm.sweeps.analysis import analyze, difference
from lm.sweeps.results import Results, at_edge, identical_variants


def test_variants_agree_with_scipy(tmp_path):
    a = analyze(write(tmp_path / "s", *sweep()))
    for name, row in zip(LOSSES, tables.variant_rows(a), strict=True):
        x = LOSSES[name]
        low, high = stats.t.interval(0.95, 4, np.mean(x), stats.sem(x))
        found = [row[k] for k in ("test_loss", "test_loss_low", "test_loss_high", "sd_over_seeds", "test_loss_median")]
        assert found == pytest.approx([np.mean(x), low, high, stats.tstd(x), np.median(x)], rel=1e-9)
        assert (row["learning_rate"], row["runs"], row["diverged"], row["tokens"]) == (0.002, 5, 0, 12_800)
    assert f"{np.mean(BASE):.4f} [" in tables.losses(a).rows[0][2]


def test_comparisons_agree_with_scipy(tmp_path):
    a = analyze(write(tmp_path / "s", *sweep()))
    tests = [stats.ttest_rel(LOSSES[name], BASE) for name in ("gated", "wide")]
    for c, t in zip(a.comparisons, tests, strict=True):
        ci, mean = t.confidence_interval(0.95), np.mean(LOSSES[c.variant]) - np.mean(BASE)
        assert c.difference[:5] == pytest.approx((mean, *ci, t.pvalue, 5), rel=1e-6)
    gated, wide = a.comparisons
    assert gated.p_adjusted == pytest.approx(2 * tests[0].pvalue, rel=1e-6)  # Holm: the smaller p-value is doubled
    assert wide.p_adjusted == pytest.approx(tests[1].pvalue, rel=1e-6)


def test_pairs_are_of_the_same_seed_in_any_order(tmp_path):
    record, runs = sweep()
    one = analyze(write(tmp_path / "a", record, runs))
    shuffled = [runs[i] for i in np.random.default_rng(0).permutation(len(runs))]
    other = analyze(write(tmp_path / "b", record, shuffled, per_file=7))
    assert other.comparisons == one.comparisons
    assert tables.variant_rows(other) == tables.variant_rows(one)


def test_sampling_errors_by_hand(tmp_path):
    # Residuals of the blocks' sums (5, -8, 3) over 250 tokens; of the differences gated - plain: (-1, 2, -1).
    a = analyze(write(tmp_path / "s", *sweep()))
    assert a.variants["plain"].sampling_error == pytest.approx(math.sqrt(3 / 2 * (25 + 64 + 9)) / 250)
    assert a.comparisons[0].sampling_error == pytest.approx(math.sqrt(3 / 2 * (1 + 4 + 1)) / 250)


def test_sampling_error_of_different_texts_is_not_paired(tmp_path):
    record, runs = sweep()
    for r in runs:
        if r["variant"] == "gated":
            r["test_counts"], r["test_sums"] = [125, 125], [r["test_loss"] * 125 + 1, r["test_loss"] * 125 - 1]
    a = analyze(write(tmp_path / "s", record, runs))
    errors = [a.variants[name].sampling_error for name in ("gated", "plain")]
    assert a.comparisons[0].sampling_error == pytest.approx(math.sqrt(errors[0] ** 2 + errors[1] ** 2))


def test_loss_at_equal_cost_by_hand(tmp_path):
    # plain is the cheapest: 100 steps. gated costs 5/4 of it, so 80 steps: 0.6 of the way from step 50 (+0.6) to
    # step 100 (+0.1), which is +0.3. wide costs three times as many FLOPs, and has no validation before step 33.3.
    rows = tables.variant_rows(analyze(write(tmp_path / "s", *sweep())))
    plain, gated, wide = ({k: row[f"loss_at_equal_{k}"] for k in ("flops", "time")} for row in rows)
    means = {name: np.mean(losses) for name, losses in LOSSES.items()}
    assert plain == pytest.approx({"flops": means["plain"] + 0.1, "time": means["plain"] + 0.1})
    assert gated == pytest.approx({"flops": means["gated"] + 0.3, "time": means["gated"] + 0.3})
    assert wide == {"flops": None, "time": pytest.approx(means["wide"] + 0.1)}


def test_equal_cost_is_among_connected_variants(tmp_path):
    """If wide is not compared, its cost does not affect the others, and theirs does not affect it."""
    record, runs = sweep()
    before = tables.variant_rows(analyze(write(tmp_path / "all", record, runs)))
    rows = tables.variant_rows(analyze(write(tmp_path / "s", record | {"comparisons": [["gated", "plain"]]}, runs)))
    costs = ("loss_at_equal_flops", "loss_at_equal_time")
    assert [[row[k] for k in costs] for row in rows[:2]] == [[row[k] for k in costs] for row in before[:2]]
    assert [rows[2][k] for k in costs] == pytest.approx([np.mean(LOSSES["wide"]) + 0.1] * 2)


def test_speedup_of_training_several_runs_at_once(tmp_path):
    a = analyze(write(tmp_path / "s", *sweep()))
    assert tables.speedup(a) == "4 runs of plain at once: 2.00 times the tokens/s of one at a time"


@pytest.mark.parametrize("speed", [997.3, 1013.7, 1e5 / 3])
def test_one_validation_at_the_end_is_enough_for_the_cheapest(tmp_path, speed):
    record, runs = sweep()
    for r in runs:
        r["validation"] = r["validation"][1:]
    workdir = write(tmp_path / "s", record, runs)
    (workdir / "speeds.json").write_text(speeds_json(speed, speed * 0.9, speed * 0.5))
    found = [row["loss_at_equal_time"] for row in tables.variant_rows(analyze(workdir))]
    assert found == [pytest.approx(np.mean(BASE) + 0.1), None, None]


def test_answer_for_a_significant_difference(tmp_path):
    a, t = analyze(write(tmp_path / "s", *sweep())), stats.ttest_rel(LOSSES["gated"], BASE)
    low, high = t.confidence_interval(0.95)
    assert a.is_full
    assert a.comparisons[0].answer == (
        f"gated ends 0.1040 nats per token lower than plain (n = 5 paired seeds, 95 % CI {low:+.4f} to {high:+.4f}, "
        f"p = {2 * t.pvalue:.2g} after Holm's correction; at the estimated optima 0.1040 lower, 95 % CI "
        f"{low:+.4f} to {high:+.4f}, p = {2 * t.pvalue:.2g})."
    )


def test_answer_without_a_significant_difference(tmp_path):
    wide = analyze(write(tmp_path / "s", *sweep())).comparisons[1]
    assert wide.answer.startswith("No significant difference between wide and plain (n = 5 paired seeds, 95 % CI -0.0")
    # For two comparisons: the non-central t with 4 degrees of freedom and shift 4.584 exceeds t_4(0.9875) = 3.4954 with
    # probability 0.8.
    assert stats.nct.sf(3.4954, 4, 4.584) == pytest.approx(0.8, abs=1e-4)
    spread = np.std(np.subtract(LOSSES["wide"], BASE), ddof=1)
    assert wide.difference.detectable == pytest.approx(spread * 4.584 / math.sqrt(5), rel=1e-3)
    assert f"smallest detectable difference {wide.difference.detectable:.4f})" in wide.answer


def test_a_diverged_run_is_counted(tmp_path):
    record, runs = sweep()
    diverge(select(runs, "final", "gated")[3])
    a = analyze(write(tmp_path / "s", record, runs))
    gated = a.variants["gated"]
    losses = LOSSES["gated"]
    median = sorted([*losses[:3], losses[4], math.inf])[2]
    assert (gated.n_diverged, gated.loss, gated.median) == (1, None, median)
    assert "gated: 1 of 5 runs at learning rate 0.002 diverged" in a.warnings
    row = tables.losses(a).rows[1]
    assert row[2:4] == [f"median {median:.4f}", "runs diverged"]
    assert row[-2:] == ["1 of 5", "0 of 5"]
    assert [table(a).rows[1][-1] for table in (tables.costs, tables.speeds)] == ["runs diverged"] * 2
    assert tables.comparisons(a).rows[0][1:] == ["runs diverged"] * 5
    assert a.comparisons[0].answer == (
        "gated against plain: no mean difference, because runs diverged "
        f"(1 of 5 and 0 of 5; medians {median:.4f} and {np.median(BASE):.4f})."
    )
    assert a.comparisons[1].difference == analyze(write(tmp_path / "whole", *sweep())).comparisons[1].difference


def test_a_rate_that_diverges_is_not_chosen(tmp_path):
    record, runs = sweep()
    diverge(select(runs, "tuning", "plain")[1])
    found = analyze(write(tmp_path / "s", record, runs)).variants
    assert found["plain"].rate == 0.001
    assert found["gated"].rate == 0.002


@pytest.mark.parametrize("best", GRID)
def test_warning_for_a_rate_at_the_edge_of_its_grid(tmp_path, best):
    a = analyze(write(tmp_path / "s", *sweep(best=best)))
    expected = [
        f"{name}: the best learning rate, {best:g}, is at the edge of its grid; a better one may exist"
        for name in LOSSES
    ]
    assert a.warnings == ([] if best == 0.002 else expected)
    assert ("(edge)" in tables.losses(a).rows[0][1]) == (best != 0.002) == at_edge(GRID, best)


def test_one_rate_has_no_edge(tmp_path):
    assert analyze(write(tmp_path / "s", *sweep(grid=[0.002]))).warnings == []


@pytest.mark.parametrize("relative", [0.0, 3e-7, 3e-6])
def test_warning_for_variants_that_are_identical_up_to_rounding(tmp_path, relative):
    """A cap of 1e9 changes losses in the seventh digit: 3e-7 of a loss is rounding, 3e-6 is not."""
    a = analyze(write(tmp_path / "s", *sweep(LOSSES | {"wide": [loss * (1 + relative) for loss in BASE]})))
    same = "'plain' and 'wide' have identical losses for all seeds, up to rounding: check that the change has an effect"
    assert a.warnings == ([same] if relative < 1e-6 else [])
    if not relative:
        assert (a.comparisons[1].difference.mean, a.comparisons[1].p_adjusted) == (0, 1)
        assert a.comparisons[1].answer == "wide and plain end at the same loss for every seed."


@pytest.mark.parametrize("phase", ["tuning", "final"])
def test_identical_variants_are_found_after_either_phase(tmp_path, phase):
    _, runs = sweep(LOSSES | {"wide": BASE})
    results = Results(write(tmp_path / "s", {}, [r for r in runs if r["phase"] == phase]))
    pairs = [("plain", "wide")] if phase == "final" else list(itertools.combinations(LOSSES, 2))  # tuned alike
    warnings = identical_variants(results, list(LOSSES), phase)
    assert [warning.partition(" have ")[0] for warning in warnings] == [f"{a!r} and {b!r}" for a, b in pairs]


def test_pairs_of_runs_from_different_machines_are_reported(tmp_path):
    """Two seeds of gated ran on another processor; one run of wide names no machine, as in older versions."""
    record, runs = sweep()
    here = {"host": "one", "processor": "a 2 GHz processor", "device": "cpu", "git": None}
    for r in runs:
        r["provenance"] = dict(here)
    select(runs, "final", "wide")[0].pop("provenance")
    assert analyze(write(tmp_path / "one", record, runs)).warnings == []
    for r in (select(runs, "final", "gated")[0], select(runs, "final", "gated", 0.004)[3]):
        r["provenance"] = here | {"host": "two", "processor": "a 3 GHz processor"}
    (warning,) = analyze(write(tmp_path / "two", record, runs)).warnings
    assert warning.startswith(
        "gated and plain: the runs of 2 of 5 seeds were trained on different machines "
        "(cpu, a 2 GHz processor; cpu, a 3 GHz processor), which may change losses"
    )
    for r in runs:
        r["provenance"] = here | {"host": r["variant"]}  # machines of one kind
    assert analyze(write(tmp_path / "alike", record, runs)).warnings == []


def test_a_tiny_difference_is_shown_with_one_digit(tmp_path):
    tiny = [b + d for b, d in zip(BASE, [3e-8, 2e-8, 4e-8, 3e-8, 3e-8], strict=True)]
    a = analyze(write(tmp_path / "sweep", *sweep(LOSSES | {"wide": tiny})))
    assert "wide ends 3e-08 nats per token higher than plain" in a.comparisons[1].answer
    assert [difference(x) for x in (0.0, 4e-5, -6e-5, 0.25)] == ["+0.0000", "+4e-05", "-0.0001", "+0.2500"]


def test_table_of_validation_losses_shows_some_of_many_steps(tmp_path, monkeypatch):
    """Means over seeds; a dash where a variant was not evaluated or a run diverged."""
    record, runs = sweep()
    diverge(select(runs, "final", "gated")[3])
    for r in runs:
        if r["variant"] == "wide":
            r["validation"] = [[step, 0.001 * step] for step in range(10, 101, 10)]
    a = analyze(write(tmp_path / "sweep", record, runs))
    monkeypatch.setattr(tables, "MAX_STEPS", 5)
    ends = {name: f"{np.mean(losses) + 0.1:.4f}" for name, losses in LOSSES.items()}
    shown = tables.curves(a)
    assert shown.header == ["variant", "step 20", "step 40", "step 60", "step 80", "step 100"]
    assert "–: not evaluated at this step, or a run had diverged" in shown.notes["variant"]
    assert shown.rows == [
        ["plain", "–", "–", "–", "–", ends["plain"]],
        ["gated", "–", "–", "–", "–", "–"],
        ["wide", "0.0200", "0.0400", "0.0600", "0.0800", "0.1000"],
    ]


def test_a_variant_that_trains_nothing_costs_nothing_and_sets_no_budget(tmp_path):
    whole = tables.variant_rows(analyze(write(tmp_path / "whole", *sweep())))
    record, runs = sweep()
    record["variants"]["wide"]["config"] |= {"train": {"steps": 0, "batch_size": 8, "seq_len": 16}}
    rows = tables.variant_rows(analyze(write(tmp_path / "s", record, runs)))
    assert [row["loss_at_equal_flops"] for row in rows] == [*(r["loss_at_equal_flops"] for r in whole[:2]), None]
    lines = tables.reproduction(analyze(tmp_path / "s"))
    assert "42 runs of 100 steps of 8 x 16 tokens, 12,800 tokens each" in lines
    assert "21 runs of 0 steps of 8 x 16 tokens, 0 tokens each" in lines


def test_a_run_near_the_unigram_baseline_is_stuck(tmp_path):
    """The unigram baseline is 2.75 on this test split: 2.70 is above 0.95 of it, 2.60 is not."""
    losses = LOSSES | {"wide": [2.70, 2.60, 2.01, 2.02, 2.03]}
    a = analyze(write(tmp_path / "s", *sweep(losses)))
    assert {name: v.n_stuck for name, v in a.variants.items()} == {"plain": 0, "gated": 0, "wide": 1}
    assert tables.losses(a).rows[2][-2:] == ["0 of 5", "1 of 5"]
    assert any(notice.startswith("wide: 1 of 5 runs at learning rate 0.002 got stuck") for notice in a.warnings)
    median = np.median(losses["wide"])
    assert f"1 of 5 and 0 of 5 runs got stuck, medians {median:.4f} and 2.0000)" in a.comparisons[1].answer
    curves = {line.get_label(): line.get_ydata() for line in figures.learning_curves(a).axes[0].lines}
    assert curves["wide (median)"][-1] == pytest.approx(median + 0.1)


def test_answer_when_only_the_uncorrected_interval_excludes_0(tmp_path):
    differences = [0.020, 0.001, 0.012, 0.015, 0.003]  # p is 0.046 for one comparison, and twice that for two
    losses = LOSSES | {"gated": [b + 0.001 * (-1) ** i for i, b in enumerate(BASE)]}
    losses["wide"] = [b + d for b, d in zip(BASE, differences, strict=True)]
    wide = analyze(write(tmp_path / "s", *sweep(losses))).comparisons[1]
    assert wide.difference.low > 0
    assert wide.difference.p < 0.05 < wide.p_adjusted
    assert wide.answer.startswith("No significant difference")
    assert wide.answer.endswith("; this interval alone excludes 0, which is not enough among 2 comparisons).")


def test_the_losses_at_each_rate(tmp_path):
    record, runs = sweep()
    for lost in (select(runs, "tuning", "plain", 0.004)[1], *select(runs, "tuning", "gated", 0.001)):
        diverge(lost)
    rows = tables.rates(analyze(write(tmp_path / "s", record, runs))).rows
    assert [row[0] for row in rows] == list(LOSSES)
    assert rows[0][1] == "0.001: 2.3000, 0.002: 2.1000 (best), 0.004: 2.3000 (1 diverged)"
    assert rows[1][1] == "0.001: 2 diverged, 0.002: 2.1000 (best), 0.004: 2.3000"
    assert tables.rates(analyze(write(tmp_path / "one", *sweep(grid=[0.002])))) is None


def test_if_every_rate_diverges_the_one_with_the_fewest_is_chosen(tmp_path):
    record, runs = sweep()
    for rate, lost in ((0.001, [0, 1]), (0.002, [0, 1]), (0.004, [1])):
        for i in lost:
            diverge(select(runs, "tuning", "plain", rate)[i])
    runs += [run("final", "plain", rate, seed, 2.0) for rate in (0.002, 0.004) for seed in range(5)]
    plain = analyze(write(tmp_path / "s", record, runs)).variants["plain"]
    assert (plain.rate, plain.at_edge) == (0.004, True)


def test_a_stuck_tuning_run_counts_like_a_diverged_one(tmp_path):
    record, runs = sweep()
    for rate, losses in ((0.001, (2.45, 2.46)), (0.002, (2.0, 2.2)), (0.004, (4.0, 2.1))):
        for r, loss in zip(select(runs, "tuning", "plain", rate), losses, strict=True):
            r["val_loss"] = loss  # the unigram baseline is 2.5: 2.45 and 4.0 have learned nothing
    diverge(select(runs, "tuning", "plain", 0.002)[0])
    runs += [run("final", "plain", rate, seed, 2.0) for rate in (0.002, 0.004) for seed in range(5)]
    a = analyze(write(tmp_path / "s", record, runs))
    assert a.variants["plain"].rate == 0.004  # one seed learned as at 0.002, where the other one diverged
    assert (
        tables.rates(a).rows[0][1]
        == "0.001: 2.4550 (2 stuck), 0.002: 2.2000 (1 diverged), 0.004: 2.1000 (1 stuck) (best)"
    )


@pytest.mark.parametrize("steps", [100, 50])
def test_comparisons_of_different_numbers_of_tokens_are_marked(tmp_path, steps):
    record, runs = sweep()
    record["variants"]["gated"]["config"] |= {"train": {"steps": steps, "batch_size": 8, "seq_len": 16}}
    a = analyze(write(tmp_path / "s", record, runs))
    gated, wide = a.comparisons
    differ = steps != 100
    assert (gated.same_tokens, wide.same_tokens) == (not differ, True)
    assert ("The two trained on different numbers of tokens: 6,400 and 12,800." in gated.answer) == differ
    assert ("different numbers of tokens" in tables.comparisons(a).rows[0][0]) == differ
    assert "different numbers" not in wide.answer + tables.comparisons(a).rows[1][0]
    assert ("tokens per run" in tables.costs(a).header) == differ
