"""The analysis of synthetic sweeps: claims, families of corrections, what has no result, and
warnings.
"""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats
from synthetic_sweep import DIVERGED, GAPS, GRID, PLAIN, RATE, changed, sweep

from lm.sweeps import report, statistics
from lm.sweeps.analysis import (
    BESIDE,
    CELL,
    CLAIM,
    FIRST_TO_LAST,
    MEAN,
    NO_RESULT,
    PLACEBO,
    analyze,
    expected_difference,
    noise_of,
)
from lm.sweeps.record import without_cells
from lm.sweeps.results import choices_of, shapes_of
from lm.sweeps.statistics import BETTER, SAME, WORSE

SIZES = {"small": (100, 0.4), "middle": (200, 0.2), "large": (400, 0.0)}


def test_claims_are_paired_t_tests_with_holms_correction():
    record, runs = sweep()
    a = analyze(record, runs)
    gated, wide, placebo = a.claims
    losses = {name: list(v.losses.values()) for name, v in a.variants.items()}
    assert losses["plain"] == list(PLAIN)
    expected = [stats.ttest_rel(losses[name], losses["plain"]).pvalue for name in ("gated", "wide")]
    assert [gated.p, wide.p] == pytest.approx(expected, rel=1e-9)
    assert [gated.p_holm, wide.p_holm] == pytest.approx(statistics.holm(expected), rel=1e-9)
    assert gated.difference.mean == pytest.approx(GAPS["gated"])
    assert [c.kind for c in a.claims] == [CLAIM, CLAIM, PLACEBO]
    assert [c.verdict for c in a.claims] == [BETTER, WORSE, SAME]
    assert (math.isnan(placebo.p_holm), placebo.variant, placebo.against) == (
        True,
        "placebo",
        "plain",
    )
    assert a.variants["gated"].point == {RATE: 0.002}
    assert a.warnings == {}


def test_claims_without_a_result_leave_the_others_their_correction():
    record, runs = sweep()
    diverged = analyze(record, changed(runs, DIVERGED, phase="final", variant="wide", seed=3))
    gated, wide, _ = diverged.claims
    assert (wide.difference, wide.verdict) == (None, NO_RESULT)
    assert wide.missing == "unstable: 1 of 5 and 0 of 5 runs diverged"
    assert gated.p_holm == gated.p  # the only test that is left
    assert diverged.warnings == {"diverged": ["wide (1 of 5)"]}

    stuck = analyze(record, changed(runs, {"test_loss": 2.7}, phase="final", variant="wide"))
    assert (stuck.claims[1].missing, stuck.warnings["stuck"]) == (
        "unstable: 5 of 5 runs of wide got stuck",
        ["wide (5 of 5)"],
    )

    # one run that got stuck is enough: a mean of runs that learned and did not is of neither
    some = analyze(record, changed(runs, {"test_loss": 2.7}, phase="final", variant="wide", seed=3))
    assert some.claims[1].missing == "unstable: 1 of 5 runs of wide got stuck"
    assert some.claims[0].p_holm == 2 * some.claims[0].p  # it counts as a test

    failed = analyze(record, [r for r in runs if r.variant != "gated"], {"gated": "MemoryError"})
    assert (failed.claims[0].missing, failed.warnings["failed"]) == (
        "runs of gated failed",
        ["gated (MemoryError)"],
    )
    record["variants"]["gated"]["data"]["fingerprint"] = "other"
    assert analyze(record, runs).claims[0].missing == "different data or tokens"


def test_warnings_name_what_a_reader_should_know():
    record, runs = sweep()
    record["variants"]["gated"]["tokens"] += 1
    record["variants"]["wide"]["data"]["notices"] = record["variants"]["plain"]["data"][
        "notices"
    ] = ["a notice"]
    runs = changed(runs, {"processor": "cpu B"}, phase="final", variant="wide", seed=3)
    of_plain = {r.seed: r.test_loss for r in runs if (r.phase, r.variant) == ("final", "plain")}
    runs = [dataclasses.replace(r, test_loss=of_plain[r.seed]) if (r.phase, r.variant) == ("final", "placebo") else r
            for r in runs]  # fmt: skip
    found = analyze(record, runs).warnings
    assert found == {"tokens": ["gated and plain"], "machines": ["wide and plain"],
                     "identical": ["plain and placebo"], "data": ["a notice"]}  # fmt: skip


@pytest.mark.parametrize("axis", ["text", "size"])
def test_with_cells_the_claims_are_the_means_over_them(axis):
    record, runs = sweep(SIZES, axis)
    a = analyze(record, runs)
    means, cells = a.of_kind(CLAIM), a.of_kind(CELL)
    assert [(c.variant, c.cell) for c in means] == [("gated", MEAN), ("wide", MEAN)]
    assert [(c.variant, c.cell) for c in cells] == [
        (arm, s) for arm in ("gated", "wide") for s in SIZES
    ]
    of_gated = [c.difference for c in cells if c.variant == "gated"]
    expected = statistics.mean_over_cells(of_gated)
    assert (means[0].difference, means[0].tau, means[0].prediction) == expected
    assert means[0].differences == tuple(d.mean for d in of_gated)
    # Two families: the means, and the single cells. Placebos, one per cell and their mean, are in
    # neither.
    for family in (means, cells):
        assert [c.p_holm for c in family] == pytest.approx(statistics.holm([c.p for c in family]))
    assert [c.cell for c in a.of_kind(PLACEBO)] == [*SIZES, MEAN]
    assert all(math.isnan(c.p_holm) for c in a.of_kind(PLACEBO))
    assert all((c.log_multiplier is None) == (axis == "text") for c in means + cells)


def test_with_lengths_the_claims_are_the_changes_from_the_first_to_the_last():
    record, runs = sweep(SIZES, "length")
    for run in runs:  # at the last length "gated" keeps half of its lead
        if run.variant == "gated, large" and run.phase == "final":
            half = {"test_loss": run.test_loss - GAPS["gated"] / 2}
            runs = changed(runs, half, phase="final", variant=run.variant, seed=run.seed)
    a = analyze(record, runs)
    changes = a.of_kind(CLAIM)
    assert [(c.variant, c.cell) for c in changes] == [
        ("gated", FIRST_TO_LAST),
        ("wide", FIRST_TO_LAST),
    ]
    first, _, last = a.in_cells(changes[0])
    assert changes[0].difference == statistics.difference(last.difference, first.difference)
    assert changes[0].ratio == statistics.ratio(last.difference, first.difference)
    assert changes[0].ratio[0] == pytest.approx(0.5, abs=0.01)
    assert changes[0].verdict == WORSE
    for family in (changes, a.of_kind(CELL)):
        assert [c.p_holm for c in family] == pytest.approx(statistics.holm([c.p for c in family]))
    assert [c.cell for c in a.of_kind(PLACEBO)] == [*SIZES, FIRST_TO_LAST]
    text = report.to_markdown(a, {})
    assert "gated − plain from small to large" in text
    assert "the lead shrinks by more than 0.005" in text
    assert "ratio 0.50 [" in text
    (row,) = [
        row
        for row in report.claim_rows(a)
        if (row["variant"], row["cell"]) == ("gated", FIRST_TO_LAST)
    ]
    assert row["ratio_low"] < 0.5 < row["ratio_high"]

    unfinished = analyze(without_cells(record, ["large"]), runs)
    assert {c.missing for c in unfinished.of_kind(CLAIM)} == {"large is not finished"}
    only_one = analyze(without_cells(record, ["middle", "large"]), runs)
    assert {c.missing for c in only_one.of_kind(CLAIM)} == {"large is not finished"}

    stuck = changed(runs, {"test_loss": 2.7}, phase="final", variant="gated, large")
    lost = analyze(record, stuck).of_kind(CLAIM)[0]
    assert lost.missing == "unstable: 5 of 5 runs of gated got stuck at large"
    assert lost.is_counted


def test_differences_that_are_all_0_have_no_ratio():
    """A change without an effect: its report, and those of the others, can be written."""
    record, runs = sweep(SIZES, "length")
    losses = {(r.variant, r.seed): r.test_loss for r in runs if r.phase == "final"}
    for (name, seed), loss in losses.items():
        if name.startswith("plain"):
            other = name.replace("plain", "gated")
            runs = changed(runs, {"test_loss": loss}, phase="final", variant=other, seed=seed)
    a = analyze(record, runs)
    claim = a.of_kind(CLAIM)[0]
    assert claim.difference.mean == 0.0
    assert not math.isfinite(claim.ratio[1])
    assert "gated − plain" in report.to_markdown(a, {})


def test_the_expected_power_is_that_of_the_analyzed_sweep():
    """A planned repetition of a sweep would detect what its claims say they could."""
    record, runs = sweep()
    a = analyze(record, runs)
    noise = noise_of(record, runs, 100)
    assert (noise.n_params, noise.of_tuning) == (100, 0.0)
    alone, first = expected_difference(noise, 5, 1, 1, 2)
    found = sorted(statistics.detectable(*c.difference[1:3]) for c in a.claims)
    assert found[0] <= alone <= found[-1] * 1.001
    assert first > alone
    of_lengths, _ = expected_difference(noise, 5, 1, 3, 2, first_to_last=True)
    assert (
        alone < of_lengths < math.sqrt(2) * alone
    )  # twice the variance, and more degrees of freedom
    better = expected_difference(noise, 15, 4, 4, 2)
    assert better[1] < 0.3 * first
    without = [r for r in runs if r.phase == "final"]
    for about in record["variants"].values():
        about["tune"] = {RATE: [0.002]}
    assert noise_of(record, without, 100) is None


def test_a_change_that_is_added_does_not_alter_the_curves_of_its_study():
    """The shape is given by the study then; without it a variant more may change that of all."""
    record, runs = sweep()
    record["design"] = "curve"
    shape = shapes_of(record, runs)[""]
    assert {c.shape for c in choices_of(record, runs).values()} == {shape}
    given = choices_of(record | {"shapes": {"": shape + 0.5}}, runs)
    assert {c.shape for c in given.values()} == {shape + 0.5}
    assert shapes_of(record | {"design": "vertex"}, runs) == {}


def test_a_variant_that_failed_in_its_tuning_does_not_stop_the_others():
    record, runs = sweep()
    record["design"] = "curve"
    rest = [r for r in runs if r.variant != "wide" or r.point[RATE] != 0.004]
    assert choices_of(record, rest)["gated"].point is None  # the shape of the cell is not known
    choices = choices_of(record, rest, ["wide"])
    assert choices["wide"].missing == ((0.004,),)
    assert choices["gated"].point == pytest.approx((0.002,), rel=0.1)


def test_a_control_is_the_mean_of_the_baseline_and_its_placebos():
    """The placebos are compared with the mean of the others, and one that diverged is left out."""
    record, runs = sweep()
    record["control"] = "mean"
    about = record["variants"]["placebo"]
    record["variants"]["placebo 2"] = about
    record["placebos"].append(["placebo 2", "plain"])
    runs += [
        dataclasses.replace(r, variant="placebo 2", test_loss=r.test_loss + 0.004)
        for r in runs
        if r.variant == "placebo"
    ]
    a = analyze(record, runs)
    losses = {name: np.array(list(v.losses.values())) for name, v in a.variants.items()}
    control = (losses["plain"] + losses["placebo"] + losses["placebo 2"]) / 3
    gated, _, *placebos = a.claims
    assert (gated.n_controls, gated.differences) == (3, pytest.approx(losses["gated"] - control))
    assert gated.p == pytest.approx(stats.ttest_rel(losses["gated"], control).pvalue)
    rest = (losses["plain"] + losses["placebo 2"]) / 2
    assert placebos[0].differences == pytest.approx(losses["placebo"] - rest)
    base = losses["plain"].mean() - (losses["placebo"] + losses["placebo 2"]).mean() / 2
    found = [c.difference.mean for c in placebos]
    assert a.placebo_band("plain", "") == pytest.approx((min(base, *found), max(base, *found)))
    fewer = analyze(record, changed(runs, DIVERGED, phase="final", variant="placebo 2", seed=3))
    assert fewer.claims[0].n_controls == 2
    assert analyze(record | {"control": "baseline"}, runs).claims[0].n_controls == 1


def test_multipliers_are_those_of_the_losses():
    """Losses fall by 0.2 per doubling of size, 4 times the compute; "gated" ends 0.1 lower, half of
    that.
    """
    a = analyze(*sweep(SIZES, "size"))
    found = next(c for c in a.of_kind(CLAIM) if c.variant == "gated")
    assert math.exp(found.log_multiplier.mean) == pytest.approx(2, rel=0.02)


def test_a_cell_without_a_result_leaves_no_mean():
    record, runs = sweep(SIZES, "size")
    a = analyze(record, changed(runs, DIVERGED, phase="final", variant="gated, large", seed=301))
    gated, wide = a.of_kind(CLAIM)
    assert (gated.missing, gated.verdict) == (
        "unstable: 1 of 5 and 0 of 5 runs diverged at large",
        NO_RESULT,
    )
    assert wide.log_multiplier is not None


def test_cells_that_share_their_seeds_are_tested_by_seed():
    """An earlier page; its differences on two texts are correlated."""
    record, runs = sweep({"a": (100, 0.0), "b": (100, 0.3)}, "text")
    for name, entry in record["variants"].items():
        runs = [dataclasses.replace(r, seed=(r.seed - 1) % 100 + 1) if r.variant == name and r.phase == "final" else r
                for r in runs]  # fmt: skip
        entry["seeds"] = [1, 2, 3, 4, 5]
    a = analyze(record, runs)
    by_seed = np.mean([c.differences for c in a.of_kind(CELL) if c.variant == "gated"], axis=0)
    assert a.of_kind(CLAIM)[0].difference == statistics.estimate(by_seed)


def test_runs_of_the_earlier_design_are_read_at_the_best_rate_of_the_grid():
    record, runs = sweep()
    record["design"] = "grid"
    others = [dataclasses.replace(r, point={RATE: rate}, test_loss=9.0) for r in runs for rate in (0.001, 0.004)
              if r.phase == "final"]  # fmt: skip
    a, expected = analyze(record, others + runs), analyze(record, runs)
    assert list(map(repr, a.claims)) == list(map(repr, expected.claims))  # nan equals nan
    worse = changed(runs, {"val_loss": 2.2}, phase="tuning", variant="wide", point={RATE: 0.002})
    worse += [dataclasses.replace(r, point={RATE: GRID[0]}) for r in worse if r.phase == "final"]
    edge = analyze(record, worse)
    assert edge.variants["wide"].point == {RATE: GRID[0]}
    assert edge.warnings["edge"] == ["wide (optimizer.learning_rate = 0.001)"]


def test_a_tuned_value_may_be_none():
    record, runs = sweep()
    record["tune"].append("optimizer.clip_norm")
    for about in record["variants"].values():
        about["tune"]["optimizer.clip_norm"] = [None, 1.0]
    runs = [dataclasses.replace(r, point=r.point | {"optimizer.clip_norm": clip}, val_loss=r.val_loss + (clip or 0))
            for r in runs for clip in (1.0, None) if r.phase == "tuning" or clip is None]  # fmt: skip
    a = analyze(record, runs)
    assert a.variants["gated"].point == {RATE: 0.002, "optimizer.clip_norm": None}
    assert [run.point["optimizer.clip_norm"] for run in a.runs[:4]] == [None, None, 1.0, 1.0]
    assert "| 0.002 | None |" in report.to_markdown(a, {})


def test_variants_are_compared_on_each_source_of_a_mixture_by_a_paired_t_test():
    """Also where their weights, and so the mean losses, differ; not where the sources do."""
    record, runs = sweep()
    for about in record["variants"].values():
        about["data"] = about["data"] | {"sources": {"web": "1", "code": "2"}}
    record["variants"]["gated"]["data"] = record["variants"]["gated"]["data"] | {
        "fingerprint": "of other weights"
    }
    draw = np.random.default_rng(0)
    runs = [
        dataclasses.replace(r, sources={"web": r.test_loss, "code": r.test_loss + draw.normal()})
        for r in runs
    ]
    a = analyze(record, runs)
    assert a.claims[0].missing == "different data or tokens"
    found = {
        (variant, source): d for variant, against, source, d in a.by_source() if against == "plain"
    }
    assert found.keys() >= {("gated", "web"), ("gated", "code"), ("wide", "web"), ("wide", "code")}
    for (variant, source), difference in found.items():
        losses = [
            [run.sources[source] for run in a.variants[name].runs.values()]
            for name in (variant, "plain")
        ]
        assert difference.p == pytest.approx(stats.ttest_rel(*losses).pvalue, rel=1e-9)
    text = report.to_markdown(a, {})
    assert "## By source or probe" in text
    assert text.count("| code |") == len(found) / 2
    record["variants"]["wide"]["data"] = record["variants"]["wide"]["data"] | {
        "sources": {"web": "3", "code": "2"}
    }
    assert {variant for variant, *_ in analyze(record, runs).by_source()} == {"gated"}
    diverged = changed(runs, {"test_loss": None, "sources": {}}, variant="gated", seed=3)
    assert analyze(record, diverged).by_source() == []
    assert "By source" not in report.to_markdown(analyze(*sweep()), {})


def test_a_second_control_is_shown_beside_the_claims_and_corrects_nothing():
    record, runs = sweep(SIZES, "size")
    before = analyze(record, runs)
    pairs = [[f"gated, {cell}", f"wide, {cell}"] for cell in SIZES]
    a = analyze(record | {"beside": pairs}, runs)
    others = [c for c in a.claims if c.kind != BESIDE]
    assert repr(others) == repr(before.claims)  # nan is not equal to itself
    *cells, mean = a.of_kind(BESIDE)
    assert [c.cell for c in cells] == list(SIZES)
    assert mean.difference.mean == pytest.approx(-0.12, abs=0.005)
    assert math.isnan(mean.p_holm)
    assert not mean.is_significant
    assert a.in_cells(mean) == cells
