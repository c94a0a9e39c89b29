"""The report of a small synthetic sweep: the files it writes, what it publishes, and what it refuses."""

import base64
import csv
import dataclasses
import html.parser
import re
import xml.etree.ElementTree

import numpy as np
import pytest
from synthetic_sweep import GRID, LOSSES, TUNING_SEEDS, diverge, select, speeds_json, sweep, write

from lm import report as command
from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.report import cost_tables, figures, pages, rate_tables, tables
from lm.sweeps.statistics import inference
from lm.sweeps.storage.results import Results


@pytest.fixture
def undrawn(monkeypatch):
    """Replace the figures by empty ones, for tests of everything else."""
    monkeypatch.setattr(figures, "figures", lambda a: dict.fromkeys(pages.CAPTIONS))
    monkeypatch.setattr(figures, "to_bytes", lambda figure, kind: b"<svg xmlns='http://www.w3.org/2000/svg'/>")


def test_a_quick_budget_supports_no_conclusions(tmp_path, undrawn, capsys):
    workdir = write(tmp_path / "s", *sweep(budget="quick"))
    assert command.main([str(workdir)]) == 0
    answer = "No conclusion about gated and plain: budget quick only checks that the sweep runs."
    assert answer in capsys.readouterr().out
    for name in ("report.md", "report.html"):
        text = (workdir / name).read_text()
        assert answer in text
        assert "No conclusions: budget quick" in text
        assert "lower than" not in text
    assert command.main([str(workdir), "--publish", str(tmp_path / "docs")]) == 2
    assert "budget was quick" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


def test_the_unigram_baseline_is_reported_and_drawn(tmp_path):
    a = analyze(write(tmp_path / "sweep", *sweep()))
    expected = "Unigram baseline: text: 2.5000 on validation, 2.7500 on test."
    assert tables.unigram_baseline(a) == expected
    assert expected in pages.to_markdown(a, "")
    assert expected in pages.to_html(a, dict.fromkeys(pages.CAPTIONS, b""))
    drawn = {line.get_label(): list(line.get_ydata()) for line in figures.learning_curves(a).axes[0].lines}
    assert drawn["unigram baseline"] == [2.5, 2.5]


@pytest.mark.parametrize("lost", ["tuning", "final", "speeds"])
def test_an_unfinished_sweep_names_what_is_missing_and_the_command(tmp_path, capsys, lost):
    record, runs = sweep()
    runs = [r for r in runs if r is not (select(runs, lost, "wide") or [None])[0]]
    workdir = write(tmp_path / "s", record, runs)
    if lost == "speeds":
        (workdir / "speeds.json").unlink()
    assert command.main([str(workdir)]) == 2
    error = capsys.readouterr().err
    assert (
        f"{workdir} is not finished: " + ("the throughput is not measured" if lost == "speeds" else "wide lacks runs")
        in error
    )
    resume = "python -m lm.sweep --config /somewhere/configs/sweeps/gates.py --workdir=/elsewhere/gates"
    assert f"resume with {resume}" in error
    assert not (workdir / "report.md").exists()


def test_a_directory_without_a_sweep(tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 2
    assert "holds no sweep" in capsys.readouterr().err


@pytest.mark.parametrize("phase", ["tuning", "final"])
def test_a_variant_whose_runs_failed_is_left_out_with_a_warning(tmp_path, undrawn, capsys, phase):
    record, runs = sweep()
    first = select(runs, phase, "gated")[0]
    lost = [r for r in runs if r is first or (phase == "tuning" and (r["phase"], r["variant"]) == ("final", "gated"))]
    workdir = write(tmp_path / "s", record, [r for r in runs if r not in lost])
    (workdir / "speeds.json").unlink()
    assert command.main([str(workdir)]) == 2
    key = tuple(first[k] for k in ("phase", "variant", "learning_rate", "seed"))
    Results(workdir).add_failure("other", [(*key[:3], 7)], "another run that failed once")
    assert command.main([str(workdir)]) == 2
    Results(workdir).add_failure("some", [key], "XlaRuntimeError: out of memory\nand more")
    assert command.main([str(workdir)]) == 0
    assert command.main([str(workdir), "--publish", str(tmp_path / "docs")]) == 2
    assert "--publish: runs of gated failed; finish the sweep first" in capsys.readouterr().err
    a = analyze(workdir)
    assert list(a.variants) == ["plain", "wide"]
    gated, wide = a.comparisons
    assert (gated.difference, gated.answer) == (None, "gated against plain: no result, because runs of gated failed.")
    assert wide.difference == inference.paired_difference(LOSSES["wide"], LOSSES["plain"], 2)
    assert wide.p_adjusted == pytest.approx(min(1, 2 * wide.difference.p))  # of the two that were declared
    text = (workdir / "report.md").read_text()
    assert "**Answer.** gated against plain: no result" in text
    assert "Warning: gated is left out: runs failed (XlaRuntimeError: out of memory)\n" in text
    assert "| gated − plain | runs failed |" in text
    assert "nan" not in text
    with open(workdir / "runs.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(runs) - len(lost)


def test_figures_without_the_variants_that_failed(tmp_path, capsys):
    """The figures are drawn without the baseline and without speeds."""
    record, runs = sweep()
    lost = select(runs, "final", "plain")[0]
    workdir = write(tmp_path / "s", record, [r for r in runs if r is not lost])
    (workdir / "speeds.json").unlink()
    Results(workdir).add_failure("some", [("final", "plain", 0.002, 0)], "MemoryError")
    assert command.main([str(workdir)]) == 0
    assert (workdir / "figures" / "curves.png").read_bytes().startswith(b"\x89PNG")
    for path in (workdir / "results").glob("*.json"):
        path.unlink()
    lost = [("tuning", name, rate, seed) for name in LOSSES for rate in GRID for seed in TUNING_SEEDS]
    Results(workdir).add_failure("all", lost, "OSError: no data")
    assert command.main([str(workdir)]) == 2
    assert "every variant has runs that failed (OSError: no data)" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written(tmp_path, undrawn, capsys):
    workdir = write(tmp_path / "s", *sweep())
    (tmp_path / "file").write_text("")
    assert command.main([str(workdir), "--publish", str(tmp_path / "file")]) == 1
    assert "NotADirectoryError" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["full", "quick"])
def test_reports_of_the_same_results_differ_in_their_last_part_only(tmp_path, undrawn, budget):
    """Trained again by another number of devices: other files, speeds and dates. Figures: see test_figures.py."""
    texts = {}
    for i, name in enumerate(("one", "again", "faster")):
        record, runs = sweep(budget=budget)
        if name == "faster":
            record["starts"][0]["time"] = "2027-12-31T00:00:00+0000"
            runs = [r | {"seconds": 20.0, "seconds_of": {"compilation": 5.0}} for r in reversed(runs)]
        workdir = write(tmp_path / name / "gates", record, runs, per_file=4 + i // 2)
        if name == "faster":
            (workdir / "speeds.json").write_text(speeds_json(2000.0, 1000.0, 2500.0))
        assert command.main([str(workdir)]) == 0
        texts[name] = {path.name: path.read_text() for path in workdir.glob("*.*") if path.suffix != ".json"}
    assert texts["one"] == texts["again"]
    assert texts["one"]["runs.csv"] == texts["faster"]["runs.csv"]
    for name, title in (("report.md", f"## {cost_tables.SPEEDS}\n"), ("report.html", f"<h2>{cost_tables.SPEEDS}</h2>")):
        (before, here), (same, there) = (texts[n][name].split(title) for n in ("one", "faster"))
        assert before == same
        assert here != there
        assert "of training in total\n" in here
        assert "of training in total (25% compilation)" in there
        assert "## " not in here
        assert "<h2>" not in here


def test_runs_are_in_the_order_of_the_sweep(tmp_path, undrawn):
    record, runs = sweep()
    order = {"plain": 0, "gated": 1, "wide": 2}
    workdir = write(tmp_path / "s", record, [runs[i] for i in np.random.default_rng(0).permutation(len(runs))])
    assert command.main([str(workdir)]) == 0
    with open(workdir / "runs.csv", newline="") as file:
        rows = [(r["variant"], r["phase"], float(r["learning_rate"]), int(r["seed"])) for r in csv.DictReader(file)]
    assert rows == sorted(rows, key=lambda row: (order[row[0]], row[1] == "final", row[2], row[3]))
    assert rows[0] == ("plain", "tuning", 0.001, 1_000_000)


def test_csv_files_hold_the_unrounded_results(tmp_path, undrawn):
    record, runs = sweep()
    diverge(select(runs, "final", "wide")[0])
    git = {"commit": "abc123", "dirty": True}
    runs[1]["provenance"] = {"host": "box", "processor": "a 2 GHz processor", "device": "cpu", "git": git}
    workdir = write(tmp_path / "s", record, runs)
    assert command.main([str(workdir)]) == 0
    with open(workdir / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(runs) == 3 * 3 * (2 + 5)
    key = ("phase", "variant", "learning_rate", "seed")
    losses = {tuple(row[k] for k in key): row["test_loss"] for row in rows}
    assert losses == {tuple(str(r[k]) for k in key): str(r["test_loss"] or "") for r in runs}
    machines = [(row["processor"], row["device"], row["commit"]) for row in rows]
    assert machines[:2] == [("", "", ""), ("a 2 GHz processor", "cpu", "abc123 with uncommitted changes")]
    with open(workdir / "variants.csv", newline="") as file:
        found = {row["variant"]: row for row in csv.DictReader(file)}
    assert float(found["gated"]["test_loss"]) == pytest.approx(np.mean(LOSSES["gated"]), rel=1e-15)
    assert (found["wide"]["test_loss"], found["wide"]["diverged"]) == ("", "1")


def test_names_are_escaped(tmp_path):
    record, runs = sweep()
    record |= {"question": "<script>alert(1)</script>?", "base": "<i>&"}
    a = analyze(write(tmp_path / "s", record, runs))
    a = dataclasses.replace(
        a,
        warnings=["<i>warning</i>"],
        comparisons=[dataclasses.replace(c, variant="<i>gated|b", answer="<i>gated wins") for c in a.comparisons],
    )
    page = pages.to_html(a, dict.fromkeys(pages.CAPTIONS, b"<svg/>"))
    assert "<script" not in page
    assert "<i>" not in page
    assert page.count("&lt;i&gt;") >= 5
    assert "&lt;script&gt;" in page
    assert "<i>gated\\|b − plain" in pages.to_markdown(a, "")


class References(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_html_page_is_self_contained_and_the_published_page_names_no_local_path(tmp_path, capsys):
    workdir, docs = write(tmp_path / "gates-full", *sweep()), tmp_path / "docs" / "results"
    assert command.main([str(workdir), "--publish", str(docs)]) == 0
    assert "gated ends 0.1040 nats per token lower than plain" in capsys.readouterr().out

    parser = References()
    parser.feed((workdir / "report.html").read_text())
    start = "data:image/svg+xml;base64,"
    assert len(parser.found) == len(pages.CAPTIONS)
    assert all(source.startswith(start) for source in parser.found)
    for source in parser.found:
        svg = xml.etree.ElementTree.fromstring(base64.b64decode(source.removeprefix(start)))
        links = [v for e in svg.iter() for name, v in e.attrib.items() if name.endswith(("href", "src"))]
        assert svg.tag.endswith("svg")
        assert all(link.startswith(("#", "data:")) for link in links)
    assert "url(" not in pages.STYLE
    assert "@import" not in pages.STYLE

    text = (docs / "gates.md").read_text()
    assert re.findall(r"(?<![\w.])/\w+", text) == []
    assert str(tmp_path) not in text
    assert "python -m lm.sweep --config gates.py --workdir=gates\n" in text
    assert text.count(pages.CAPTIONS["differences"]) == 1
    pictures = re.findall(r"!\[\w+\]\((.*?)\)", text)
    assert pictures == [f"gates/{name}.png" for name in pages.CAPTIONS]
    assert all((docs / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    for table in ("runs.csv", "claims.csv"):
        assert (docs / "gates" / table).read_text() == (workdir / table).read_text()


@pytest.mark.filterwarnings("ignore:No artists with labels")
def test_a_report_is_written_if_variants_diverge(tmp_path, capsys):
    """One rate, two seeds: the baseline diverges before its first evaluation, one run of gated, and all of wide."""
    record, runs = sweep({name: losses[:2] for name, losses in LOSSES.items()}, grid=[0.002], n=2)
    for r in runs:
        if r["variant"] != "gated" or (r["phase"], r["seed"]) == ("final", 1):
            diverge(r, validations=0 if r["variant"] == "plain" else 1)
    workdir = write(tmp_path / "s", record, runs)
    assert command.main([str(workdir)]) == 0
    out = capsys.readouterr().out
    assert (
        "gated against plain: no mean difference, because runs diverged (1 of 2 and 2 of 2; medians inf and inf)" in out
    )
    assert "wide against plain: no mean difference" in out
    text = (workdir / "report.md").read_text()
    assert "plain: 2 of 2 runs at learning rate 0.002 diverged" in text
    assert "median infinite" in text
    assert "nan" not in text


def test_every_footnote_explains_a_column(tmp_path):
    """The definition of a column is below its table, in both formats."""
    a = analyze(write(tmp_path / "s", *sweep()))
    about_rates = rate_tables.rates(a), rate_tables.differences(a)
    about_variants = (tables.comparisons, tables.losses, cost_tables.costs, cost_tables.speeds, tables.curves)
    for table in (*(table(a) for table in about_variants), *about_rates):
        assert set(table.notes) <= set(table.header)
        assert all(len(row) == len(table.header) for row in table.rows)
        assert not any("–" in cell for row in table.rows for cell in row)
    text = pages.to_markdown(a, "")
    assert "| comparison | answer ¹ | difference [95 % CI] ² | p ³ |" in text
    assert "\n³ p: Two-sided paired t test after Holm's correction for 2 comparisons" in text


def test_the_cells_of_wide_tables_are_wrapped_but_not_within_an_interval(tmp_path):
    """Nine columns on one line each would be wider than a screen of 1280 pixels."""
    a = analyze(write(tmp_path / "s", *sweep()))
    page = pages.to_html(a, dict.fromkeys(pages.CAPTIONS, b""))
    assert "<table class='wide'><thead><tr><th>comparison" in page
    assert ".wide td:not(:first-child) { white-space: normal; }" in pages.STYLE
    d = a.comparisons[0].difference
    assert f"[{d.low:+.4f},&nbsp;{d.high:+.4f}]</span>" in page


def test_on_narrow_screens_every_cell_names_its_column(tmp_path):
    page = pages.to_html(analyze(write(tmp_path / "s", *sweep())), dict.fromkeys(pages.CAPTIONS, b""))
    assert '<meta name="viewport" content="width=device-width' in page
    assert '<td data-column="p"><span>0.97</span></td>' in page
    assert "attr(data-column)" in pages.STYLE
    assert page.index("gated ends 0.1040") < page.index("<table") < page.index("<img")
