"""The list of published claims: it is what the pages claim, and corrects over all of them."""

import csv
import itertools
import math
import re
import shutil

import numpy as np
import pytest
import synthetic_sizes
from running import ROOT
from synthetic_sweep import sweep, write

from benchmarks import claims
from lm.errors import UserError
from lm.sweeps.analysis.analyze_sweep import Analysis, analyze
from lm.sweeps.analysis.claims import DIFFERENCE, INTERACTION, MULTIPLIER, claim_rows
from lm.sweeps.report.tables import to_csv
from lm.sweeps.statistics import inference

RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return claims.claims(RESULTS)


def test_the_committed_files_are_what_the_command_writes(tmp_path, rows):
    """If this fails: python3 -m benchmarks.claims."""
    assert (RESULTS / "claims.csv").read_text(encoding="utf-8") == to_csv(rows)
    assert claims.summary(rows) in (RESULTS / "README.md").read_text(encoding="utf-8")
    for page in {path.parent for path in RESULTS.glob("*/runs.csv")}:
        (tmp_path / page.name).mkdir()
        for table in ("runs.csv", "claims.csv"):
            shutil.copy(page / table, tmp_path / page.name)
    shutil.copy(RESULTS / "README.md", tmp_path)
    assert claims.main([str(tmp_path)]) == 0
    for name in ("claims.csv", "README.md"):
        assert (tmp_path / name).read_bytes() == (RESULTS / name).read_bytes()


def test_the_p_values_are_those_that_the_pages_print(rows):
    for row in (row for row in rows if row["kind"] != MULTIPLIER):
        text = (RESULTS / f"{row['page']}.md").read_text(encoding="utf-8")
        found = re.findall(rf"^\| {re.escape(row['variant'])} − {re.escape(row['against'])} \|(.*)$", text, re.M)
        lines = [[cell.strip() for cell in line.split("|")] for line in found]
        cells = next(cells for cells in lines if not row["on"] or row["on"] in cells)
        if row["on"]:
            assert cells.pop(0) == row["on"]
        if not re.match(r"[+-]", cells[0]):  # newer pages have the answer first
            assert cells.pop(0) == row["answer"]
        if not row["p"]:
            assert cells[:2] == [row["answer"]] * 2 == ["runs diverged"] * 2
            continue
        assert cells[1] == f"{float(row['p_page'] or row['p']):.2g}"
        assert float(cells[0].split()[0]) == pytest.approx(float(row["estimate"]), abs=5e-5)


def best_losses(page: str, n_seeds: int) -> dict[str, list[float]]:
    """Return the test losses of the first fresh seeds of each variant, at the best rate of its tuning runs."""
    with open(RESULTS / page / "runs.csv", newline="", encoding="utf-8") as file:
        runs = sorted(csv.DictReader(file), key=lambda run: (run["variant"], int(run["seed"])))
    best = {}
    for name, own in itertools.groupby(runs, key=lambda run: run["variant"]):
        own = list(own)
        by_rate = {rate: [r["val_loss"] for r in own if r["learning_rate"] == rate and r["phase"] == "tuning"]
                   for rate in {r["learning_rate"] for r in own}}  # fmt: skip
        rate = min(by_rate, key=lambda rate: np.mean([float(loss or "inf") for loss in by_rate[rate]] or [math.inf]))
        best[name] = [
            float(r["test_loss"] or "nan") for r in own if r["learning_rate"] == rate and r["phase"] == "final"
        ][:n_seeds]
    return best


def test_the_differences_are_those_of_the_published_runs(rows):
    """Recompute every difference and interaction from the runs of its page without the code of the sweeps."""
    kinds = []
    for row in (row for row in rows if row["kind"] != MULTIPLIER and row["estimate"]):
        losses = best_losses(row["page"], int(row["seeds"]))
        if row["kind"] == INTERACTION:
            on, first = (f", {text}" for text in row["on"].split(" − "))
            found = mean_difference(losses, row, on) - mean_difference(losses, row, first)
        else:
            found = mean_difference(losses, row)
        assert found == pytest.approx(float(row["estimate"]), abs=2e-6), row
        kinds.append(row["kind"])
    assert len(kinds) >= 30
    assert INTERACTION in kinds


def mean_difference(losses: dict[str, list[float]], row: dict, suffix: str = "") -> float:
    """Return the mean difference of two variants over the seeds; suffix: the end of their names."""
    return np.mean(np.subtract(losses[row["variant"] + suffix], losses[row["against"] + suffix]))


def cells_of(page: str, heading: str) -> dict[str, list[str]]:
    """Return the cells of a table of a page by the first cell of their row."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {name: cells for name, *cells in lines[2:]}


def test_the_multipliers_are_those_of_the_published_runs(rows):
    """Recompute them by NumPy: the gap of the losses, divided by the slope of a parabola in the log of the compute."""
    found = [row for row in rows if row["kind"] == MULTIPLIER]
    assert found
    for row in found:
        costs, best = cells_of(row["page"], "Cost"), cells_of(row["page"], "Test loss at the best learning rate")
        with open(RESULTS / row["page"] / "runs.csv", newline="", encoding="utf-8") as file:
            runs = [run for run in csv.DictReader(file) if run["phase"] == "final"]

        def loss_at_best(name, best=best, runs=runs):
            rate = float(best[name][0].removesuffix(" (extrapolated)"))
            own = [
                r for r in runs if r["variant"] == name and math.isclose(float(r["learning_rate"]), rate, rel_tol=1e-5)
            ]
            return np.mean([float(r["test_loss"]) for r in own])

        def log_compute(name, costs=costs):
            tokens, flops_per_token = (float(costs[name][i].replace(",", "")) for i in (1, 3))
            return math.log(tokens * flops_per_token)

        pairs = [[f"{row[k]}, {name.split(', ')[1]}" for k in ("variant", "against")]
                 for name in costs if name.startswith(f"{row['variant']}, ")]  # fmt: skip
        losses, x = (np.array([[of(name) for name in pair] for pair in pairs]) for of in (loss_at_best, log_compute))
        middle = x.mean(axis=1)
        slope = np.polyval(np.polyder(np.polyfit(middle, losses.mean(axis=1), 2)), middle)
        log_m = (losses[:, 0] - losses[:, 1]) / slope + x[:, 1] - x[:, 0]
        assert log_m.mean() == pytest.approx(float(row["estimate"]), abs=2e-6)


def test_p_values_are_corrected_over_all_pages(rows):
    compared = [row for row in rows if row["kind"] != "placebo"]
    corrected = inference.holm([float(row["p"] or "nan") for row in compared])  # none where runs diverged
    found = [float(row["p_all_pages"] or "nan") for row in compared]
    assert found == pytest.approx(corrected, rel=1e-4, nan_ok=True)
    assert all(float(row["p_all_pages"]) >= float(row["p_page"]) for row in compared if row["p"])
    by_pair = {(row["variant"], row["against"]): row for row in rows}
    small = by_pair["tune: running_mean", "tune: two_pass"]  # 0.0011 nats per token
    assert float(small["p_page"]) < 0.05
    assert (small["answer"], small["significant"]) == ("equivalent", "no")


def test_the_index_has_the_p_values_of_all_pages():
    p_values = {}
    for row in csv.DictReader((RESULTS / "claims.csv").open(encoding="utf-8")):
        if row["p_all_pages"]:
            p_values.setdefault(row["page"], set()).add(f"{float(row['p_all_pages']):.2g}")
    lines = (RESULTS / "README.md").read_text(encoding="utf-8").partition("## Corrected")[0].splitlines()
    listed = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][2:]
    without = [cells for cells in listed if cells[2] == "not a comparison"]
    listed = [cells for cells in listed if cells not in without]
    assert {re.match(r"\[(\w+)\]", cells[-1])[1] for cells in listed} == p_values.keys()
    assert [cells[-1] for cells in without] == ["[scaling](scaling.md)"]
    for cells in listed:
        assert set(cells[2].split(", ")) <= p_values[re.match(r"\[(\w+)\]", cells[-1])[1]], cells


def publish(directory, a: Analysis) -> list[dict]:
    """Write the claims of a sweep as `lm.report --publish` does, and return those of the whole directory."""
    page = directory / a.record["name"]
    page.mkdir()
    (page / "runs.csv").touch()
    (page / "claims.csv").write_text(to_csv(claim_rows(a)))
    return claims.claims(directory)


def test_with_sizes_the_claims_are_the_multipliers(tmp_path):
    """The comparisons at each size are no claims."""
    a = analyze(synthetic_sizes.write(tmp_path / "sweeps" / "sizes", *synthetic_sizes.sweep(1.2)))
    (row,) = publish(tmp_path, a)
    pooled = a.savings[0].at_best.pooled
    assert (row["kind"], row["variant"], row["against"]) == (MULTIPLIER, "gated", "plain")
    assert (float(row["estimate"]), float(row["p"])) == pytest.approx((pooled.value, pooled.p), rel=1e-5)
    assert row["significant"] == "all pages"
    assert f"| gated over plain | compute multiplier {math.exp(pooled.value):.2f} [" in claims.summary([row])


def test_a_quick_budget_finds_nothing(tmp_path):
    a = analyze(synthetic_sizes.write(tmp_path / "sweeps" / "sizes", *synthetic_sizes.sweep(1.2, budget="quick")))
    (row,) = publish(tmp_path, a)
    assert (row["answer"], row["significant"]) == ("no conclusion", "no")


def test_a_page_without_claims_is_refused(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "runs.csv").touch()
    with pytest.raises(UserError, match="old has no claims"):
        claims.claims(tmp_path)


def test_a_sweep_without_comparisons_claims_nothing(tmp_path):
    a = analyze(synthetic_sizes.write(tmp_path / "sweeps" / "sizes", *synthetic_sizes.without_comparisons()))
    assert publish(tmp_path, a) == []


def test_pages_with_looks_and_a_placebo(tmp_path, capsys):
    """Each comparison has the seeds of its look; a placebo is listed and not counted."""
    record, runs = sweep()
    publish(tmp_path, analyze(write(tmp_path / "sweeps" / "fixed", record | {"name": "fixed"}, runs)))
    fewer = [r for r in runs if not (r["phase"] == "final" and r["variant"] == "gated" and r["seed"] == 4)]
    growing = record | {"name": "growing", "looks": [4, 5]}
    publish(tmp_path, analyze(write(tmp_path / "sweeps" / "growing", growing, fewer)))
    named = {"wide": "placebo"}
    with_placebo = [r | {"variant": named.get(r["variant"], r["variant"])} for r in runs]
    variants = {named.get(name, name): v for name, v in record["variants"].items()}
    changed = {"comparisons": [["gated", "plain"]], "variants": variants, "placebo": "placebo"}
    workdir = write(tmp_path / "sweeps" / "checked", record | {"name": "checked"} | changed, with_placebo)
    speeds = (workdir / "speeds.json").read_text().replace("wide", "placebo")
    (workdir / "speeds.json").write_text(speeds)
    a = analyze(workdir)
    publish(tmp_path, a)

    (tmp_path / "README.md").write_text("# Results\n")
    assert claims.main([str(tmp_path)]) == 2
    assert f"{tmp_path / 'README.md'} has no lines {claims.BEGIN}" in capsys.readouterr().err
    (tmp_path / "README.md").write_text(f"# Results\n\n{claims.BEGIN}\nold\n{claims.END}\n\nMore.\n")
    assert claims.main([str(tmp_path)]) == 0
    index = (tmp_path / "README.md").read_text()
    assert "5 claims on 3 pages: 3 are significant" in index
    assert "False positives: 0 of 1 placebos are significant; at most 1 in 20 is expected." in index
    assert "old" not in index
    assert index.endswith(f"{claims.END}\n\nMore.\n")
    with open(tmp_path / "claims.csv", newline="") as file:
        rows = {(row["page"], row["variant"]): row for row in csv.DictReader(file)}
    assert [rows["growing", name]["seeds"] for name in ("gated", "wide")] == ["4", "5"]
    assert {row["kind"] for row in rows.values()} == {DIFFERENCE, "placebo"}
    for c in analyze(tmp_path / "sweeps" / "growing").comparisons:
        row = rows["growing", c.variant]
        assert float(row["p"]) == pytest.approx(c.difference.p, rel=1e-5)
        assert float(row["p_page"]) == pytest.approx(c.p_adjusted, rel=1e-5)
        assert float(row["at_optimum"]) == pytest.approx(c.at_optimum.mean, rel=1e-5)
    placebo = rows["checked", "placebo"]
    assert (placebo["p_page"], placebo["p_all_pages"], placebo["significant"]) == ("", "", "no")
    assert float(placebo["p"]) == pytest.approx(a.placebo.difference.p, rel=1e-5)
