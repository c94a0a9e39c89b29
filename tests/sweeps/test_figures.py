"""The figures of a report: which claims, lines and labels they show for a synthetic sweep."""

import dataclasses

import pytest
from synthetic_sweep import DIVERGED, GRID, RATE, changed, sweep

from lm.sweeps import figures
from lm.sweeps.analysis import analyze

SIZES = {"small": (100, 0.4), "large": (400, 0.0)}


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_forest_plot_shows_every_claim_its_seeds_and_the_placebo():
    a = analyze(*sweep())
    axes = figures.differences(a).axes[0]
    assert [text.split(":")[0] for text in texts(axes)] == [
        "gated − plain",
        "wide − plain",
        "placebo − plain",
    ]
    ticks = [line for line in axes.lines if line.get_marker() == "|"]
    # an outlier, which would hide the others: an arrow
    shown = [c for c in a.claims if c.variant != "gated"]
    assert [list(line.get_xdata()) for line in ticks[1:]] == [list(c.differences) for c in shown]
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert dots == [c.difference.mean for c in shown]
    assert len([line for line in axes.lines if line.get_marker() == "<"]) == 1


def test_the_forest_plot_has_a_diamond_for_a_mean_and_words_for_no_result():
    record, runs = sweep(SIZES, "size")
    a = analyze(record, changed(runs, DIVERGED, variant="wide, large", seed=201))
    axes = figures.differences(a).axes[0]
    # of gated, and of the placebo
    assert len([line for line in axes.lines if line.get_marker() == "D"]) == 2
    assert any(text.startswith("wide − plain (mean): no result at large") for text in texts(axes))


def test_the_axis_has_the_whole_interval_of_a_mean_over_two_cells():
    a = analyze(*sweep(SIZES, "size"))
    # its two differences are -0.1
    wide = dataclasses.replace(a.claims[0], holm_low=-0.4, holm_high=0.2)
    low, high = figures.differences(dataclasses.replace(a, claims=[wide])).axes[0].get_xlim()
    assert low < -0.4 < 0.2 < high


def test_the_tuning_figure_has_a_panel_per_list_with_means_and_fresh_runs():
    record, runs = sweep()
    (axes,) = figures.tuning(analyze(record, runs)).axes
    lines = {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}
    assert list(lines) == ["plain", "gated", "wide", "placebo"]
    assert list(lines["plain"].get_xdata()) == list(GRID)
    assert list(lines["plain"].get_ydata()) == pytest.approx([2.05, 2.0, 2.05])
    fresh = [line for line in axes.lines if line.get_marker() == "."]
    assert all(set(line.get_xdata()) == {0.002} for line in fresh)
    # Words have no ratios: they are drawn at equal distances.
    for entry in record["variants"].values():
        entry["tune"]["optimizer.schedule"] = ["constant", "cosine"]
    runs = [dataclasses.replace(r, point=r.point | {"optimizer.schedule": s}) for r in runs
            for s in ("constant", "cosine") if r.phase == "tuning" or s == "cosine"]  # fmt: skip
    _, words = figures.tuning(analyze(record, runs)).axes
    assert (words.get_xscale(), [label.get_text() for label in words.get_xticklabels()]) == (
        "linear", ["constant", "cosine"],
    )  # fmt: skip


def test_values_that_were_tried_are_labeled_before_tuned_ones_beside_them():
    record, runs = sweep()
    a = analyze(record, runs)
    tuned = {
        name: dataclasses.replace(v, choice=v.choice._replace(point=(0.0019,)))
        for name, v in a.variants.items()
    }
    (axes,) = figures.tuning(dataclasses.replace(a, variants=tuned)).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        f"{rate:.3g}" for rate in GRID
    ]


def test_a_diverged_run_leaves_a_gap_or_a_triangle():
    record, runs = sweep()
    lost = changed(runs, DIVERGED, variant="wide", phase="tuning", point={RATE: 0.004})
    (axes,) = figures.tuning(analyze(record, lost)).axes
    triangles = [
        line for line in axes.lines if (line.get_marker(), line.get_linestyle()) == ("^", "None")
    ]
    assert [list(line.get_xdata()) for line in triangles] == [[0.004]]


def test_curves_are_drawn_with_the_second_half_enlarged():
    record, runs = sweep()
    whole, end = figures.curves(
        analyze(record, changed(runs, DIVERGED, variant="wide", seed=3))
    ).axes
    # wide has no mean
    assert [line.get_label() for line in whole.lines] == [
        "plain",
        "gated",
        "placebo",
    ]
    assert [list(axes.lines[0].get_xdata()) for axes in (whole, end)] == [[5, 10], [5, 10]]


def test_figures_of_runs_without_curves_and_of_untuned_variants():
    record, runs = sweep()
    for entry in record["variants"].values():
        entry["tune"] = {RATE: [0.002]}
    runs = [dataclasses.replace(r, curve=()) for r in runs if r.phase == "final"]
    a = analyze(record, runs)
    drawn = figures.figures(a)
    assert list(drawn) == ["differences"]
    assert figures.to_bytes(drawn["differences"], "svg") == figures.to_bytes(
        figures.differences(a), "svg"
    )


def test_a_small_panel_has_a_line_for_every_cell_in_which_both_variants_have_the_same_steps():
    record, runs = sweep({f"c{i}": (100, 0.1 * i) for i in range(9)}, "text")
    a = analyze(record, changed(runs, {"curve": ((4, 2.2), (10, 2.0))}, variant="gated, c0"))
    gated, wide = figures.small_curves(a).axes[:2]
    assert (len(gated.lines), len(wide.lines)) == (8 + 1, 9 + 1)  # and the line at 0


def test_names_are_not_read_as_mathematics():
    record, runs = sweep()
    record["variants"]["gated"]["arm"] = r"$\frac"
    figures.to_bytes(figures.differences(analyze(record, runs)), "png")
