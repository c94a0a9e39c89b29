"""The report of a small synthetic sweep: its numbers against scipy and by hand, its sentences, and what it refuses."""

import base64
import csv
import dataclasses
import html.parser
import math
import re
import xml.etree.ElementTree

import numpy as np
import pytest
from scipy import stats
from synthetic_sweep import BASE, GRID, LOSSES, diverge, select, speeds_json, sweep, write

import lm.sweeps.figures
from lm import report
from lm.sweeps.analysis import analyse, difference
from lm.sweeps.results import at_edge


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(lm.sweeps.figures, "figures", lambda a: dict.fromkeys(report.CAPTIONS))
    monkeypatch.setattr(
        lm.sweeps.figures, "to_bytes", lambda figure, kind: b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    )


def test_variants_are_scipys(tmp_path):
    a = analyse(write(tmp_path / "s", *sweep()))
    for name, row in zip(LOSSES, report.variant_rows(a), strict=True):
        x = LOSSES[name]
        low, high = stats.t.interval(0.95, 4, np.mean(x), stats.sem(x))
        found = [row[k] for k in ("test_loss", "test_loss_low", "test_loss_high", "sd_over_seeds", "test_loss_median")]
        assert found == pytest.approx([np.mean(x), low, high, stats.tstd(x), np.median(x)], rel=1e-9)
        assert (row["learning_rate"], row["runs"], row["diverged"], row["tokens"]) == (0.002, 5, 0, 12_800)
    assert f"{np.mean(BASE):.4f} [" in report.variant_table(a)[1][4]


def test_comparisons_are_scipys(tmp_path):
    a = analyse(write(tmp_path / "s", *sweep()))
    tests = [stats.ttest_rel(LOSSES[name], BASE) for name in ("gated", "wide")]
    for c, t in zip(a.comparisons, tests, strict=True):
        ci, mean = t.confidence_interval(0.95), np.mean(LOSSES[c.variant]) - np.mean(BASE)
        assert c.difference[:5] == pytest.approx((mean, *ci, t.pvalue, 5), rel=1e-6)
    gated, wide = a.comparisons
    assert gated.p_adjusted == pytest.approx(2 * tests[0].pvalue, rel=1e-6)  # Holm: the smaller one doubles
    assert wide.p_adjusted == pytest.approx(tests[1].pvalue, rel=1e-6)


def test_pairs_are_of_the_same_seed_in_any_order(tmp_path):
    record, runs = sweep()
    one = analyse(write(tmp_path / "a", record, runs))
    shuffled = [runs[i] for i in np.random.default_rng(0).permutation(len(runs))]
    other = analyse(write(tmp_path / "b", record, shuffled, per_file=7))
    assert other.comparisons == one.comparisons
    assert report.variant_rows(other) == report.variant_rows(one)


def test_sampling_errors_by_hand(tmp_path):
    # Residuals of the blocks' sums (5, -8, 3) over 250 tokens; of the differences gated - plain: (-1, 2, -1).
    a = analyse(write(tmp_path / "s", *sweep()))
    assert a.variants["plain"].sampling_error == pytest.approx(math.sqrt(3 / 2 * (25 + 64 + 9)) / 250)
    assert a.comparisons[0].sampling_error == pytest.approx(math.sqrt(3 / 2 * (1 + 4 + 1)) / 250)


def test_another_text_is_not_paired(tmp_path):
    record, runs = sweep()
    for r in runs:
        if r["variant"] == "gated":
            r["test_counts"], r["test_sums"] = [125, 125], [r["test_loss"] * 125 + 1, r["test_loss"] * 125 - 1]
    a = analyse(write(tmp_path / "s", record, runs))
    errors = [a.variants[name].sampling_error for name in ("gated", "plain")]
    assert a.comparisons[0].sampling_error == pytest.approx(math.sqrt(errors[0] ** 2 + errors[1] ** 2))


def test_loss_at_equal_cost_by_hand(tmp_path):
    # plain is the cheapest: 100 steps. gated costs 5/4 of it, so 80 steps: 0.6 of the way from step 50 (+0.6) to
    # step 100 (+0.1), which is +0.3. wide costs three times as many FLOPs, and has no validation before step 33.3.
    rows = report.variant_rows(analyse(write(tmp_path / "s", *sweep())))
    plain, gated, wide = ({k: row[f"loss_at_equal_{k}"] for k in ("flops", "time")} for row in rows)
    means = {name: np.mean(losses) for name, losses in LOSSES.items()}
    assert plain == pytest.approx({"flops": means["plain"] + 0.1, "time": means["plain"] + 0.1})
    assert gated == pytest.approx({"flops": means["gated"] + 0.3, "time": means["gated"] + 0.3})
    assert wide == {"flops": None, "time": pytest.approx(means["wide"] + 0.1)}


@pytest.mark.parametrize("speed", [997.3, 1013.7, 1e5 / 3])
def test_one_validation_at_the_end_is_enough_for_the_cheapest(tmp_path, speed):
    record, runs = sweep()
    for r in runs:
        r["validation"] = r["validation"][1:]
    workdir = write(tmp_path / "s", record, runs)
    (workdir / "speeds.json").write_text(speeds_json(speed, speed * 0.9, speed * 0.5))
    found = [row["loss_at_equal_time"] for row in report.variant_rows(analyse(workdir))]
    assert found == [pytest.approx(np.mean(BASE) + 0.1), None, None]


def test_a_clear_difference_is_said(tmp_path):
    a, t = analyse(write(tmp_path / "s", *sweep())), stats.ttest_rel(LOSSES["gated"], BASE)
    low, high = t.confidence_interval(0.95)
    assert a.claims
    assert report.headline(a) == (
        f"gated ends 0.1040 nats per token lower than plain (n = 5 paired seeds, 95 % CI {low:+.4f} to {high:+.4f}, "
        f"p = {2 * t.pvalue:.2g} after Holm's correction)."
    )


def test_a_difference_that_was_not_found_is_said(tmp_path):
    wide = analyse(write(tmp_path / "s", *sweep())).comparisons[1]
    assert wide.answer.startswith("No difference found between wide and plain at n = 5 (95 % CI -0.0")
    # One of two comparisons: the non-central t of 4 degrees of freedom and shift 4.584 is beyond t_4(0.9875) = 3.4954
    # with a probability of 0.8.
    assert stats.nct.sf(3.4954, 4, 4.584) == pytest.approx(0.8, abs=1e-4)
    spread = np.std(np.subtract(LOSSES["wide"], BASE), ddof=1)
    assert wide.difference.detectable == pytest.approx(spread * 4.584 / math.sqrt(5), rel=1e-3)
    assert f"a difference of {wide.difference.detectable:.4f} would have been found in 8 of 10" in wide.answer


def test_a_quick_budget_claims_nothing(tmp_path, undrawn, capsys):
    workdir = write(tmp_path / "s", *sweep(budget="quick"))
    assert report.main([str(workdir)]) == 0
    said = "No claim about gated and plain: the budget was quick"
    assert said in capsys.readouterr().out
    for name in ("report.md", "report.html"):
        text = (workdir / name).read_text()
        assert said in text
        assert "No claim: budget quick." in text
        assert "lower than" not in text
    assert report.main([str(workdir), "--publish", str(tmp_path / "docs")]) == 2
    assert "budget was quick" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


def test_a_diverged_run_is_counted(tmp_path):
    record, runs = sweep()
    diverge(select(runs, "final", "gated")[3])
    a = analyse(write(tmp_path / "s", record, runs))
    gated = a.variants["gated"]
    losses = LOSSES["gated"]
    median = sorted([*losses[:3], losses[4], math.inf])[2]
    assert (gated.n_diverged, gated.loss, gated.median) == (1, None, median)
    assert "gated: 1 of 5 runs at learning rate 0.002 diverged" in a.notices
    row = report.variant_table(a)[2]
    assert row[4] == f"median {median:.4f}"
    assert row[5] == row[7] == row[8] == "–"
    assert row[-1] == "1 of 5"
    assert report.comparison_table(a)[1][1:] == ["runs diverged", "–", "–", "–"]
    assert report.headline(a) == (
        "gated against plain: no mean difference, because runs diverged "
        f"(1 of 5 and 0 of 5; medians {median:.4f} and {np.median(BASE):.4f})."
    )
    assert a.comparisons[1].difference == analyse(write(tmp_path / "whole", *sweep())).comparisons[1].difference


def test_a_rate_that_diverges_is_not_chosen(tmp_path):
    record, runs = sweep()
    diverge(select(runs, "tuning", "plain")[1])
    found = analyse(write(tmp_path / "s", record, runs)).variants
    assert found["plain"].rate == 0.001
    assert found["gated"].rate == 0.002


@pytest.mark.parametrize("best", GRID)
def test_a_rate_at_the_edge_of_its_grid_is_noticed(tmp_path, best):
    a = analyse(write(tmp_path / "s", *sweep(best=best)))
    notices = [f"{name}: the best learning rate, {best:g}, is at the edge of its grid" for name in LOSSES]
    assert a.notices == ([] if best == 0.002 else notices)
    assert ("(edge)" in report.variant_table(a)[1][3]) == (best != 0.002) == at_edge(GRID, best)


def test_one_rate_has_no_edge(tmp_path):
    assert analyse(write(tmp_path / "s", *sweep(grid=[0.002]))).notices == []


def test_identical_variants_are_noticed(tmp_path):
    record, runs = sweep(LOSSES | {"wide": BASE})
    for mine, theirs in zip(*([r for r in runs if r["variant"] == n] for n in ("wide", "plain")), strict=True):
        mine["test_sums"] = list(theirs["test_sums"])
    a = analyse(write(tmp_path / "same", record, runs))
    assert a.notices == ["'plain' and 'wide' have identical losses for all seeds: check the switch"]
    assert (a.comparisons[1].difference.mean, a.comparisons[1].p_adjusted) == (0, 1)
    assert a.comparisons[1].answer == "wide and plain end at the same loss for every seed."
    runs[-1]["test_sums"][0] = np.nextafter(runs[-1]["test_sums"][0], 0)
    assert analyse(write(tmp_path / "almost", record, runs)).notices == []


def test_a_tiny_difference_is_told_with_a_digit_of_its_own(tmp_path):
    tiny = [b + d for b, d in zip(BASE, [3e-8, 2e-8, 4e-8, 3e-8, 3e-8], strict=True)]
    a = analyse(write(tmp_path / "sweep", *sweep(LOSSES | {"wide": tiny})))
    assert "wide ends 3e-08 nats per token higher than plain" in a.comparisons[1].answer
    assert [difference(x) for x in (0.0, 4e-5, -6e-5, 0.25)] == ["+0.0000", "+4e-05", "-0.0001", "+0.2500"]


def test_variants_of_different_lengths_are_drawn(tmp_path):
    """In the second half stands what reaches it: a swap of no steps has one point, and a short run none there."""
    record, runs = sweep()
    for r in runs:
        if r["variant"] == "wide":
            r["validation"] = [[0, 2.5]]
        if r["variant"] == "plain":
            r["validation"] = [[20, 2.9], [40, 2.5]]
    figure = lm.sweeps.figures.learning_curves(analyse(write(tmp_path / "sweep", record, runs)))
    shown = [{line.get_label(): len(line.get_xdata()) for line in axes.get_lines()} for axes in figure.axes[:2]]
    assert shown == [
        {"plain": 2, "gated": 2, "wide": 1, "counting tokens alone": 2},
        {"plain": 0, "gated": 2, "wide": 0},
    ]


def test_validation_losses_are_told_at_some_of_many_steps(tmp_path, monkeypatch):
    """Means over seeds; a step that a variant has no loss of, or a diverged run, is no number."""
    record, runs = sweep()
    diverge(select(runs, "final", "gated")[3])
    for r in runs:
        if r["variant"] == "wide":
            r["validation"] = [[step, 0.001 * step] for step in range(10, 101, 10)]
    a = analyse(write(tmp_path / "sweep", record, runs))
    monkeypatch.setattr(report, "COLUMNS", 5)
    ends = {name: f"{np.mean(losses) + 0.1:.4f}" for name, losses in LOSSES.items()}
    assert report.curve_table(a) == [
        ["validation loss after step", "20", "40", "60", "80", "100"],
        ["plain", "–", "–", "–", "–", ends["plain"]],
        ["gated", "–", "–", "–", "–", "–"],
        ["wide", "0.0200", "0.0400", "0.0600", "0.0800", "0.1000"],
    ]


def test_what_counting_alone_reaches_is_told_and_drawn(tmp_path):
    a = analyse(write(tmp_path / "sweep", *sweep()))
    expected = "Counting tokens alone (unigrams plus one) gives for text: 2.5000 on validation, 2.7500 on test."
    assert report.unigram_line(a) == expected
    assert expected in report.to_markdown(a, "")
    assert expected in report.to_html(a, dict.fromkeys(report.CAPTIONS, b""))
    drawn = {line.get_label(): list(line.get_ydata()) for line in lm.sweeps.figures.learning_curves(a).axes[0].lines}
    assert drawn["counting tokens alone"] == [2.5, 2.5]


@pytest.mark.parametrize("lost", ["tuning", "final", "speeds"])
def test_what_is_missing_and_the_command(tmp_path, capsys, lost):
    record, runs = sweep()
    runs = [r for r in runs if r is not (select(runs, lost, "wide") or [None])[0]]
    workdir = write(tmp_path / "s", record, runs)
    if lost == "speeds":
        (workdir / "speeds.json").unlink()
    assert report.main([str(workdir)]) == 2
    said = capsys.readouterr().err
    assert "1 runs or measurements are missing" in said
    assert f"python -m lm.sweep --config configs/sweeps/gates.py --budget full --workdir {workdir}" in said
    assert not (workdir / "report.md").exists()


def test_a_directory_without_a_sweep(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "holds no sweep" in capsys.readouterr().err


def test_csv_is_read_back(tmp_path, undrawn):
    record, runs = sweep()
    diverge(select(runs, "final", "wide")[0])
    workdir = write(tmp_path / "s", record, runs)
    assert report.main([str(workdir)]) == 0
    with open(workdir / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(runs) == 3 * 3 * (2 + 5)
    key = ("phase", "variant", "learning_rate", "seed")
    losses = {tuple(row[k] for k in key): row["test_loss"] for row in rows}
    assert losses == {tuple(str(r[k]) for k in key): str(r["test_loss"] or "") for r in runs}
    with open(workdir / "variants.csv", newline="") as file:
        found = {row["variant"]: row for row in csv.DictReader(file)}
    assert float(found["gated"]["test_loss"]) == pytest.approx(np.mean(LOSSES["gated"]), rel=1e-15)
    assert (found["wide"]["test_loss"], found["wide"]["diverged"]) == ("", "1")


def test_names_are_escaped(tmp_path):
    record, runs = sweep()
    record |= {"question": "<script>alert(1)</script>?", "base": "<i>&"}
    a = analyse(write(tmp_path / "s", record, runs))
    a = dataclasses.replace(
        a,
        notices=["<i>notice</i>"],
        comparisons=[dataclasses.replace(c, variant="<i>gated|b", answer="<i>gated wins") for c in a.comparisons],
    )
    page = report.to_html(a, dict.fromkeys(report.CAPTIONS, b"<svg/>"))
    assert "<script" not in page
    assert "<i>" not in page
    assert page.count("&lt;i&gt;") >= 5
    assert "&lt;script&gt;" in page
    assert "<i>gated\\|b − plain" in report.to_markdown(a, "")


class References(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_published(tmp_path, capsys):
    """Drawn: a full budget's page needs nothing but itself, and what is published nothing of this machine."""
    workdir, docs = write(tmp_path / "gates-full", *sweep()), tmp_path / "docs" / "results"
    assert report.main([str(workdir), "--publish", str(docs)]) == 0
    assert "gated ends 0.1040 nats per token lower than plain" in capsys.readouterr().out

    parser = References()
    parser.feed((workdir / "report.html").read_text())
    start = "data:image/svg+xml;base64,"
    assert len(parser.found) == len(report.CAPTIONS)
    assert all(source.startswith(start) for source in parser.found)
    for source in parser.found:
        svg = xml.etree.ElementTree.fromstring(base64.b64decode(source.removeprefix(start)))
        links = [v for e in svg.iter() for name, v in e.attrib.items() if name.endswith(("href", "src"))]
        assert svg.tag.endswith("svg")
        assert all(link.startswith(("#", "data:")) for link in links)
    assert "url(" not in report.STYLE
    assert "@import" not in report.STYLE

    text = (docs / "gates.md").read_text()
    assert re.findall(r"(?<![\w.])/\w+", text) == []
    assert str(tmp_path) not in text
    assert "started as: python -m lm.sweep --config gates.py --workdir=gates\n" in text
    pictures = re.findall(r"!\[\w+\]\((.*?)\)", text)
    assert pictures == [f"gates/{name}.png" for name in report.CAPTIONS]
    assert all((docs / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert (docs / "gates" / "runs.csv").read_text() == (workdir / "runs.csv").read_text()


@pytest.mark.filterwarnings("ignore:No artists with labels")
def test_everything_diverged(tmp_path, capsys):
    """Drawn: the baseline diverges everywhere and unvalidated, another once, the last always; one rate, two seeds."""
    record, runs = sweep({name: losses[:2] for name, losses in LOSSES.items()}, grid=[0.002], n=2)
    for r in runs:
        if r["variant"] != "gated" or (r["phase"], r["seed"]) == ("final", 1):
            diverge(r, validations=0 if r["variant"] == "plain" else 1)
    workdir = write(tmp_path / "s", record, runs)
    assert report.main([str(workdir)]) == 0
    out = capsys.readouterr().out
    assert (
        "gated against plain: no mean difference, because runs diverged (1 of 2 and 2 of 2; medians inf and inf)" in out
    )
    assert "wide against plain: no mean difference" in out
    text = (workdir / "report.md").read_text()
    assert "plain: 2 of 2 runs at learning rate 0.002 diverged" in text
    assert "median infinite" in text
    assert "nan" not in text
