"""The figures of a report: which curves, axes and labels they show for a small synthetic sweep."""

import itertools
import json

import numpy as np
import pytest
from synthetic_sweep import BASE, LOSSES, diverge, select, speeds_json, sweep, write

from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.report import figures


def test_variants_of_different_lengths_are_drawn(tmp_path):
    """The panel of the second half shows only runs that reach it. A variant without steps has no curve."""
    record, runs = sweep()
    for r in runs:
        if r["variant"] == "wide":
            r["validation"] = [[0, 2.5]]
        if r["variant"] == "plain":
            r["validation"] = [[20, 2.9], [40, 2.5]]
    figure = figures.learning_curves(analyze(write(tmp_path / "sweep", record, runs)))
    shown = [{line.get_label(): len(line.get_xdata()) for line in axes.get_lines()} for axes in figure.axes[:2]]
    assert shown == [{"plain": 2, "gated": 2, "unigram baseline": 2}, {"plain": 0, "gated": 2}]


def test_variants_with_the_same_choice_are_drawn_together(tmp_path):
    record, runs = sweep()
    record["variants"]["wide"]["grid"] = [0.002]
    a = analyze(
        write(tmp_path / "s", record, [r for r in runs if r["variant"] != "wide" or r["learning_rate"] == 0.002])
    )
    assert figures.groups(a) == [["plain", "gated"], ["wide"]]
    assert len(figures.learning_curves(a).axes) == 4
    assert len(figures.learning_rates(a).axes) == 1


def test_variants_without_a_choice_are_drawn_together(tmp_path):
    record, runs = sweep()
    rates = {"plain": 0.001, "gated": 0.002, "wide": 0.004}
    for name, rate in rates.items():
        record["variants"][name]["grid"] = [rate]
    runs = [r for r in runs if r["phase"] == "final" and r["learning_rate"] == 0.002]
    for r in runs:
        r["learning_rate"] = rates[r["variant"]]
    a = analyze(write(tmp_path / "s", record, runs))
    assert figures.groups(a) == [list(LOSSES)]
    assert list(figures.learning_rates(a).axes[0].get_xticks()) == list(rates.values())


def test_variants_without_a_curve_are_listed_in_the_legend(tmp_path):
    record, runs = sweep()
    diverge(select(runs, "final", "wide")[3])
    a = analyze(write(tmp_path / "s", record, runs))
    labels = [text.get_text() for text in figures.learning_curves(a).axes[1].get_legend().texts]
    assert labels == ["plain", "gated", "not drawn: wide, 1 of 5 diverged", "unigram baseline"]


@pytest.mark.parametrize("how", ["all together", "in its own panel"])
def test_diverged_variants_are_listed_once(tmp_path, how):
    record, runs = sweep()
    lost = select(runs, "final", "wide")
    if how == "in its own panel":
        record["variants"]["wide"]["grid"], lost = [0.002], lost[:1]
        runs = [r for r in runs if r["variant"] != "wide" or r in select(runs, "final", "wide")]
    for r in lost:
        diverge(r)
    figure = figures.learning_curves(analyze(write(tmp_path / "s", record, runs)))
    labels = [text.get_text() for text in figure.axes[1].get_legend().texts]
    assert labels == ["plain", "gated", f"not drawn: wide, {len(lost)} of 5 diverged", "unigram baseline"]


def test_diverged_runs_of_each_rate_are_counted_and_have_no_line(tmp_path):
    record, runs = sweep()
    for r in (*select(runs, "tuning", "plain", 0.004), select(runs, "final", "wide", 0.004)[0]):
        diverge(r)
    axes = figures.learning_rates(analyze(write(tmp_path / "s", record, runs))).axes[0]
    assert [text.get_text() for text in axes.texts] == ["3"]
    assert "numbers on top: runs that diverged" in axes.get_title(loc="left")
    plain = next(line for line in axes.lines if line.get_label() == "plain")
    assert np.isfinite(plain.get_ydata()).tolist() == [True, True, False]


def test_losses_above_the_axis_are_marked(tmp_path):
    record, runs = sweep()
    title = figures.learning_rates(analyze(write(tmp_path / "all", record, runs))).axes[0].get_title(loc="left")
    assert "triangles" not in title
    for r in (select(runs, "final", "plain", 0.004)[0], *select(runs, "tuning", "gated", 0.004)):
        r["val_loss"] = 300.0
    axes = figures.learning_rates(analyze(write(tmp_path / "clipped", record, runs))).axes[0]
    assert "triangles: above the axis" in axes.get_title(loc="left")
    triangles = [line for line in axes.lines if line.get_marker() == "^"]
    low, high = axes.get_ylim()
    assert [list(line.get_xdata()) for line in triangles] == [[0.004], [0.004]]
    assert {y for line in triangles for y in line.get_ydata()} == {high}
    assert 1.5 < low < high < 4  # of the others, 1.98 to 2.45


def test_an_outlier_does_not_squeeze_the_other_differences(tmp_path):
    """One seed of wide is 3 nats off: the axis still fits gated, an arrow marks the clipped interval."""
    record, runs = sweep(LOSSES | {"wide": [BASE[0] + 3, *BASE[1:]]})
    record["comparisons"].append(["plain", "gated"])
    a = analyze(write(tmp_path / "s", record, runs))
    axes = figures.differences(a).axes[0]
    low, high = axes.get_xlim()
    assert -0.2 < low < -0.1184
    assert 0.1184 < high < 0.2
    assert {line.get_marker() for line in axes.lines} >= {"<", ">"}
    d = a.comparisons[1].difference
    assert any(f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]" in text.get_text() for text in axes.texts)


def test_simultaneous_intervals_are_thinner_and_wider_than_plain_ones(tmp_path):
    record, runs = sweep()
    a = analyze(write(tmp_path / "s", record | {"margin": 0.01}, runs))
    axes = figures.differences(a).axes[0]
    bars = [line for line in axes.lines if line.get_linestyle() == "-" and line.get_ydata()[0] < 0]
    for c, (thin, thick) in zip(a.comparisons, zip(bars[::2], bars[1::2], strict=True), strict=True):
        assert thin.get_xdata() == pytest.approx(c.difference.simultaneous)
        assert thick.get_xdata() == pytest.approx((c.difference.low, c.difference.high))
        assert thin.get_linewidth() < thick.get_linewidth()
    (shaded,) = axes.patches
    assert (shaded.get_x(), shaded.get_width()) == pytest.approx((-0.01, 0.02))


def test_bands_are_drawn_for_few_variants_only(tmp_path, monkeypatch):
    a = analyze(write(tmp_path / "sweep", *sweep()))
    assert [len(axes.collections) for axes in figures.learning_curves(a).axes] == [3, 3]
    monkeypatch.setattr(figures, "MAX_BANDS", 2)
    assert [len(axes.collections) for axes in figures.learning_curves(a).axes] == [0, 0]


def test_two_seeds_are_drawn_as_single_curves(tmp_path):
    """A t interval of two values is 12.7 standard errors wide and would fill the panel."""
    record, runs = sweep({name: losses[:2] for name, losses in LOSSES.items()}, n=2)
    axes = figures.learning_curves(analyze(write(tmp_path / "two", record, runs))).axes[0]
    assert (len(axes.collections), len(axes.lines)) == (0, 3 * (1 + 2) + 1)
    axes = figures.learning_curves(analyze(write(tmp_path / "five", *sweep()))).axes[0]
    assert (len(axes.collections), len(axes.lines)) == (3, 3 + 1)


def test_labels_of_learning_rates_do_not_overlap(tmp_path):
    a = analyze(write(tmp_path / "s", *sweep(grid=[0.001, 0.0011, 0.002, 0.004, 0.0041])))
    figure = figures.learning_rates(a)
    figure.draw_without_rendering()
    labels = [tick.label1 for tick in figure.axes[0].xaxis.get_major_ticks()]
    boxes = [label.get_window_extent() for label in labels if label.get_text()]
    assert len(boxes) >= 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert not any(tick.label1.get_text() for tick in figure.axes[0].xaxis.get_minor_ticks())


def test_long_names_fit_into_the_figures(tmp_path):
    record, runs = sweep()
    long = "gated " + "and described at length " * 5
    for r in (r for r in runs if r["variant"] == "gated"):
        r["variant"] = long
    record["variants"] = {long if name == "gated" else name: v for name, v in record["variants"].items()}
    record["comparisons"] = [[long, "plain"], ["wide", "plain"]]
    workdir = write(tmp_path / "s", record, runs)
    speeds = (workdir / "speeds.json").read_text().replace('"gated"', json.dumps(long))
    (workdir / "speeds.json").write_text(speeds)
    for name, figure in figures.figures(analyze(workdir)).items():
        figure.draw_without_rendering()
        width = figure.bbox.width
        artists = [text for axes in figure.axes for text in axes.texts]
        artists += [axes.get_legend() for axes in figure.axes if axes.get_legend()]
        for artist in artists:
            box = artist.get_window_extent()
            assert box.x0 >= 0, name
            assert box.x1 <= width, name
        assert all(axes.get_window_extent().width > 0.7 * width for axes in figure.axes), name


def test_the_label_of_an_axis_with_long_numbers_is_not_cut_off(tmp_path):
    """Ticks with more digits, which the first layout adds, move the label to the left."""
    record, runs = sweep()
    losses = [r["val_loss"] for r in runs]
    for r in runs:
        r["val_loss"] = float(np.interp(r["val_loss"], (min(losses), max(losses)), (1.8, 2.0)))
    figure = figures.learning_rates(analyze(write(tmp_path / "s", record, runs)))
    figures.to_bytes(figure, "png")
    ticks = [tick.label1.get_text() for tick in figure.axes[0].yaxis.get_major_ticks()]
    assert any(len(text) == len("1.875") for text in ticks)
    assert figure.axes[0].yaxis.label.get_window_extent().x0 >= 0


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("differences", "learning_curves")]


@pytest.mark.parametrize("name", ["learning_rates", *SLOW])
def test_figures_are_reproducible(tmp_path, name):
    """The same runs in other files and with other speeds give the same figure, byte for byte."""
    record, runs = sweep()
    one = write(tmp_path / "one", record, runs)
    faster = write(tmp_path / "faster", record, runs[::-1], per_file=5)
    (faster / "speeds.json").write_text(speeds_json(2000.0, 1000.0, 2500.0))
    drawn = [figures.to_bytes(getattr(figures, name)(analyze(workdir)), "svg") for workdir in (one, faster)]
    assert drawn[0] == drawn[1]
