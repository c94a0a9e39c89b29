"""The report of a small synthetic sweep: the files it writes, what it publishes, and what it
refuses.
"""

import base64
import csv
import dataclasses
import json
import math
import re
import shutil
import xml.etree.ElementTree

import pytest
from running import slow
from synthetic_sweep import START, changed, sweep

from lm import report as command
from lm.sweeps import analysis, figures, others, report
from lm.sweeps import record as records
from lm.sweeps.analysis import analyze
from lm.sweeps.results import append_runs
from lm.system.errors import UserError
from lm.system.files import to_json

SIZES = {"small": (100, 0.4), "large": (400, 0.0)}


@pytest.fixture
def undrawn(monkeypatch):
    """Replace the figures by empty ones, for tests of everything else."""
    monkeypatch.setattr(report, "figures", lambda a: dict.fromkeys(report.CAPTIONS))
    monkeypatch.setattr(
        report, "to_bytes", lambda figure, kind: b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    )


def write(workdir, record, runs):
    """Write the directory of a sweep as lm.sweep does."""
    records.open_sweep(workdir, record)
    append_runs(workdir, runs)
    return workdir


def text_of(record, runs, figures=()) -> str:
    return report.to_markdown(analyze(record, runs), figures or {})


def test_the_first_screen_has_the_question_the_answer_the_forest_plot_and_the_table():
    text = text_of(*sweep(), {"differences": "figures/differences.png"})
    places = [text.index(part) for part in ("**Question.** Do", "* Lower loss by more than 0.005: gated than",
                                           "![", "| gated − plain | -0.1", "## Variants")]  # fmt: skip
    assert places == sorted(places)
    row = next(line for line in text.splitlines() if line.startswith("| gated − plain"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    validation, *rest = cells[3:]
    assert validation == "-0.1000"
    assert rest[:3] == ["< 1e-4", "< 1e-4", "better by more than 0.005"]
    assert float(rest[3]) == pytest.approx(analyze(*sweep()).claims[0].detectable, abs=5e-5)
    assert rest[4:] == ["100", "600", "1,000"]
    assert "| placebo − plain |" in text


def test_every_verdict_has_a_sentence():
    record, runs = sweep()
    text = text_of(record, runs)
    assert "* Higher loss by more than 0.005: wide than plain (" in text
    assert re.search(
        r"^\* Placebo, whose true difference is 0: .*: not significant, as it should be\.$",
        text,
        re.M,
    )
    noisy = [dataclasses.replace(r, test_loss=r.test_loss + 0.3 * (-1) ** r.seed)
             if (r.phase, r.variant) == ("final", "gated") else r for r in runs]  # fmt: skip
    assert (
        "* Neither a difference nor equality within 0.005 is shown: gated and plain ("
        in text_of(record, noisy)
    )
    for margin, sentence in (
        (0.3, "The same within 0.3"),
        (0.1, "Different, but the difference may be smaller than 0.1"),
    ):
        assert f"* {sentence}: gated and plain (" in text_of(record | {"margin": margin}, runs)
    lost = {"status": "diverged", "diverged_step": 1, "test_loss": None, "val_loss": None}
    diverged = [
        dataclasses.replace(r, **lost) if (r.variant, r.seed) == ("wide", 3) else r for r in runs
    ]
    assert "* No result: wide and plain (unstable: 1 of 5 and 0 of 5 runs diverged)." in text_of(
        record, diverged
    )


def test_a_published_run_that_is_trained_again_is_compared():
    record, runs = sweep()
    published = next(r for r in runs if (r.phase, r.variant) == ("final", "plain"))
    for added, processor, agree in ((1e-5, "cpu A", True), (0.01, "cpu A", False), (0.01, "cpu B", True),
                                    (-0.03, "cpu B", False), (None, "cpu A", False)):  # fmt: skip
        loss = None if added is None else published.test_loss + added
        again = dataclasses.replace(published, phase="again", test_loss=loss, processor=processor)
        text = text_of(record, [*runs, again]).partition("## Results")[0]
        shown = "–" if loss is None else f"{loss:.4f}"
        assert (
            f"The published plain was trained again with seed 1: {shown} instead of 2.0000." in text
        )
        assert ("WARNING" in text) is not agree
    assert "trained again" not in text_of(record, runs)


def test_with_sizes_the_report_has_the_mean_the_cells_and_the_compute():
    text = text_of(*sweep(SIZES, "size"))
    assert re.search(
        r"^\* gated saves \d\d % \[.*\] of the training compute that plain needs", text, re.M
    )
    assert re.search(r"^\| gated − plain over 2 sizes \|.*\| \d\d % \[-?\d+, \d+\] \|", text, re.M)
    assert "| gated − plain at small |" in text
    assert re.search(
        r"^\* wide needs \d+ % \[\d+, \d+\] more training compute than plain", text, re.M
    )
    assert re.search(
        r"^\| gated − plain over 2 sizes \|.*\| 2 / 0 \| \d\.\d+ \| \[.*\] \|.*\| × 1.00 \|",
        text,
        re.M,
    )
    a = analyze(*sweep(SIZES, "size"))
    corrected = dataclasses.replace(
        a, claims=[dataclasses.replace(c, p_holm=0.3) for c in a.claims]
    )
    assert "* That gated saves training compute, or needs more, is not shown" in report.to_markdown(
        corrected, {}
    )


def test_many_comparisons_are_sorted_below_the_placebo_with_a_table_of_the_cells(monkeypatch):
    monkeypatch.setattr(analysis, "MANY", 1)
    a = analyze(*sweep(SIZES, "text"))
    assert [c.variant for c in a.shown()] == ["placebo", "gated", "wide"]
    text = report.to_markdown(a, {})
    assert "| gated − plain at small |" not in text
    assert re.search(r"^\| gated − plain \| (-0.1\S* \[.*?\]) \| (-0.1\S* \[.*?\]) \|$", text, re.M)
    assert "* In general, by these 2 texts (" in text
    assert set(figures.figures(a)) == {"differences", "learning_rates", "curves"}


def test_the_answer_on_many_comparisons_tells_all_cells_from_the_mean_of_some(monkeypatch):
    monkeypatch.setattr(analysis, "MANY", 1)
    record, runs = sweep(SIZES, "text")
    # on the text "large", gated is as much worse as it is better on "small", and more
    losses = {
        v.seed: v.test_loss for v in runs if v.variant == "plain, large" and v.phase == "final"
    }
    for seed, loss in losses.items():
        runs = changed(
            runs, {"test_loss": loss + 0.3}, phase="final", variant="gated, large", seed=seed
        )
    lines = report.to_markdown(analyze(record, runs), {}).splitlines()
    (line,) = [
        line for line in lines if line.startswith("* Higher loss by more than 0.005 in the mean")
    ]
    assert "but not in all texts: against plain: gated (small -0.1" in line
    assert "large +0.3000)" in line
    assert "* In general" not in "\n".join(lines)
    bullets = [i for i, line in enumerate(lines) if line.startswith("* ")]
    assert bullets[: len(bullets) - 1] == list(range(bullets[0], bullets[0] + len(bullets) - 1))
    (of_wide,) = [
        line for line in lines if "wide (" in line or "base: wide" in line or ": wide" in line
    ][:1]
    assert "with this sign in all 2 texts: against plain: wide" in of_wide


def test_the_notes_of_a_page_are_part_of_it(tmp_path, undrawn):
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates" / "notes.txt").write_text("**Mind** the gap.\n")
    page = report.write_page(analyze(*sweep()), tmp_path)
    assert "\n\n**Mind** the gap.\n\n" in page.read_text()


def test_a_quick_budget_supports_no_conclusions(tmp_path, undrawn, capsys):
    workdir = write(tmp_path / "s", *sweep(budget="quick"))
    assert command.main([str(workdir)]) == 0
    text = (workdir / "report.md").read_text()
    assert "**No conclusions: the budget quick" in text
    assert "**Answer.**" not in text
    assert "no conclusion" in text
    assert command.main([str(workdir), "--publish", str(tmp_path / "docs")]) == 2
    assert "--budget full" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


def test_a_page_compares_its_differences_with_the_verdicts_of_others(
    tmp_path, undrawn, monkeypatch
):
    monkeypatch.setattr(others, "MIN_ROWS", 2)
    page = tmp_path / "gates"
    page.mkdir()
    rows = [
        "gated,lab A,better,one run,https://a.org/x_y,",
        "wide,lab A,worse,,https://a.org,",
        "wide,B,same,,https://b.org,",
        "gated,B,worse,,https://b.org,slim",
    ]
    columns = "change,source,verdict,evidence,url,against"
    (page / "others.csv").write_text("\n".join([columns, *rows]))
    text = report.publish(analyze(*sweep()), tmp_path).read_text()
    assert re.search(
        r"^\| gated − plain \| -0.1\S* \| \[better\]\(https://a.org/x_y\) "
        r"\| \[worse\]\(https://b.org\) \(against slim\) \|$",
        text,
        re.M,
    )
    # B's verdict against something else is shown, and does not count.
    assert "lab A +1.00 (2 changes). It is over" in text
    good = "gated,A,better,,https://a.org"
    for row in (
        "gated,A,great,,https://a.org",
        "gated,A,better,,javascript:x",
        "gated,A",
        f"x{good}",
        f"{good}\n{good}",
    ):
        (page / "others.csv").write_text(f"change,source,verdict,evidence,url\n{row}\n")
        with pytest.raises(UserError, match=r"others\.csv"):
            others.read_others(page, {"gated"})


def test_an_unfinished_sweep_names_what_is_missing_and_the_command(tmp_path, capsys):
    record, runs = sweep()
    workdir = write(tmp_path / "s", record, [r for r in runs if (r.variant, r.seed) != ("wide", 3)])
    assert command.main([str(workdir)]) == 2
    error = capsys.readouterr().err
    assert "wide" in error
    assert (
        "python -m lm.sweep --config /somewhere/configs/sweeps/gates.py --workdir=/elsewhere/gates"
        in error
    )
    assert command.main([str(tmp_path)]) == 2
    assert "holds no sweep" in capsys.readouterr().err


def test_finished_cells_are_reported_before_the_others(tmp_path, undrawn, capsys):
    record, runs = sweep(SIZES, "size")
    kept = [run for run in runs if not (run.variant == "gated, large" and run.phase == "final")]
    assert command.main([str(write(tmp_path, record, kept))]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| gated − plain at small | -0.1" in text
    assert "* Not finished, and not in this report: large." in text
    assert "large" not in (tmp_path / "runs.csv").read_text()


def test_a_failure_that_was_made_up_for_is_not_reported(tmp_path, undrawn, capsys, monkeypatch):
    workdir = write(tmp_path, *sweep())
    monkeypatch.setattr(command, "read_failures", lambda _: {"wide": "out of memory"})
    assert command.main([str(workdir)]) == 0
    assert "out of memory" not in (workdir / "report.md").read_text()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The directory of a sweep with its report; drawing takes a second."""
    record, runs = sweep()
    workdir = write(tmp_path_factory.mktemp("sweeps") / "s", record, runs[::-1])
    assert command.main([str(workdir)]) == 0
    return workdir


def test_no_file_depends_on_the_last_bit_of_a_computation():
    """Another version of NumPy computes another last bit, and must write the same page."""
    record, runs = sweep()
    near = [dataclasses.replace(run, test_loss=math.nextafter(run.test_loss, 9)) for run in runs]
    assert report.claim_rows(analyze(record, near)) == report.claim_rows(analyze(record, runs))


def test_all_files_are_written_and_hold_the_numbers(written):
    workdir, a = written, analyze(*sweep())
    with open(workdir / "claims.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = json.loads((workdir / "report.json").read_text())
    assert [float(row["mean"]) for row in rows] == pytest.approx(
        [c.difference.mean for c in a.claims], rel=1e-9
    )
    assert [claim["p_holm"] for claim in found["claims"][:2]] == pytest.approx(
        [c.p_holm for c in a.claims[:2]], rel=1e-9
    )
    assert (
        [row["verdict"] for row in rows]
        == [c.verdict for c in a.claims]
        == [c["verdict"] for c in found["claims"]]
    )
    assert found["variants"][1]["test_losses"] == {
        str(s): x for s, x in a.variants["gated"].losses.items()
    }
    with open(workdir / "runs.csv", newline="") as file:
        losses = [float(row["test_loss"]) for row in csv.DictReader(file)]
    assert losses == [run.test_loss for run in a.runs]
    assert all(
        (workdir / "figures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        for name in report.CAPTIONS
    )


def test_the_html_page_is_self_contained_and_its_tables_scroll(written):
    page, start = (written / "report.html").read_text(), "data:image/svg+xml;base64,"
    sources = re.findall(r"""<[^>]*\b(?:src|href|srcset|data|action) *= *["']?([^"' >]*)""", page)
    assert len(sources) == len(report.CAPTIONS)
    for source in sources:
        svg = xml.etree.ElementTree.fromstring(base64.b64decode(source.removeprefix(start)))
        links = [
            v for e in svg.iter() for name, v in e.attrib.items() if name.endswith(("href", "src"))
        ]
        assert all(link.startswith(("#", "data:")) for link in links)
    assert page.count('<div class="scroll"><table>') == page.count("<table>") == 2
    assert ".scroll { overflow-x: auto; }" in page
    assert '<meta name="viewport" content="width=device-width' in page
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:; " in page


EVIL = '<script>alert(1)</script> <img src=x onerror=y> [x](javascript:y) ![p](http://tracker) `c` | | \n# h\n\n* "q"'
EVIL += " \x1b[2J \u202e"


def test_nothing_that_a_sweep_contains_becomes_markup():
    """Every text of a sweep is replaced by markup; the report has the elements of the template
    alone.
    """
    record, runs = sweep()
    clean = report.to_html(text_of(record, runs), "t", {})
    for key in ("name", "question", "background", "base"):
        record[key] = EVIL
    record["values"] = {"model.x": EVIL}
    git = {"commit": EVIL, "dirty": False}
    record["starts"] = [START | {"time": EVIL, "device": EVIL, "processor": EVIL, "git": git}]
    for entry in record["variants"].values():
        entry["data"] |= {"name": EVIL, "notices": [EVIL]}
        entry["changes"] = {EVIL: EVIL}
        entry["arm"] = f"{entry['arm']} {EVIL}"
    a = analyze(record, runs)
    a = dataclasses.replace(a, failed={EVIL: EVIL}, warnings={"failed": [EVIL], "machines": [EVIL]})
    text = report.to_markdown(a, {})
    assert "<script" not in "".join(
        line for line in text.splitlines() if not line.startswith("    ")
    )
    tags = re.findall(r"<\w+", report.to_html(text, EVIL, {}))
    assert not set("\x1b\u202e") & set(text)
    assert set(tags) == set(re.findall(r"<\w+", clean)) | {"<li", "<ul"}
    assert tags.count("<h1") == 1
    assert tags.count("<td") == clean.count("<td")


def test_a_published_page_can_be_written_again_from_its_runs(tmp_path, undrawn, capsys):
    workdir, docs = (
        write(tmp_path / "gates-full", *sweep(SIZES, "size")),
        tmp_path / "docs" / "results",
    )
    assert command.main([str(workdir), "--publish", str(docs)]) == 0
    text = (docs / "gates.md").read_text()
    assert not re.search(r"(?<![\w.])/\w+", text)
    assert str(tmp_path) not in text
    assert "python -m lm.sweep --config gates.py --workdir=gates\n" in text
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert pictures == [f"gates/{name}.png" for name in report.CAPTIONS]
    before = {
        path.name: path.read_bytes() for path in [docs / "gates.md", *(docs / "gates").iterdir()]
    }
    published = json.loads(before["sweep.json"])["variants"]
    assert "config" not in published["gated, small"]
    assert published["plain, small"]["config"]["optimizer.name"] == "adamw"
    assert not any(
        path in text for path in (b"/somewhere", b"/elsewhere") for text in before.values()
    )
    assert command.main([str(docs / "gates")]) == 0
    assert {
        path.name: path.read_bytes() for path in [docs / "gates.md", *(docs / "gates").iterdir()]
    } == before
    assert command.main([str(docs / "gates"), "--publish", str(docs)]) == 2


@pytest.mark.parametrize("link", ["gates", "gates.md", "gates/runs.csv", "gates/differences.png"])
def test_nothing_is_published_through_a_link(tmp_path, undrawn, capsys, link):
    """A linked folder is refused, and the link of a file is replaced."""
    workdir, docs, outside = (
        write(tmp_path / "s", *sweep()),
        tmp_path / "docs",
        tmp_path / "outside",
    )
    (docs / "gates" if "/" in link else docs).mkdir(parents=True)
    outside.mkdir() if link == "gates" else outside.write_text("kept")
    (docs / link).symlink_to(outside)
    assert command.main([str(workdir), "--publish", str(docs)]) == (2 if link == "gates" else 0)
    assert list(outside.iterdir()) == [] if link == "gates" else outside.read_text() == "kept"
    assert (docs / link).is_symlink() == (link == "gates")
    shutil.rmtree(workdir / "figures")
    (workdir / "figures").symlink_to(tmp_path)  # nor is a report written through one
    assert command.main([str(workdir)]) == 2
    assert not list(tmp_path.glob("*.png"))


def paths_of(value, path=()):
    """Yield the path of every value in nested dicts and lists; of a list, only the first item; of
    variants, one.
    """
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:1])
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        if path != ("variants",) or key == "gated":
            yield from paths_of(item, (*path, key))


def replaced(value, path, new):
    """Return a copy of nested dicts and lists with another value at a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("part", [slice(0, None, 10), slow(slice(None))])
def test_any_value_of_another_type_is_reported_or_has_no_effect(tmp_path, undrawn, capsys, part):
    """In a sweep.json whose checksum is right: nobody sees a traceback. Fast: every tenth value."""
    record, runs = sweep()
    append_runs(tmp_path, runs)
    record = json.loads(to_json(record))
    for path in list(paths_of(record))[1:][part]:
        for new in (None, {"wrong": {}}):
            wrong = replaced(record, path, new)
            (tmp_path / "sweep.json").write_text(
                to_json(wrong | {"sha256": records._checksum(wrong)})
            )
            assert command.main([str(tmp_path)]) in (0, 2), (path, new)


@pytest.mark.parametrize("name", ["gated\x1b[2J", "gated\u202e", "gated\nb", "g" * 5000, "\0"])
def test_the_names_of_variants_and_cells_are_lines_of_text(name, tmp_path, undrawn, capsys):
    record, runs = sweep()
    wrong = json.loads(to_json(record).replace('"gated"', json.dumps(name)))
    append_runs(tmp_path, runs)
    (tmp_path / "sweep.json").write_text(to_json(wrong | {"sha256": records._checksum(wrong)}))
    assert command.main([str(tmp_path)]) == 2
    assert "has the name" in capsys.readouterr().err


def test_a_name_that_leads_elsewhere_is_refused(tmp_path):
    record, runs = sweep()
    with pytest.raises(report.UserError, match="plain file name"):
        report.publish(analyze(record | {"name": "../../x"}, runs), tmp_path)


def test_reports_of_the_same_runs_are_equal_in_any_order():
    record, runs = sweep()
    assert text_of(record, runs) == text_of(record, runs[::-1])
