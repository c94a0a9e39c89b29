"""The published pages, the list of their claims, and the placebos: they are what the commands write
from the runs.
"""

import itertools
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from running import ROOT
from scipy import stats
from synthetic_sweep import sweep

from benchmarks import claims, placebo
from benchmarks.page import rows_of
from lm.sweeps import repetition
from lm.sweeps.addition import published_study, read_study
from lm.sweeps.analysis import analyze
from lm.sweeps.plan import plan_sweep
from lm.sweeps.record import read_page_record
from lm.sweeps.report import claim_rows, to_csv
from lm.sweeps.results import append_runs
from lm.system.errors import UserError

RESULTS = ROOT / "docs" / "results"
RATE = "optimizer.learning_rate"
PAGES = sorted(path.parent.name for path in RESULTS.glob("*/sweep.json"))


def test_the_committed_pages_are_what_the_command_writes(tmp_path):
    """If this fails: python3 -m benchmarks.claims and python3 -m benchmarks.placebo."""
    shutil.copytree(RESULTS, tmp_path / "results")
    assert claims.main([str(tmp_path / "results")]) == 0
    assert placebo.main([str(tmp_path / "results")]) == 0
    for path in (path for path in RESULTS.rglob("*") if path.suffix in (".md", ".csv", ".json")):
        assert (
            tmp_path / "results" / path.relative_to(RESULTS)
        ).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("page", PAGES)
def test_the_differences_are_those_of_the_published_runs(page):
    """Recompute them from runs.csv by SciPy, without the code of the sweeps."""
    losses = {}
    runs = sorted(
        rows_of(RESULTS / page / "runs.csv"), key=lambda run: (run["variant"], int(run["seed"]))
    )
    for name, own in itertools.groupby(runs, key=lambda run: run["variant"]):
        own = list(own)
        tuned = {}
        for run in (run for run in own if run["phase"] == "tuning"):
            tuned.setdefault(run[RATE], []).append(float(run["val_loss"] or "inf"))
        final = [run for run in own if run["phase"] == "final"]
        rates = sorted({run[RATE] for run in final}, key=float)
        rate = rates[len(rates) // 2]  # the vertex, or the middle of untuned rates
        if tuned and len(rates) > 1:  # an earlier page, with fresh seeds at several rates
            rate = min(tuned, key=lambda rate: np.mean(tuned[rate]))
        losses[name] = [float(run["test_loss"] or "nan") for run in final if run[RATE] == rate]
    record = json.loads((RESULTS / page / "sweep.json").read_text())
    tested = 0
    for row in rows_of(RESULTS / page / "claims.csv"):
        if row["mean"] and row["cell"] not in ("mean", "first to last"):
            names = [
                f"{row[key]}, {row['cell']}".removesuffix(", ") for key in ("variant", "against")
            ]
            controls = [names[1]]
            if record.get("control") == "mean":
                controls += [one for one, like in record["placebos"] if like == names[1]]
                controls = [name for name in controls if name != names[0]]
            a, b = losses[names[0]], np.mean([losses[name] for name in controls], axis=0)
            n = len(a)
            # The variance of the mean over seeds, plus that of tuning (Satterthwaite 1946).
            of_seeds = np.var(np.subtract(a, b), ddof=1) / n
            se = np.sqrt(of_seeds + float(row["tuning_variance"]))
            t = stats.t(float(row["df"]), loc=np.mean(np.subtract(a, b)), scale=se)
            p = stats.ttest_rel(a, b).pvalue
            if se**2 > of_seeds:
                p = 2 * stats.t.sf(abs(t.mean()) / se, float(row["df"]))
            assert [float(row[key]) for key in ("mean", "p", "low", "high")] == pytest.approx(
                [t.mean(), p, *t.interval(0.95)], rel=1e-7
            )
            tested += 1
    assert tested


def test_a_change_over_lengths_is_welchs_t_test_of_the_first_and_the_last():
    (page,) = [page for page in PAGES if page == claims.SURVIVAL]
    rows = rows_of(RESULTS / page / "claims.csv")
    first, *_, last = json.loads((RESULTS / page / "sweep.json").read_text())["cells"]
    by_key = {(row["variant"], row["against"], row["cell"]): row for row in rows}
    changes = [row for row in rows if row["cell"] == "first to last"]
    for row in changes:
        ends = [by_key[row["variant"], row["against"], cell] for cell in (last, first)]
        means, errors, dfs = ([float(end[key]) for end in ends] for key in ("mean", "se", "df"))
        variances = np.square(errors)
        df = variances.sum() ** 2 / (variances**2 / dfs).sum()
        t = stats.t(df, means[0] - means[1], np.sqrt(variances.sum()))
        p = 2 * stats.t.sf(abs(t.mean()) / t.std() * np.sqrt(df / (df - 2)), df)
        assert [float(row[key]) for key in ("mean", "p", "low", "high")] == pytest.approx(
            [t.mean(), p, *t.interval(0.95)], rel=1e-7
        )
        assert float(row["ratio"]) == pytest.approx(means[0] / means[1])
    assert changes


def test_p_values_over_all_pages_are_holms():
    """Multiply the k-th smallest of n p-values by n - k + 1; none is smaller than the one before."""
    rows = [row for row in rows_of(RESULTS / "claims.csv") if row["kind"] == "claim"]
    p, found = (
        np.array([float(row[key]) for row in rows if row["p"]]) for key in ("p", "p_all_pages")
    )
    order = np.argsort(p)
    expected = np.maximum.accumulate(np.minimum(1, p[order] * np.arange(len(p), 0, -1)))
    np.testing.assert_allclose(found[order], expected, rtol=1e-8)


def test_longer_training_is_compared_by_welchs_t_test():
    differences = []
    for page, ending in ((claims.STUDY, f", {claims.CELL_OF_BOTH}"), (claims.LONGER, "")):
        runs = [run for run in rows_of(RESULTS / page / "runs.csv") if run["phase"] == "final"]
        losses = [{run["seed"]: float(run["test_loss"]) for run in runs if run["variant"] == name + ending}
                  for name in ("token shift", "base")]  # fmt: skip
        differences.append([loss - losses[1][seed] for seed, loss in losses[0].items()])
    short, long = map(np.mean, differences)
    low, high = stats.ttest_ind(*reversed(differences), equal_var=False).confidence_interval()
    line = next(line for line in claims.longer(RESULTS).splitlines() if "| token shift |" in line)
    # The published interval has the error of tuning, too, so that it is a little wider.
    *_, found, of_ratio = line.strip("| ").split(" | ")
    ratio, *ends = re.findall(r"-?[\d.]+", of_ratio)
    # Fieller's interval of the ratio has 0 or 1 if and only if that of the lead or the change has 0.
    assert float(ends[0]) < float(ratio) < 1 < float(ends[1])
    found_low, found_high = map(float, re.findall(r"[-+][\d.]+", found)[1:])
    assert (found.split()[0], ratio) == (f"{long - short:+.4f}", f"{long / short:.2f}")
    assert low - 0.003 < found_low <= low
    assert high <= found_high < high + 0.003


def test_placebos_are_read_in_blocks_of_five(tmp_path):
    """20 pairs: the first block differs by 0.1, the others by noise of both signs."""
    differences = [0.1, 0.11, 0.09, 0.1, 0.1] + [0.01, -0.01, 0.02, -0.02, 0.0] * 3
    rows = [{"variant": name, "seed": seed, "test_loss": 2.0 + (name != "SiLU") * d}
            for seed, d in enumerate(differences) for name in ("SiLU", "relabeled")]  # fmt: skip
    rows.append({"variant": "SiLU", "seed": 20, "test_loss": None})  # it diverged
    rows.append({"variant": "relabeled", "seed": 20, "test_loss": 2.0})
    (tmp_path / "placebo").mkdir()
    (tmp_path / "placebo" / "many.csv").write_text(to_csv(rows))
    lines = placebo.table(tmp_path).splitlines()
    low, high = stats.binomtest(1, 4).proportion_ci()
    assert f"| 1 of 4 ({100 * low:.1f} to {100 * high:.1f} %) |" in lines[2]
    assert lines[2].startswith(f"| [many](placebo/many.csv) | 20 | {np.mean(differences):+.4f} [")


def test_the_runs_of_a_sweep_are_added(tmp_path):
    _, runs = sweep()
    append_runs(tmp_path, runs)
    placebo.add(tmp_path, tmp_path / "placebo" / "new.csv")
    rows = rows_of(tmp_path / "placebo" / "new.csv")
    assert {(row["phase"], row["learning_rate"]) for row in rows} == {("final", "0.002")}
    assert len(rows) == 20


def test_an_addition_counts_as_a_claim_and_its_placebo_is_that_of_its_study(tmp_path):
    for name in ("gates", "gates+new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.json").touch()
        (tmp_path / name / "claims.csv").write_text(to_csv(claim_rows(analyze(*sweep()))))
    kinds = {page: [row["kind"] for row in claims.claims(tmp_path) if row["page"] == page]
             for page in ("gates", "gates+new")}  # fmt: skip
    assert kinds == {"gates": ["claim", "claim", "placebo"], "gates+new": ["claim", "claim"]}
    assert placebo.table(tmp_path).count("\n") == 2


def test_a_new_file_of_placebos_needs_a_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        placebo.main([str(tmp_path), "--add", str(tmp_path)])
    assert "--name NAME" in capsys.readouterr().err


def test_the_index_and_the_page_of_the_study_name_the_same_claims():
    index = (RESULTS / "README.md").read_text()
    (row,) = [line for line in index.splitlines() if line.endswith(f"[{claims.STUDY}]({claims.STUDY}.md) |")
              and line.startswith("| Which of ")]  # fmt: skip
    lower, higher = row.split(" Higher by more than ")
    shown, *_ = higher.split(" Means by text")
    rows = [r for r in rows_of(RESULTS / claims.STUDY / "claims.csv") if r["kind"] == "claim"]
    for r in rows:
        side = lower if r["mean"] and float(r["mean"]) < 0 else shown
        is_listed = r["verdict"] in ("better", "worse", "different")
        assert bool(re.search(rf"[:,;] {re.escape(r['variant'])}\b", side)) == is_listed, r[
            "variant"
        ]


def test_what_one_text_carries_is_told_wherever_a_claim_is_listed():
    """If the mean of one text is less than a third of the other's, both have both numbers."""
    own = [r for r in rows_of(RESULTS / claims.STUDY / "claims.csv") if r["mean"]]
    index = (RESULTS / "README.md").read_text()
    page = (RESULTS / f"{claims.STUDY}.md").read_text().partition("* For ")[0]
    n_told = 0
    for claim in [r for r in own if r["kind"] == "claim" and r["verdict"] != "not shown"]:
        pair = claim["variant"], claim["against"]
        texts = {}
        for r in own:
            if r["kind"] == "cell" and (r["variant"], r["against"]) == pair:
                texts.setdefault(r["cell"].partition(",")[0], []).append(float(r["mean"]))
        small, large = sorted(abs(np.mean(means)) for means in texts.values())
        is_told = 3 * small < large
        n_told += is_told
        for text in (index, page):
            name = re.escape(claim["variant"])
            assert bool(re.search(rf"[ ,:] {name} \(Tiny", text)) == is_told, claim["variant"]
    assert n_told > 3


def test_numbers_of_all_tables_are_numbers():
    """Not text, as an apostrophe before a minus sign would make them."""
    for path in [RESULTS / "claims.csv", *RESULTS.glob("*/claims.csv")]:
        for row in rows_of(path):
            for key in ("mean", "low", "high", "p", "p_holm"):
                assert row[key] == "" or np.isfinite(float(row[key])), (path, key, row[key])


def test_the_ratios_in_the_index_are_those_of_the_table():
    index = (RESULTS / "README.md").read_text()
    (row,) = [line for line in index.splitlines() if line.endswith(f"[{claims.LONGER}]({claims.LONGER}.md) |")
              and line.startswith("| Do the six")]  # fmt: skip
    table = claims.longer(RESULTS)
    ratios = re.findall(r"-?[\d.]+ \[-?[\d.]+, -?[\d.]+\]", row)
    assert len(ratios) == 5
    assert [ratio for ratio in ratios if f"| {ratio} |" not in table] == []


STUDIES = [page for page in PAGES if page.startswith("changes_2026") and "+" not in page]


@pytest.mark.parametrize("study", STUDIES)
def test_every_claim_of_a_study_can_be_repeated(study, monkeypatch):
    """Also those that joined its page later, and those whose width is matched to a third variant."""
    monkeypatch.chdir(ROOT)
    path, page = published_study(study)
    plan = plan_sweep(str(path), read_study(path), "full")
    monkeypatch.setattr(repetition, "plan_sweep", lambda *_: plan)
    pairs = read_page_record(page)["comparisons"]
    assert {name for pair in pairs for name in pair} <= plan.variants.keys()
    for arms in dict.fromkeys(tuple(plan.variants[name].arm for name in pair) for pair in pairs):
        repeat, _ = repetition.plan_repeat(study, arms[0], None, 10, 5, against=arms[1])
        assert [v.arm for v in repeat.variants.values()] == [*arms]
        widths = {v.match for v in repeat.variants.values() if v.match}
        assert widths <= repeat.variants.keys() | repeat.targets.keys()


def test_a_change_with_several_controls_is_repeated_against_one_of_them(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(repetition, "plan_sweep", lambda *_: SimpleNamespace(variants={}))
    for against, said in (
        (None, "compared with one key head and base; add --against 'one key head'"),
        ("bass", "does not compare latent attention with 'bass'"),
    ):
        with pytest.raises(UserError, match=said):
            repetition.plan_repeat(claims.STUDY, "latent attention", None, 5, 10, against)


def test_lines_of_the_same_claim_are_pooled(tmp_path):
    (tmp_path / claims.STUDY).mkdir()
    for name in ("runs.csv", "sweep.json"):
        (tmp_path / claims.STUDY / name).write_bytes((RESULTS / claims.STUDY / name).read_bytes())
    first = repetition.Repeat(claims.STUDY, "token shift", "base", claims.CELL_OF_BOTH, 5, (-0.01, -0.03),
                              "2026-11-28", "abc", "jax 1", "cpu A")  # fmt: skip
    other = first._replace(seed=9, differences=(-0.02, -0.04), processor="cpu B")
    path = tmp_path / claims.REPEATS
    path.write_text(repetition.to_lines([first, other]))
    (line,) = [
        line
        for line in claims.repeats(tmp_path).splitlines()
        if "token shift" in line and "|" in line
    ]
    low, high = stats.t(3, -0.025, np.std([1, 2, 3, 4], ddof=1) * 0.01 / 2).interval(0.95)
    assert f"| 10 / 4 | -0.0256 [-0.0384, -0.0127] | -0.0250 [{low:+.4f}, {high:+.4f}] |" in line
    path.write_text(repetition.to_lines([first, first]))
    with pytest.raises(UserError, match="twice"):
        claims.repeats(tmp_path)
