"""The picture of how cost grows."""

import json

from benchmarks import compare, growth


def test_the_picture_shows_every_line_with_its_slope():
    rows = json.loads((compare.RESULTS / "growth.json").read_text())["rows"]
    figure = growth.draw(rows)
    context = [r for r in rows if r["axis"] == "context"]
    shown = [text.get_text() for text in figure.axes[1].texts]
    assert shown == [f"{growth.slope([r['at'] for r in context], [r['step_s'] for r in context]):.2f}"]
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        x = [value for line in axes.lines for value in line.get_xdata()]
        assert axes.get_xlim()[0] <= min(x) <= max(x) <= axes.get_xlim()[1]
