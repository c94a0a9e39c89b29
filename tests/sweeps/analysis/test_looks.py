"""Looks at growing numbers of seeds: which comparisons stop where, with which bound, and how often they are wrong."""

import csv
import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats
from synthetic_sweep import GRID, LOSSES, diverge, run, select, sweep, write

from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.looks import PairTest, follow, seeds_needed
from lm.sweeps.report import figures, pages, tables
from lm.sweeps.statistics import inference
from lm.sweeps.statistics.margins import p_beyond, p_equivalent
from lm.sweeps.statistics.moderation import fit_prior
from lm.sweeps.storage.records import read_sweep
from lm.sweeps.storage.results import Results

BASE = [2.00, 2.03, 1.98, 2.05, 1.95, 2.01, 1.99, 2.02]
NOISE = [0.010, -0.008, 0.012, -0.015, 0.002, 0.006, -0.011, 0.004]
GAIN = [0.10, 0.11, 0.09, 0.10, 0.12, 0.11, 0.10, 0.09]
GROWING = {
    "plain": BASE,
    "gated": [b - d for b, d in zip(BASE, GAIN, strict=True)],
    "wide": [b + d for b, d in zip(BASE, NOISE, strict=True)],
}
LOOKS = [5, 6, 8]


def growing(n_seeds: dict[str, int], losses=GROWING, **changes) -> tuple[dict, list[dict]]:
    """Return a sweep with looks at 5, 6 and 8 seeds, and its runs of so many seeds of each variant."""
    record, runs = sweep(losses, n=8)
    used = {name: range(n) for name, n in n_seeds.items()}
    kept = [r for r in runs if r["phase"] == "tuning" or r["seed"] in used[r["variant"]]]
    return record | {"looks": LOOKS} | changes, kept


def needed(tmp_path, record, runs) -> dict[str, int]:
    workdir = write(tmp_path, record, runs)
    return seeds_needed(read_sweep(workdir / "sweep.json"), Results(workdir))


def test_only_variants_of_undecided_comparisons_need_more_seeds(tmp_path):
    """gated differs from plain by 0.1, wide does not."""
    names = ("plain", "gated", "wide")
    for i, (has, expected) in enumerate((
        ((0, 0, 0), (5, 5, 5)),
        ((5, 5, 4), (5, 5, 5)),  # wide is not finished, so its comparison is not tested
        ((5, 5, 5), (6, 5, 6)),
        ((6, 5, 5), (6, 5, 6)),
        ((6, 5, 6), (8, 5, 8)),
        ((8, 5, 8), (8, 5, 8)),
        ((8, 8, 8), (8, 5, 8)),  # runs that are there by chance change nothing
    )):  # fmt: skip
        found = needed(tmp_path / f"{i}", *growing(dict(zip(names, has, strict=True))))
        assert tuple(found.values()) == expected


def test_without_tuning_the_first_look_is_needed(tmp_path):
    record, runs = growing({"plain": 5, "gated": 5, "wide": 5})
    runs.remove(select(runs, "tuning", "gated")[0])
    assert needed(tmp_path / "s", record, runs) == {"plain": 6, "gated": 5, "wide": 6}


def test_more_seeds_do_not_help_a_comparison_whose_runs_diverged(tmp_path):
    record, runs = growing({"plain": 5, "gated": 5, "wide": 5})
    diverge(select(runs, "final", "wide")[0])
    assert needed(tmp_path / "s", record, runs) == dict.fromkeys(GROWING, 5)


def test_the_report_names_the_look_and_uses_its_bound(tmp_path):
    """p by hand: of the runs of that look, scaled by 0.05 over the bound 0.05 n / (5 + 6 + 8), then Holm's.

    The variances are moderated by those of the 5 seeds that all variants have, with their largest weight, 4.
    """
    a = analyze(write(tmp_path / "s", *growing({"plain": 8, "gated": 5, "wide": 8})))
    gated, wide = a.comparisons
    assert [(c.look, c.n_seeds, c.difference.n) for c in (gated, wide)] == [(1, 5, 5), (3, 8, 8)]
    pairs = itertools.combinations(GROWING.values(), 2)
    prior = np.mean([stats.tvar(np.subtract(x[:5], y[:5])) for x, y in pairs])
    for c, n, factor in ((gated, 5, 2), (wide, 8, 1)):
        d = np.subtract(GROWING[c.variant], BASE)[:n]
        error, df = math.sqrt((4 * prior + (n - 1) * stats.tvar(d)) / (n + 3) / n), n + 3
        share = n / sum(LOOKS)
        p = 2 * stats.t.sf(abs(d.mean()) / error, df) / share
        assert c.difference.p == pytest.approx(min(1, p), rel=1e-6)
        assert c.p_adjusted == pytest.approx(min(1, factor * p), rel=1e-6)
        half = stats.t.isf(0.025 * share, df) * error
        assert (c.difference.low, c.difference.high) == pytest.approx((d.mean() - half, d.mean() + half), rel=1e-6)
        smaller = stats.t.sf((0.005 - abs(d.mean())) / error, df) / share
        assert c.p_equivalent == pytest.approx(min(1, 2 * smaller), rel=1e-6)
        assert f"(n = {n} paired seeds, look {c.look} of 3, difference " in c.answer
    assert (gated.verdict, wide.verdict) == ("beyond the margin", "undecided")
    table = tables.comparisons(a)
    assert [row[1] for row in table.rows] == ["5 (look 1)", "8 (look 3)"]
    assert "are 0.013, 0.016, 0.021, 0.05 in total" in table.notes["seeds"]
    assert "looks [5, 6, 8]," in "\n".join(tables.reproduction(a))
    assert [len(v.losses) for v in a.variants.values()] == [8, 5, 8]
    assert len(figures._seed_differences(a, gated)) == 5
    assert "seeds" not in tables.comparisons(analyze(write(tmp_path / "fixed", *sweep()))).header


def test_a_report_needs_the_seeds_of_undecided_comparisons(tmp_path):
    workdir = write(tmp_path / "s", *growing({"plain": 6, "gated": 5, "wide": 6}))
    with pytest.raises(Exception, match="is not finished: plain lacks runs, wide lacks runs; resume with"):
        analyze(workdir)


def test_an_equivalent_comparison_gets_no_more_seeds(tmp_path):
    """It is equivalent within the declared margin; within a smaller one it is undecided."""
    almost = {
        "plain": BASE,
        "gated": [b - 0.1 + d / 20 for b, d in zip(BASE, GAIN, strict=True)],
        "wide": [b + d / 20 for b, d in zip(BASE, NOISE, strict=True)],
    }
    five = dict.fromkeys(GROWING, 5)
    assert needed(tmp_path / "s", *growing(five, almost)) == five
    assert needed(tmp_path / "t", *growing(five, almost, margin=0.0005)) == {"plain": 6, "gated": 5, "wide": 6}
    wide = analyze(tmp_path / "s").comparisons[1]
    assert (wide.verdict, wide.look) == ("equivalent", 1)


def test_more_seeds_do_not_help_a_comparison_of_two_texts(tmp_path):
    record, runs = growing(dict.fromkeys(GROWING, 5))
    data = record["variants"]["wide"]["data"] | {"fingerprint": "f" * 16}
    record["variants"]["wide"] = record["variants"]["wide"] | {"data": data}
    assert needed(tmp_path / "s", record, runs) == dict.fromkeys(GROWING, 5)


def test_a_decided_comparison_stays_decided():
    """Its corrected p-values stay, whatever the p-values of later looks are, and whatever the others do."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        p = 10.0 ** -draw.uniform(0, 4, (4, 3, 2))
        stopped = {}

        def test(k: int, i: int, p=p) -> PairTest:
            both = [inference.Difference(1.0, -1.0, 3.0, p[k, i, j], 5, 1.0, 4) for j in range(2)]
            return PairTest(i + 1, 5, *both)

        for n_looks in (1, 2, 3):
            for k, found in enumerate(follow(4, n_looks, test, margin=0.005)):
                if k in stopped:
                    assert found == stopped[k]
                elif found.is_significant:
                    stopped[k] = found
                else:
                    assert (found.verdict, found.look) == ("undecided", n_looks)


def test_the_shares_keep_the_error_rate_below_0_05():
    """With normal differences the chance that any of four looks rejects a true hypothesis is slightly below 0.05."""
    looks = (5, 8, 12, 20)
    shares = inference.shares(looks)
    assert sum(shares) == pytest.approx(1)
    x = np.random.default_rng(1).normal(size=(20_000, 20))
    p = np.stack([stats.ttest_1samp(x[:, :n], 0, axis=1).pvalue for n in looks], axis=1)
    wrong = (p < 0.05 * np.array(shares)).any(axis=1).mean()
    assert 0.035 < wrong < 0.046
    assert (p < 0.05).any(axis=1).mean() > 0.1  # what looks without bounds would do
    found = [inference.paired_difference(row[:8], np.zeros(8), share=shares[1]) for row in x[:200]]
    assert [d.p < 0.05 for d in found] == [not d.low <= 0 <= d.high for d in found]
    assert [d.p < 0.05 for d in found] == (p[:200, 1] < 0.05 * shares[1]).tolist()
    whole = [inference.paired_difference(row[:8], np.zeros(8)) for row in x[:200]]
    for test in (p_beyond, p_equivalent):
        assert [test(d, 0.5) for d in found] == pytest.approx([min(1, test(d, 0.5) / shares[1]) for d in whole])


def with_placebo(shift: float = 0.0) -> tuple[dict, list[dict]]:
    record, runs = sweep()
    variant = record["variants"]["plain"]
    changes = variant["changes"] | {"model.rope_pairing": "halves"}
    runs += [r | {"variant": "placebo"} for r in runs if r["variant"] == "plain" and r["phase"] == "tuning"]
    for rate, seed in itertools.product(GRID, range(5)):
        worse = 0.2 * abs(math.log2(rate / 0.002))
        loss = LOSSES["wide"][seed] + worse + shift
        runs.append(run("final", "wide", rate, seed, loss) | {"variant": "placebo"})
    variants = record["variants"] | {"placebo": variant | {"changes": changes}}
    return record | {"placebo": "placebo", "variants": variants}, runs


def write_with_placebo(path, shift: float = 0.0):
    workdir = write(path, *with_placebo(shift))
    speeds = dict.fromkeys(("plain", "gated", "wide", "placebo"), 1000.0)
    Results(workdir).set_speeds(
        {"alone": 500.0, "at_once": 4, "variants": speeds, "quartiles": {name: [900.0, 1100.0] for name in speeds}}
    )
    return workdir


def test_a_placebo_is_a_row_of_its_own_and_not_one_of_the_comparisons(tmp_path):
    """Its p is without correction, here that of wide, which has the same losses; the comparisons are as without it."""
    a, without = analyze(write_with_placebo(tmp_path / "s")), analyze(write(tmp_path / "t", *sweep()))
    assert a.comparisons == without.comparisons
    p = without.comparisons[1].difference.p
    assert a.placebo.p_adjusted == a.placebo.difference.p == pytest.approx(p, rel=1e-6)
    assert a.placebo.answer.startswith("Placebo, whose true difference is 0: placebo - plain is +0.0002 (n = 5 ")
    assert a.placebo.answer.endswith("not significant, as it should be.")
    table = tables.comparisons(a)
    assert [row[0] for row in table.rows] == ["gated − plain", "wide − plain", "placebo − plain"]
    assert "for 2 comparisons" in table.notes["p"]
    assert "plain with model.rope_pairing = halves, which changes the program" in table.notes["comparison"]
    assert a.placebo.answer in pages.to_markdown(a, "")
    assert a.placebo.answer in pages.to_html(a, dict.fromkeys(pages.CAPTIONS, b"")).replace("&#x27;", "'")


def test_a_placebo_that_differs_is_called_a_false_positive(tmp_path):
    a = analyze(write_with_placebo(tmp_path / "s", shift=0.1))
    assert a.placebo.is_significant
    assert a.placebo.answer.endswith("a false positive, as 1 in 20 sweeps may have.")


def test_a_placebo_from_another_machine_is_reported(tmp_path):
    workdir = write_with_placebo(tmp_path / "s")
    for path in (workdir / "results").iterdir():
        runs = json.loads(path.read_text())
        for r in runs:
            r["provenance"] = {"host": "one", "processor": f"{r['variant'] == 'placebo'}", "device": "cpu", "git": None}
        path.write_text(json.dumps(runs))
    (warning,) = (text for text in analyze(workdir).warnings if "machines" in text)
    assert warning.startswith("placebo and plain: the runs of 5 of 5 seeds were trained on different machines")


def test_a_placebo_stays_at_the_first_look_with_the_whole_error(tmp_path):
    record, runs = with_placebo()
    needs = needed(tmp_path / "s", record | {"looks": [4, 5]}, runs)
    assert (needs["wide"], needs["plain"], needs["placebo"]) == (5, 5, 4)
    workdir = write_with_placebo(tmp_path / "t")
    text = (workdir / "sweep.json").read_text().replace('"name": "gates"', '"name": "gates", "looks": [4, 5]')
    (workdir / "sweep.json").write_text(text)
    a = analyze(workdir)
    placebo = a.placebo
    assert "\n\n¹⁰ over seeds and text [95 % CI]: The interval" in pages.to_markdown(a, "")  # the tenth footnote
    prior = fit_prior([losses[:4] for losses in LOSSES.values()])
    p = inference.paired_difference(LOSSES["wide"][:4], LOSSES["plain"][:4], prior=prior).p
    assert (placebo.difference.n, placebo.difference.p) == (4, pytest.approx(p, rel=1e-6))


def test_runs_of_a_growing_sweep_are_published_with_all_seeds(tmp_path):
    a = analyze(write(tmp_path / "s", *growing({"plain": 8, "gated": 5, "wide": 8})))
    rows = list(csv.DictReader(tables.to_csv(tables.run_rows(a)).splitlines()))
    final = [row for row in rows if row["phase"] == "final" and row["learning_rate"] == "0.002"]
    assert [sum(row["variant"] == name for row in final) for name in GROWING] == [8, 5, 8]
