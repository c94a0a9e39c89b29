"""The analysis of a small synthetic sweep: numbers checked with scipy and by hand, answers, warnings and tables."""

import math

import numpy as np
import pytest
import synthetic_sizes
from scipy import stats
from synthetic_sweep import BASE, COUNTS, GRID, LOSSES, diverge, moderated, run, select, sweep, write

from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.report import cost_tables, figures, rate_tables, tables
from lm.sweeps.statistics import inference
from lm.sweeps.storage.results import Results, at_edge
from lm.sweeps.storage.run_checks import identical_variants


def test_variants_agree_with_scipy(tmp_path):
    a = analyze(write(tmp_path / "s", *sweep()))
    for name, row in zip(LOSSES, tables.variant_rows(a), strict=True):
        x = LOSSES[name]
        low, high = stats.t.interval(0.95, 4, np.mean(x), stats.sem(x))
        found = [row[k] for k in ("test_loss", "test_loss_low", "test_loss_high", "sd_over_seeds", "test_loss_median")]
        assert found == pytest.approx([np.mean(x), low, high, stats.tstd(x), np.median(x)], rel=1e-9)
        assert (row["learning_rate"], row["runs"], row["diverged"], row["tokens"]) == (0.002, 5, 0, 12_800)
    assert f"{np.mean(BASE):.4f} [" in tables.losses(a).rows[0][2]


def test_a_comparison_of_two_variants_agrees_with_scipy(tmp_path):
    record, runs = sweep({name: LOSSES[name] for name in ("plain", "gated")})
    (c,) = analyze(write(tmp_path / "s", record | {"comparisons": [["gated", "plain"]]}, runs)).comparisons
    t, mean = stats.ttest_rel(LOSSES["gated"], BASE), np.mean(LOSSES["gated"]) - np.mean(BASE)
    assert c.difference[:5] == pytest.approx((mean, *t.confidence_interval(0.95), t.pvalue, 5), rel=1e-6)
    assert c.p_adjusted == pytest.approx(t.pvalue, rel=1e-6)
    assert c.p_at_optimum == pytest.approx(t.pvalue, rel=1e-6)
    unpaired = stats.tvar(LOSSES["gated"]) + stats.tvar(BASE)
    assert c.pairing == pytest.approx(stats.tvar(np.subtract(LOSSES["gated"], BASE)) / unpaired)


def test_comparisons_of_three_variants_use_the_moderated_variance(tmp_path):
    a = analyze(write(tmp_path / "s", *sweep()))
    for c in a.comparisons:
        mean, error, p, df = moderated(c.variant)
        half = stats.t.ppf(0.975, df) * error
        assert c.difference[:5] == pytest.approx((mean, mean - half, mean + half, p, 5), rel=1e-6)
    gated, wide = a.comparisons
    assert gated.p_adjusted == pytest.approx(2 * moderated("gated")[2], rel=1e-6)  # Holm: the smaller one is doubled
    assert wide.p_adjusted == pytest.approx(moderated("wide")[2], rel=1e-6)
    table = tables.comparisons(a)
    assert "8 degrees of freedom instead of 4" in table.notes["p"]


def test_variants_on_another_text_of_another_length_or_with_stuck_runs_do_not_change_the_variance(tmp_path):
    record, runs = sweep()
    record["variants"]["wide"]["data"] = record["variants"]["wide"]["data"] | {"fingerprint": "another"}
    a = analyze(write(tmp_path / "text", record, runs))
    assert [c.difference.df for c in a.comparisons] == [4, 4]
    record, runs = sweep()
    longer = record["variants"]["wide"]["config"]
    record["variants"]["wide"]["config"] = longer | {"train": longer["train"] | {"steps": 200}}
    a = analyze(write(tmp_path / "longer", record, runs))
    assert [c.difference.df for c in a.comparisons] == [4, 4]
    a = analyze(write(tmp_path / "stuck", *sweep(LOSSES | {"wide": [2.70, *LOSSES["wide"][1:]]})))
    assert [c.difference.df for c in a.comparisons] == [4, 4]


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


def test_interval_over_seeds_and_text_is_that_of_the_differences_of_all_runs(tmp_path):
    a = analyze(write(tmp_path / "s", *sweep()))
    found, d = a.comparisons[0].over_text, a.comparisons[0].difference
    sums = [[r["test_sums"] for r in a.variants[name].runs] for name in ("gated", "plain")]
    assert found == inference.crossed_interval(np.subtract(*sums), COUNTS, d)
    # All seeds have the same residuals on the blocks, so the variance is that of the seeds plus that of the text.
    assert found.error == pytest.approx(math.hypot(d.error, a.comparisons[0].sampling_error))
    shown = tables.comparisons(a)
    assert shown.header[-1] == "over seeds and text [95 % CI]"
    assert shown.rows[0][-1] == tables.with_interval(found)


def test_an_interval_over_seeds_and_text_contains_the_one_over_seeds(tmp_path):
    """Also where moderation makes the variance over seeds larger than that of the comparison alone, as for gated."""
    close = [b + d for b, d in zip(BASE, [0.010, 0.011, 0.009, 0.010, 0.012], strict=True)]
    record, runs = sweep({"plain": BASE, "gated": close, "wide": LOSSES["wide"]})
    for r in runs:
        r["test_sums"] = [r["test_loss"] * n for n in COUNTS]  # no block is harder than another
    a = analyze(write(tmp_path / "s", record, runs))
    assert a.comparisons[0].difference.sd > 2 * np.std(np.subtract(close, BASE), ddof=1)
    for c in a.comparisons:
        assert c.over_text.low <= c.difference.low + 1e-12
        assert c.over_text.high >= c.difference.high - 1e-12


def test_bits_per_byte_of_the_mean_loss(tmp_path):
    """The synthetic test text has 4 bytes per token. Sweeps of older versions do not record it."""
    record, runs = sweep()
    diverge(select(runs, "final", "wide")[0])
    shown = tables.losses(analyze(write(tmp_path / "s", record, runs)))
    column = shown.header.index("bits per byte")
    bits = [f"{np.mean(LOSSES[name]) / math.log(2) / 4:.4f}" for name in ("plain", "gated")]
    assert [row[column] for row in shown.rows] == [*bits, "runs diverged"]
    del record["variants"]["plain"]["data"]["test_bytes_per_token"]
    shown = tables.losses(analyze(write(tmp_path / "old", record, runs)))
    assert [row[column] for row in shown.rows] == ["not known", bits[1], "runs diverged"]


def test_sampling_error_of_different_texts_is_not_paired(tmp_path):
    record, runs = sweep()
    for r in runs:
        if r["variant"] == "gated":
            r["test_counts"], r["test_sums"] = [125, 125], [r["test_loss"] * 125 + 1, r["test_loss"] * 125 - 1]
    a = analyze(write(tmp_path / "s", record, runs))
    errors = [a.variants[name].sampling_error for name in ("gated", "plain")]
    assert a.comparisons[0].sampling_error == pytest.approx(math.sqrt(errors[0] ** 2 + errors[1] ** 2))
    assert a.comparisons[0].over_text is None
    assert tables.comparisons(a).rows[0][-1] == "other tokens"


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
    assert tables.comparisons(a).rows[0][1:] == ["runs diverged"] * 8
    assert a.comparisons[0].answer.startswith(
        "gated against plain: no mean difference, because runs diverged "
        f"(1 of 5 and 0 of 5; medians {median:.4f} and {np.median(BASE):.4f})."
    )
    assert a.comparisons[1].difference == inference.paired_difference(LOSSES["wide"], BASE, 2)


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
        assert a.comparisons[1].answer.startswith("wide and plain end at the same loss for every seed. ")


@pytest.mark.parametrize("phase", ["tuning", "final"])
def test_identical_variants_are_found_after_either_phase(tmp_path, phase):
    _, runs = sweep(LOSSES | {"wide": BASE})
    results = Results(write(tmp_path / "s", {}, [r for r in runs if r["phase"] == phase]))
    names = "'plain' and 'wide'" if phase == "final" else "'plain', 'gated' and 'wide'"  # all are tuned alike
    (warning,) = identical_variants(results, list(LOSSES), phase)
    assert warning.startswith(f"{names} have identical losses")


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


def test_sizes_trained_on_different_machines_are_reported(tmp_path):
    """Each pair was trained on one machine, but the largest size on another one than the rest."""
    record, runs = synthetic_sizes.sweep(1.2)
    for r in runs:
        r["provenance"] = {"host": "one", "processor": "a 2 GHz processor", "device": "cpu", "git": None}
    assert analyze(synthetic_sizes.write(tmp_path / "one", record, runs)).warnings == []
    for r in runs:
        if r["variant"].endswith(", 96"):
            r["provenance"] = r["provenance"] | {"processor": "a 3 GHz processor"}
    (warning,) = analyze(synthetic_sizes.write(tmp_path / "two", record, runs)).warnings
    assert warning.startswith(
        "the runs were trained on different machines (cpu, a 2 GHz processor; cpu, a 3 GHz processor), which may change"
    )


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


def test_the_losses_at_each_rate(tmp_path):
    record, runs = sweep()
    for lost in (select(runs, "tuning", "plain", 0.004)[1], *select(runs, "tuning", "gated", 0.001)):
        diverge(lost)
    rows = rate_tables.rates(analyze(write(tmp_path / "s", record, runs))).rows
    assert [row[0] for row in rows] == list(LOSSES)
    assert rows[0][1] == "0.001: 2.3000, 0.002: 2.1000 (best), 0.004: 2.3000 (1 diverged)"
    assert rows[1][1] == "0.001: 2 diverged, 0.002: 2.1000 (best), 0.004: 2.3000"
    assert rate_tables.rates(analyze(write(tmp_path / "one", *sweep(grid=[0.002])))) is None


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
        rate_tables.rates(a).rows[0][1]
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
    assert ("tokens per run" in cost_tables.costs(a).header) == differ
