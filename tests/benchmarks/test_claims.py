"""The published pages, the list of their claims, and the placebos: they are what the commands write from the runs."""

import csv
import itertools
import shutil

import numpy as np
import pytest
from running import ROOT
from scipy import stats
from synthetic_sweep import sweep

from benchmarks import claims, placebo
from lm.sweeps import statistics
from lm.sweeps.analysis import analyze
from lm.sweeps.report import publish, to_csv
from lm.sweeps.results import append_runs

RESULTS = ROOT / "docs" / "results"
RATE = "optimizer.learning_rate"
PAGES = sorted(path.parent.name for path in RESULTS.glob("*/sweep.json"))


def rows_of(path) -> list[dict]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_committed_pages_are_what_the_command_writes(tmp_path):
    """If this fails: python3 -m benchmarks.claims and python3 -m benchmarks.placebo."""
    shutil.copytree(RESULTS, tmp_path / "results")
    assert claims.main([str(tmp_path / "results")]) == 0
    assert placebo.main([str(tmp_path / "results")]) == 0
    for path in (path for path in RESULTS.rglob("*") if path.suffix in (".md", ".csv", ".json")):
        assert (tmp_path / "results" / path.relative_to(RESULTS)).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("page", PAGES)
def test_the_differences_are_those_of_the_published_runs(page):
    """Recompute them from runs.csv by SciPy, without the code of the sweeps."""
    losses = {}
    runs = sorted(rows_of(RESULTS / page / "runs.csv"), key=lambda run: (run["variant"], int(run["seed"])))
    for name, own in itertools.groupby(runs, key=lambda run: run["variant"]):
        own = list(own)
        tuned = {}
        for run in (run for run in own if run["phase"] == "tuning"):
            tuned.setdefault(run[RATE], []).append(float(run["val_loss"] or "inf"))
        final = [run for run in own if run["phase"] == "final"]
        rates = sorted({run[RATE] for run in final}, key=float)
        rate = min(tuned, key=lambda rate: np.mean(tuned[rate])) if tuned else rates[len(rates) // 2]
        losses[name] = [float(run["test_loss"] or "nan") for run in final if run[RATE] == rate]
    tested = 0
    for row in rows_of(RESULTS / page / "claims.csv"):
        if row["mean"] and row["cell"] != "mean":
            names = [f"{row[key]}, {row['cell']}".removesuffix(", ") for key in ("variant", "against")]
            expected = stats.ttest_rel(*(losses[name] for name in names))
            ends = expected.confidence_interval()
            assert float(row["mean"]) == pytest.approx(
                np.mean(np.subtract(*(losses[name] for name in names))), rel=1e-8
            )
            assert [float(row[key]) for key in ("p", "low", "high")] == pytest.approx(
                [expected.pvalue, *ends], rel=1e-8
            )
            tested += 1
    assert tested


def test_what_was_significant_on_the_pages_of_the_earlier_method_still_is():
    rows = [row for row in rows_of(RESULTS / "claims.csv") if row["kind"] == "claim"]
    significant = {(row["page"], row["variant"]) for row in rows if row["p_holm"] and float(row["p_holm"]) < 0.05}
    earlier = {
        "cmu_15780": ["Adam 1e-3"], "layernorm_algorithms": ["swap: running_mean"], "mup": ["muP, 128", "muP, 64"],
        "positions": ["sinusoidal", "learned", "none"], "swiglu_texts": ["SwiGLU"],
        "pre_vs_post_norm": ["post, Adam, warm-up", "parallel, Adam, warm-up"], "scale_prenorm": ["pre-norm"],
        "scale_swiglu": ["SwiGLU"], "swiglu_vs_silu": ["SwiGLU", "GLU", "GELU", "ReLU", "ReLU^2"],
    }  # fmt: skip
    assert {(page, name) for page, names in earlier.items() for name in names} <= significant


@pytest.fixture
def results(tmp_path):
    """Two published sweeps, and the index without its table."""
    for name in ("one", "two"):
        record, runs = sweep()
        publish(analyze(record | {"name": name}, runs), tmp_path)
    marked = "<!-- written by python3 -m benchmarks.claims -->\nold\n<!-- end -->"
    (tmp_path / "README.md").write_text(f"# Results\n\n{marked}\n\nMore.\n")
    return tmp_path


def test_claims_are_corrected_over_all_pages_and_placebos_are_counted(results, capsys):
    assert claims.main([str(results)]) == 0
    rows = rows_of(results / "claims.csv")
    compared = [row for row in rows if row["kind"] == "claim"]
    assert [(row["page"], row["variant"]) for row in compared] == [
        (p, v) for p in ("one", "two") for v in ("gated", "wide")
    ]
    expected = statistics.holm([float(row["p"]) for row in compared])
    assert [float(row["p_all_pages"]) for row in compared] == pytest.approx(expected)
    index = (results / "README.md").read_text()
    assert "4 claims on 2 pages: 4 are significant" in index
    assert "0 of the 2 placebos" in index
    assert "old" not in index
    assert index.endswith("<!-- end -->\n\nMore.\n")


def test_placebos_are_read_in_blocks_of_five(results, tmp_path):
    """20 pairs: the first block differs by 0.1, the others by noise of both signs."""
    differences = [0.1, 0.11, 0.09, 0.1, 0.1] + [0.01, -0.01, 0.02, -0.02, 0.0] * 3
    rows = [{"variant": name, "seed": seed, "test_loss": 2.0 + (name != "SiLU") * d}
            for seed, d in enumerate(differences) for name in ("SiLU", "relabeled")]  # fmt: skip
    (results / "placebo").mkdir()
    (results / "placebo" / "many.csv").write_text(to_csv(rows))
    lines = placebo.table(results).splitlines()
    low, high = stats.binomtest(1, 4).proportion_ci()
    assert f"| 1 of 4 ({100 * low:.1f} to {100 * high:.1f} %) |" in lines[2]
    assert lines[2].startswith(f"| [many](placebo/many.csv) | 20 | {np.mean(differences):+.4f} [")
    assert [line.split("]")[0] for line in lines[3:]] == ["| [one", "| [two"]


def test_the_runs_of_a_sweep_are_added(results, tmp_path):
    _, runs = sweep()
    workdir = tmp_path / "work"
    workdir.mkdir()
    append_runs(workdir, runs)
    placebo.add(workdir, results / "placebo" / "new.csv")
    rows = rows_of(results / "placebo" / "new.csv")
    assert {(row["phase"], row["learning_rate"]) for row in rows} == {("final", "0.002")}
    assert len(rows) == 20
