"""The answers of a sweep with sizes: one claim per pair of variants, its table, its figure and the report."""

import dataclasses
import math
import re

import numpy as np
import pytest
import synthetic_sizes
from synthetic_sizes import SIZES, STEPS
from synthetic_sweep import diverge

from lm import report as command
from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.claims import claim_rows
from lm.sweeps.analysis.multipliers import factor, percent_saved
from lm.sweeps.report import figures, pages
from lm.sweeps.report.savings_figure import savings_figure
from lm.sweeps.report.savings_table import savings_table
from lm.sweeps.statistics.scaling import Estimate


def analyzed(tmp_path, multiplier, **changes):
    return analyze(synthetic_sizes.write(tmp_path / "sweep", *synthetic_sizes.sweep(multiplier, **changes)))


def test_a_saving_is_one_claim_for_all_sizes(tmp_path):
    """1.25 times the compute for the same loss: 20 % are saved."""
    a = analyzed(tmp_path, 1.25)
    assert len(a.comparisons) == 4
    [answer] = a.answers
    found = re.match(
        r"gated saves (\d+) % \[(\d+), (\d+)\] of the training compute that plain needs for the same loss "
        r"\(mean over 4 sizes, 5 seeds each, 95 % CI, p = .* after Holm's correction; at the best rates of the grids "
        r".*\)\. No significant trend with size.*\. At these sizes \(1,000 to 4,000 parameters, 13 to 26 tokens per "
        r"parameter\), on this text \(text\), at fixed .*: only the learning rate was tuned, over 3 values\.$",
        answer,
    )
    value, low, high = map(int, found.groups())
    assert low <= 20 <= high
    assert abs(value - 20) <= 2
    assert a.savings[0].p_adjusted == a.savings[0].at_best.pooled.p  # one pair: nothing to correct


def test_the_placebo_is_a_comparison_at_one_size_and_no_saving(tmp_path):
    record, runs = synthetic_sizes.sweep(1.25)
    copy = dict(record["variants"]["plain, 32"], changes={"model.rope_pairing": "adjacent"})
    shift = dict(zip(range(5), [0.003, -0.002, 0.001, -0.004, 0.002], strict=True))
    runs += [
        run | {"variant": "placebo, 32", "test_loss": run["test_loss"] + shift.get(run["seed"], 0)}
        for run in runs
        if run["variant"] == "plain, 32"
    ]
    record |= {"variants": record["variants"] | {"placebo, 32": copy}, "placebo": "placebo, 32"}
    a, without = analyze(synthetic_sizes.write(tmp_path / "sweep", record, runs)), analyzed(tmp_path / "without", 1.25)
    assert a.answers[0] == without.answers[0]
    assert (a.placebo.variant, a.placebo.against) == ("placebo, 32", "plain, 32")
    assert a.placebo.difference.mean == pytest.approx(0.0)
    assert a.answers[1].endswith("not significant, as it should be.")
    assert [(row["kind"], row["variant"]) for row in claim_rows(a)] == [
        ("log compute multiplier", "gated"),
        ("placebo", "placebo, 32"),
    ]
    assert command.main([str(tmp_path / "sweep")]) == 0


def test_more_compute_and_a_trend_are_stated(tmp_path):
    multiplier = dict(zip(SIZES, [0.95, 0.88, 0.82, 0.72], strict=True))
    [answer] = analyzed(tmp_path, multiplier, noise=0.001).answers
    assert re.match(r"gated needs \d+ % \[\d+, \d+\] more training compute than plain for the same loss", answer)
    assert "The multiplier shrinks with size" in answer


def test_equal_variants_do_not_differ_significantly(tmp_path):
    a = analyzed(tmp_path, 1.0)
    assert a.answers[0].startswith("No significant difference in training compute between gated and plain: gated saves")
    assert a.answers[0].count("At these sizes") == 1
    assert not a.savings[0].is_significant


def test_a_claim_needs_both_estimates(tmp_path):
    """At another rate "plain" is better still, so that its estimated optimum is below that of "gated"."""
    record, runs = synthetic_sizes.sweep(1.25, noise=0.001)
    for r in runs:
        if r["phase"] == "final" and r["variant"].startswith("plain") and r["learning_rate"] == 0.001:
            r["test_loss"] -= 0.25
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    s = a.savings[0]
    assert max(s.p_adjusted, s.p_at_optimum) < 0.05
    assert s.at_best.pooled.value > 0 > s.at_optimum.pooled.value
    assert a.answers[0].startswith("No significant difference in training compute")


def test_variances_are_moderated_by_variants_of_the_same_size_only(tmp_path):
    """There are two variants of each size, which give no prior; all 8 variants would."""
    a = analyzed(tmp_path, 1.0)
    assert {c.difference.df for c in a.comparisons} == {4}


def test_pairs_are_corrected_for_their_number(tmp_path):
    record, runs = synthetic_sizes.sweep(1.05)
    record["comparisons"] += [[f"plain, {size}", f"gated, {size}"] for size in SIZES]
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    assert [(s.variant, s.against) for s in a.savings] == [("gated", "plain"), ("plain", "gated")]
    assert [s.p_adjusted for s in a.savings] == pytest.approx([2 * s.at_best.pooled.p for s in a.savings])
    assert len(savings_table(a).rows) == 2 * (len(SIZES) + 2)
    assert len(savings_figure(a).axes) == 4


def test_without_variation_over_seeds_there_is_no_p_value(tmp_path):
    a = analyzed(tmp_path, 1.25, noise=0.0)
    assert not a.savings[0].is_significant
    assert re.match(
        r"gated saves 20 % \[20, 20\] of the training compute that plain needs for the same loss: without variation "
        r"over seeds there is no p-value\. At these sizes",
        a.answers[0],
    )
    row = next(row for row in savings_table(a).rows if row[1] == "mean over sizes")
    assert row[-2:] == ["undefined", "20 % [20, 20], undefined"]
    assert "nan" not in pages.to_markdown(a, "")


def test_without_optima_the_best_rates_are_shown_and_nothing_is_claimed(tmp_path):
    """The best rate is at the edge of the grid: its distance from the optimum may explain any saving."""
    a = analyzed(tmp_path, 1.25, noise=0.001, best=0.004)
    s = a.savings[0]
    assert s.at_optimum is None
    assert s.estimate is s.at_best
    assert s.p_adjusted < 0.001
    assert not s.is_significant
    reason = "the best learning rate is at the edge of its grid, or the only one"
    names = " and ".join(f"{name}, {size}" for size in SIZES for name in ("gated", "plain"))
    assert a.answers[0].startswith(
        "No claim about the training compute of gated and plain, because there is no estimate at the optimum "
        f"({names}: {reason}): at the best rates gated saves 2"
    )
    table = savings_table(a)
    assert {row[-1] for row in table.rows} == {"no estimate"}
    assert table.notes["at the optimum [95 % CI], p"].endswith(f"No estimate, and so no claim: {s.without_optimum}.")
    [row] = claim_rows(a)
    assert (row["answer"], row["significant"]) == ("undecided", "no")


def test_losses_at_the_optima_that_do_not_fall_with_the_compute_give_no_claim(tmp_path):
    """At the smallest size the optimum lies 0.38 below the best rate, and so below the next size."""
    record, runs = synthetic_sizes.sweep(1.25, noise=0.001)
    for variant in record["variants"].values():
        variant["data"]["unigram"]["test"] = 9.0
    for r in runs:
        if r["phase"] == "final" and r["variant"].endswith(", 32"):
            r["test_loss"] += {0.001: -0.58, 0.002: 0.0, 0.004: 1.0}[r["learning_rate"]]
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    s = a.savings[0]
    assert not any(v.optimum.missing for v in a.variants.values())
    assert s.p_adjusted < 0.001
    assert not s.is_significant
    assert "no estimate at the optimum (the losses at the optima do not fall with the compute" in a.answers[0]


def test_where_nothing_was_tuned_the_given_rates_are_compared(tmp_path):
    s = analyzed(tmp_path, 1.25, noise=0.001, grid=[0.002]).savings[0]
    assert s.at_optimum is None
    assert s.is_significant


def test_losses_that_are_equal_but_for_rounding_give_no_multiplier(tmp_path):
    record, runs = synthetic_sizes.sweep(1.0)
    plain = {(r["phase"], r["variant"], r["learning_rate"], r["seed"]): r["test_loss"] for r in runs}
    for i, r in enumerate(runs):
        if r["variant"].startswith("gated"):
            same = plain[r["phase"], r["variant"].replace("gated", "plain"), r["learning_rate"], r["seed"]]
            r["test_loss"] = same - 1e-7 - 1e-9 * (i % 7)
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    reason = "their losses are equal but for rounding"
    assert a.answers == [f"gated against plain: no compute multiplier, because {reason}."]


@pytest.mark.parametrize("how", ["diverged", "stuck"])
def test_runs_that_diverged_or_got_stuck_give_no_multiplier(tmp_path, how):
    record, runs = synthetic_sizes.sweep(1.25)
    lost = next(r for r in runs if (r["phase"], r["variant"], r["learning_rate"]) == ("final", "gated, 48", 0.002))
    diverge(lost) if how == "diverged" else lost.update(test_loss=2.7)
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    reason = "runs of gated, 48 diverged or got stuck"
    assert a.answers == [f"gated against plain: no compute multiplier, because {reason}."]
    assert savings_table(a).rows == [["gated − plain", "all", "–", reason, "–", "–"]]
    assert "savings" not in pages.captions(a)
    assert "![savings]" not in pages.to_markdown(a, "")


def test_a_loss_that_rises_with_the_compute_gives_no_multiplier(tmp_path):
    record, runs = synthetic_sizes.sweep(dict(zip(SIZES, [70, 14, 4.4, 1], strict=True)))
    for r in runs:
        r["test_loss"] = r["test_loss"] and 4 - r["test_loss"]
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    assert "the loss does not fall with the compute at every size" in a.answers[0]


def test_a_quick_budget_makes_no_claim(tmp_path):
    answer = "No conclusion about gated and plain: budget quick only checks that the sweep runs."
    assert analyzed(tmp_path, 1.25, budget="quick").answers == [answer]


def test_the_report_has_one_table_and_one_figure_more(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figures, "figures", lambda a: dict.fromkeys(pages.CAPTIONS))
    monkeypatch.setattr(figures, "to_bytes", lambda figure, kind: b"" if figure is None else b"drawn")
    workdir = synthetic_sizes.write(tmp_path / "s", *synthetic_sizes.sweep(1.25))
    assert command.main([str(workdir), "--publish", str(tmp_path / "docs")]) == 0
    page = (tmp_path / "docs" / "gates.md").read_text()
    answer = analyze(workdir).answers[0]
    assert f"**Answer.** {answer}\n" in page
    assert capsys.readouterr().out.startswith(answer)
    assert "gated, 32 ends" not in page  # the claim is about all sizes
    assert "![savings](gates/savings.png)" in page
    assert (tmp_path / "docs" / "gates" / "savings.png").read_bytes() == b"drawn"
    assert "Validation loss during training\n" not in page
    html = (workdir / "report.html").read_text()
    assert "Training compute saved" in html
    assert 'alt="savings"' in html
    row = next(line for line in page.splitlines() if line.startswith("| gated − plain | 64 |"))
    assert "1.6e+12" in row


def test_the_figure_shows_the_losses_and_the_savings(tmp_path):
    a = analyzed(tmp_path, 1.25)
    losses, saved = savings_figure(a).axes
    points = [line for line in losses.lines if line.get_linestyle() == "None"]
    assert [len(line.get_xdata()) for line in points] == [len(STEPS)] * 2
    np.testing.assert_allclose(points[1].get_ydata(), a.savings[0].loss_S2[:, 1])
    assert losses.get_xscale() == saved.get_xscale() == "log"
    assert [text.get_text() for text in saved.texts] == SIZES


def test_a_wide_interval_does_not_squeeze_the_figure(tmp_path):
    """At one size the seeds differ so much that the interval reaches from less than 1/10 to more than 10."""
    record, runs = synthetic_sizes.sweep(1.25, noise=0.001)
    spread = dict(enumerate([-0.3, 0.3, -0.3, 0.3, 0.0]))
    for r in runs:
        if r["phase"] == "final" and r["variant"] == "gated, 96":
            r["test_loss"] += spread[r["seed"]]
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    wide = a.savings[0].estimate.at_sizes[3]
    assert wide.high - wide.low > 2 * np.log(10)
    saved = savings_figure(a).axes[1]
    low, high = saved.get_ylim()
    assert 0.4 < low < 1 < high < 2.5
    assert sorted(line.get_marker() for line in saved.lines if line.get_marker() in "v^") == ["^", "v"]


def test_a_flat_loss_does_not_end_the_report(tmp_path):
    """Where the loss hardly falls with the compute, ln m is in the hundreds, and exp(ln m) overflows."""
    huge = Estimate(750.0, -800.0, 2000.0, 0.3)
    a = analyzed(tmp_path, 1.25)
    found = a.savings[0].at_optimum._replace(at_sizes=[huge] * 4, pooled=huge, trend=huge)
    a = dataclasses.replace(a, savings=[dataclasses.replace(a.savings[0], at_best=found, at_optimum=found)])
    assert "saves 100 % [-1e+306, 100] of" in a.answers[0]
    assert percent_saved(huge) in pages.to_markdown(a, "")
    assert factor(huge) == "1e+304 [0.00, 1e+304]"
    low, high = savings_figure(a).axes[1].get_ylim()
    assert 0 < low < 1 < high < math.inf


def test_an_extrapolated_rate_is_marked(tmp_path):
    """The largest size has no tuning runs: the tables do without them, and the figure draws fresh seeds."""
    record, runs = synthetic_sizes.sweep(1.25)
    for name in ("gated", "plain"):
        record["variants"][f"{name}, 96"]["rate_from"] = f"{name}, 64"
    runs = [r for r in runs if r["phase"] == "final" or not r["variant"].endswith("96")]
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    page = pages.to_markdown(a, "")
    assert "| gated, 96 | 0.002 (extrapolated) |" in page
    assert "learning rates 0.001, 0.002, 0.004 around the best of gated, 64" in page
    assert "| gated, 64 | 0.001: 2.3000, 0.002: 2.1000 (best), 0.004: 2.3000 |" in page
    assert "| gated, 96 | 0.001: " not in page
    assert a.answers[0].endswith("only the learning rate was tuned, over 3 values, and extrapolated to 96.")
    lines = {line.get_label(): line.get_ydata() for line in figures.learning_rates(a).axes[0].lines}
    fresh = [r["val_loss"] for r in runs if r["variant"] == "gated, 96" and r["learning_rate"] == 0.002]
    assert lines["gated, 96"][1] == pytest.approx(np.mean(fresh))
    assert lines["gated, 64"] == pytest.approx([2.3, 2.1, 2.3])


def test_the_line_of_fresh_seeds_has_a_gap_where_one_of_them_diverged(tmp_path):
    record, runs = synthetic_sizes.sweep(1.25)
    record["variants"]["gated, 96"]["rate_from"] = "gated, 64"
    runs = [r for r in runs if r["phase"] == "final" or r["variant"] != "gated, 96"]
    diverge(next(r for r in runs if (r["variant"], r["learning_rate"]) == ("gated, 96", 0.004)))
    axes = figures.learning_rates(analyze(synthetic_sizes.write(tmp_path / "s", record, runs))).axes[0]
    [line] = [line for line in axes.lines if line.get_label() == "gated, 96"]
    assert np.isnan(line.get_ydata()).tolist() == [False, False, True]
