"""The list of published comparisons: it follows from the committed runs, with p-values corrected over all pages."""

import csv
import re
import shutil

import pytest
import synthetic_sizes
from running import ROOT
from synthetic_sweep import sweep, write

from benchmarks import claims
from lm.sweeps import report, statistics, tables
from lm.sweeps.analysis import analyze

RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return claims.claims(RESULTS)


def test_the_committed_files_are_what_the_command_writes(tmp_path, rows):
    """If this fails: python3 -m benchmarks.claims."""
    assert (RESULTS / "claims.csv").read_text(encoding="utf-8") == tables.to_csv(rows)
    assert claims.summary(rows) in (RESULTS / "README.md").read_text(encoding="utf-8")
    for page in RESULTS.glob("*/runs.csv"):
        (tmp_path / page.parent.name).mkdir()
        shutil.copy(page, tmp_path / page.parent.name)
        shutil.copy(RESULTS / f"{page.parent.name}.md", tmp_path)
    shutil.copy(RESULTS / "README.md", tmp_path)
    assert claims.main([str(tmp_path)]) == 0
    for name in ("claims.csv", "README.md"):
        assert (tmp_path / name).read_bytes() == (RESULTS / name).read_bytes()


def test_the_p_values_are_those_that_the_pages_print(rows):
    for row in rows:
        text = (RESULTS / f"{row['page']}.md").read_text(encoding="utf-8")
        found = re.findall(rf"^\| {re.escape(row['variant'])} − {re.escape(row['against'])} \|(.*)$", text, re.M)[0]
        cells = [cell.strip() for cell in found.split("|")]
        if not re.match(r"[+-]", cells[0]):  # newer pages have the answer first
            assert cells.pop(0) == row["answer"]
        assert cells[1] == f"{float(row['p_page'] or row['p']):.2g}"
        assert float(cells[0].split()[0]) == pytest.approx(float(row["difference"]), abs=5e-5)


def test_p_values_are_corrected_over_all_pages(rows):
    compared = [row for row in rows if row["variant"] != "placebo"]
    corrected = statistics.holm([float(row["p"]) for row in compared])
    assert [float(row["p_all_pages"]) for row in compared] == pytest.approx(corrected, rel=1e-4)
    assert all(float(row["p_all_pages"]) >= float(row["p_page"]) for row in compared)
    by_pair = {(row["variant"], row["against"]): row for row in rows}
    # Computed by other code from the published runs, before the correction over all pages.
    assert float(by_pair["none", "rope"]["p_page"]) == pytest.approx(4.58e-7, rel=1e-2)
    rounding = by_pair["swap: welford", "swap: two_pass"]  # 3e-08 nats per token
    assert float(rounding["p_all_pages"]) < 0.05
    assert (rounding["answer"], rounding["significant"]) == ("equivalent", "no")


def test_the_index_has_the_p_values_of_all_pages():
    p_values = {}
    for row in csv.DictReader((RESULTS / "claims.csv").open(encoding="utf-8")):
        if row["p_all_pages"]:
            p_values.setdefault(row["page"], set()).add(f"{float(row['p_all_pages']):.2g}")
    lines = (RESULTS / "README.md").read_text(encoding="utf-8").partition("## Corrected")[0].splitlines()
    listed = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][2:]
    assert {re.match(r"\[(\w+)\]", cells[-1])[1] for cells in listed} == p_values.keys()
    for cells in listed:
        assert set(cells[2].split(", ")) <= p_values[re.match(r"\[(\w+)\]", cells[-1])[1]], cells


def publish(directory, name: str, record: dict, runs: list[dict]) -> None:
    a = analyze(write(directory / "sweeps" / name, record | {"name": name}, runs))
    (directory / name).mkdir()
    (directory / f"{name}.md").write_text(report.to_markdown(a, ""))
    (directory / name / "runs.csv").write_text(tables.to_csv(tables.run_rows(a)))


@pytest.mark.parametrize(
    ("found", "claimed"),
    [(synthetic_sizes.sweep(1.2), "compute multipliers"), (synthetic_sizes.without_comparisons(), "exponents")],
)
def test_pages_with_sizes_are_left_out_with_a_warning(tmp_path, capsys, found, claimed):
    """Their comparisons at each size are not claims."""
    publish(tmp_path, "fixed", *sweep())
    workdir = synthetic_sizes.write(tmp_path / "sweeps" / "sizes", *found)
    a = analyze(workdir)
    (tmp_path / "sizes").mkdir()
    (tmp_path / "sizes.md").write_text(report.to_markdown(a, ""))
    (tmp_path / "sizes" / "runs.csv").write_text(tables.to_csv(tables.run_rows(a)))
    assert {row["page"] for row in claims.claims(tmp_path)} == {"fixed"}
    assert f"WARNING: sizes is left out: its claims are {claimed}" in capsys.readouterr().err


def test_pages_with_looks_and_a_placebo(tmp_path, capsys):
    """A page that lm.report writes now is read again: its looks, and its placebo, which is not counted."""
    record, runs = sweep()
    publish(tmp_path, "fixed", record, runs)
    fewer = [r for r in runs if not (r["phase"] == "final" and r["variant"] == "gated" and r["seed"] == 4)]
    publish(tmp_path, "growing", record | {"looks": [4, 5]}, fewer)
    named = {"wide": "placebo"}
    with_placebo = [r | {"variant": named.get(r["variant"], r["variant"])} for r in runs]
    variants = {named.get(name, name): v for name, v in record["variants"].items()}
    changed = {"comparisons": [["gated", "plain"]], "variants": variants, "placebo": "placebo"}
    workdir = write(tmp_path / "sweeps" / "checked", record | {"name": "checked"} | changed, with_placebo)
    speeds = (workdir / "speeds.json").read_text().replace("wide", "placebo")
    (workdir / "speeds.json").write_text(speeds)
    a = analyze(workdir)
    (tmp_path / "checked").mkdir()
    (tmp_path / "checked.md").write_text(report.to_markdown(a, ""))
    (tmp_path / "checked" / "runs.csv").write_text(tables.to_csv(tables.run_rows(a)))

    (tmp_path / "README.md").write_text("# Results\n")
    assert claims.main([str(tmp_path)]) == 2
    assert f"{tmp_path / 'README.md'} has no lines {claims.BEGIN}" in capsys.readouterr().err
    (tmp_path / "README.md").write_text(f"# Results\n\n{claims.BEGIN}\nold\n{claims.END}\n\nMore.\n")
    assert claims.main([str(tmp_path)]) == 0
    index = (tmp_path / "README.md").read_text()
    assert "5 comparisons on 3 pages: 3 are significant" in index
    assert "False positives: 0 of 1 placebos are significant; 1 in 20 is expected by chance." in index
    assert "old" not in index
    assert index.endswith(f"{claims.END}\n\nMore.\n")
    with open(tmp_path / "claims.csv", newline="") as file:
        rows = {(row["page"], row["variant"]): row for row in csv.DictReader(file)}
    assert [rows["growing", name]["seeds"] for name in ("gated", "wide")] == ["4", "5"]
    growing = {c.variant: c for c in analyze(tmp_path / "sweeps" / "growing").comparisons}
    for name, c in growing.items():
        assert float(rows["growing", name]["p"]) == pytest.approx(c.difference.p, rel=1e-5)
        assert float(rows["growing", name]["p_page"]) == pytest.approx(c.p_adjusted, rel=1e-5)
        assert float(rows["growing", name]["at_optimum"]) == pytest.approx(c.at_optimum.mean, rel=1e-5)
    placebo = rows["checked", "placebo"]
    assert (placebo["p_page"], placebo["p_all_pages"], placebo["significant"]) == ("", "", "no")
    assert float(placebo["p"]) == pytest.approx(a.placebo.difference.p, rel=1e-5)
