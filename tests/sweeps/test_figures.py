"""The figures of a report: which claims, lines and labels they show for a synthetic sweep."""

import dataclasses

import numpy as np
import pytest
from synthetic_sweep import DIVERGED, GRID, RATE, changed, sweep

from lm.sweeps import figures
from lm.sweeps.analysis import PLACEBO, analyze

SIZES = {"small": (100, 0.4), "large": (400, 0.0)}


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_forest_plot_shows_every_claim_its_seeds_and_the_placebo():
    a = analyze(*sweep())
    axes = figures.differences(a).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["gated − plain", "wide − plain", "placebo − plain"]
    assert texts(axes)[1].startswith(figures.nats(a.claims[1].difference.mean))
    ticks = [line for line in axes.lines if line.get_marker() == "|"]
    # an outlier, which would hide the others: an arrow
    shown = [c for c in a.claims if c.variant != "gated"]
    drawn = [line.get_xdata()[0] for line in ticks]
    assert drawn[-sum(len(c.differences) for c in shown) :] == [
        x for c in shown for x in c.differences
    ]
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert dots == [c.difference.mean for c in shown]
    assert len([line for line in axes.lines if line.get_marker() == "<"]) == 1


def test_the_forest_plot_has_a_diamond_for_a_mean_and_words_for_no_result():
    record, runs = sweep(SIZES, "size")
    a = analyze(record, changed(runs, DIVERGED, variant="wide, large", seed=201))
    axes = figures.differences(a).axes[0]
    # of gated, and of the placebo
    assert len([line for line in axes.lines if line.get_marker() == "D"]) == 2
    names = [label.get_text() for label in axes.get_yticklabels()]
    rows = dict(zip(names, texts(axes), strict=True))
    assert rows["wide − plain (mean)"].startswith("unstable: 1 of 5")


def test_rows_of_long_names_differ_in_their_cells():
    claims = analyze(*sweep(SIZES, "size")).claims
    long = {"variant": "one change with a long name", "against": "another change with a long name"}
    labels = {
        figures._label(dataclasses.replace(claim, **long), with_cell=True) for claim in claims
    }
    assert {label.partition("…")[2] for label in labels} == {", small", ", large", " (mean)"}
    assert max(map(len, labels)) <= figures.LETTERS


def test_the_spread_of_several_placebos_is_a_band_in_the_rows_of_their_control(monkeypatch):
    a = analyze(*sweep())
    bands = {"plain": (-0.004, 0.003)}
    monkeypatch.setattr(type(a), "placebo_band", lambda self, against, cell: bands[against])
    axes = figures.differences(a).axes[0]
    corners = [band.get_datalim(axes.transData) for band in axes.collections]
    rows = [c for c in a.shown() if c.kind != PLACEBO]
    ends = [end for box in corners for end in (box.x0, box.x1)]
    assert ends == pytest.approx(bands["plain"] * len(rows))
    monkeypatch.undo()
    assert not figures.differences(a).axes[0].collections  # one placebo is no spread


def test_a_row_is_one_line_and_the_cells_of_a_text_have_one_color():
    record, runs = sweep(SIZES, "size")
    record["axis"] = "cell"
    names = {"small": "Verse, small", "large": "Prose, large"}
    for old, new in names.items():
        record["variants"] = {
            name.replace(old, new): about | {"cell": about["cell"].replace(old, new)}
            for name, about in record["variants"].items()
        }
        for kind in ("comparisons", "placebos"):
            record[kind] = [[name.replace(old, new) for name in pair] for pair in record[kind]]
        runs = [dataclasses.replace(run, variant=run.variant.replace(old, new)) for run in runs]
    record["cells"] = list(names.values())
    a = analyze(record, runs)
    figure = figures.differences(a)
    axes = figure.axes[0]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["Verse", "Prose"]
    (mean,) = [c for c in a.claims if (c.variant, c.cell) == ("wide", "mean")]
    ticks = {
        line.get_xdata()[0]: line.get_color()
        for line in axes.lines
        if line.get_marker() == "|" and len(line.get_xdata())
    }
    colors = [ticks[x] for x in mean.differences]
    assert len(set(colors)) == 2
    assert figure.get_size_inches()[1] == pytest.approx(0.9 + figures.ROW * len(a.shown()))


def test_the_axis_has_the_whole_interval_of_a_mean_over_two_cells():
    a = analyze(*sweep(SIZES, "size"))
    # its two differences are -0.1
    wide = dataclasses.replace(a.claims[0], holm_low=-0.4, holm_high=0.2)
    low, high = figures.differences(dataclasses.replace(a, claims=[wide])).axes[0].get_xlim()
    assert low < -0.4 < 0.2 < high


def lines_of(panel) -> dict:
    """Return the points of the lines of a panel by cell; that at 0 has no label."""
    labeled = [line for line in panel.lines if line.get_label()[:1] != "_"]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in labeled}


def test_the_tuning_figure_has_a_panel_per_variant_relative_to_the_baseline():
    record, runs = sweep()
    panels = figures.learning_rates(analyze(record, runs)).axes
    titles = [panel.get_title("left") for panel in panels[:4]]
    assert titles == ["plain", "gated", "wide", "placebo"]
    plain = panels[0].lines[0]
    assert list(plain.get_xdata()) == list(GRID)
    assert list(plain.get_ydata()) == pytest.approx([0.05, 0.0, 0.05])


def test_a_diverged_tuning_run_leaves_a_gap():
    record, runs = sweep()
    lost = changed(runs, DIVERGED, variant="wide", phase="tuning", point={RATE: 0.004})
    line = figures.learning_rates(analyze(record, lost)).axes[2].lines[0]
    assert list(line.get_xdata()) == list(GRID)
    assert list(np.isfinite(line.get_ydata())) == [True, True, False]


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


def test_a_panel_has_a_line_for_every_cell_over_the_steps_that_both_variants_have():
    record, runs = sweep({f"c{i}": (100, 0.1 * i) for i in range(9)}, "text")
    a = analyze(record, changed(runs, {"curve": ((4, 2.2), (10, 2.0))}, variant="gated, c0"))
    gated, wide = map(lines_of, figures.curves(a).axes[:2])
    assert gated["c0"][0] == [10]
    assert all(steps == [5, 10] for steps, _ in [*list(gated.values())[1:], *wide.values()])


def test_names_are_not_read_as_mathematics():
    record, runs = sweep()
    record["variants"]["gated"]["arm"] = r"$\frac"
    figures.to_bytes(figures.differences(analyze(record, runs)), "png")
