"""The picture of how cost grows."""

import json

from benchmarks import compare, growth


def test_the_picture_shows_the_slope_of_every_line():
    rows = json.loads((compare.RESULTS / "growth.json").read_text())["rows"]
    figure = growth.draw(rows)
    assert len(figure.axes) == len(growth.COSTS) * len(growth.COLUMNS)
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    context = [r for r in rows if r["axis"] == "context"]
    shown = [text.get_text() for text in figure.axes[1].texts]
    assert shown == [f"{growth.slope([r['at'] for r in context], [r['step_s'] for r in context]):.2f}"]


def test_all_points_lie_within_the_axes():
    figure = growth.draw(json.loads((compare.RESULTS / "growth.json").read_text())["rows"])
    for axes in figure.axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for line in axes.lines:
            x, y = line.get_data()
            assert left <= min(x) <= max(x) <= right
            assert low <= min(y) <= max(y) <= high
