"""What the figures of reports have in common: fonts, colors, line styles, panels, legends and logarithmic axes.

The colors remain distinct for color-blind readers (Okabe and Ito 2008) and in gray. All figures are WIDTH inches wide,
panels below each other and the legend below its panel, so that the text is legible on a screen of 400 pixels as well as
on a wide one.
"""

import math

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
WIDTH = 4.8  # inches
LOSS = "validation loss (nats per token)"
LETTERS = 58  # in a line of width WIDTH
MIN_GAP = 0.11  # between two labels of a logarithmic axis, as a fraction of its length

plt.rcParams |= {
    "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False, "legend.fontsize": 9, "axes.titlesize": 10, "axes.titlelocation": "left",
    "figure.dpi": 110, "savefig.dpi": 150, "svg.fonttype": "none",
    "svg.hashsalt": "lm.report",  # else element ids differ from one report to the next
}  # fmt: skip


def stack_panels(n: int, n_labels: int):
    """Return a figure of n panels below each other, and its axes, with room for n_labels entries in all legends."""
    figure = Figure(figsize=(WIDTH, 2.9 * n + 0.2 * n_labels), layout="constrained")
    return figure, list(figure.subplots(n, 1, squeeze=False)[:, 0])


def line_look(i: int) -> dict:
    """Return the style of the i-th line of a panel; lines of the same color have another style and marker."""
    again, i = divmod(i, len(COLOURS))
    marker = MARKERS[(i + again) % len(MARKERS)]
    return {"color": COLOURS[i], "linestyle": STYLES[(i + again) % len(STYLES)], "marker": marker, "markersize": 3.5}


def add_legend(axes, *others) -> None:
    """Put the legend below the panel; it lists the lines of `axes` and those that only `others` have."""
    entries = {}
    for one in (axes, *others):
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        axes.legend(entries.values(), entries, loc="upper left", bbox_to_anchor=(-0.1, -0.18), borderaxespad=0)


def label_log_ticks(axes, candidates: list[float]) -> None:
    """Label those of the candidates on the x axis that do not overlap."""
    low, high = np.log(axes.get_xlim())
    ticks = []
    for tick in candidates:
        if not ticks or math.log(tick / ticks[-1]) > MIN_GAP * (high - low):
            ticks.append(tick)
    axes.minorticks_off()
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])


def _short(x: float) -> str:
    """Format a tick.

    >>> _short(0.016), _short(0.008 * 64 / 48), _short(2e12)
    ('0.016', '0.0107', '2e12')
    """
    return f"{x:{'.3g' if x < 100 else 'g'}}" if 1e-4 <= x < 1e4 else f"{x:.0e}".replace("e+0", "e").replace("e+", "e")


def round_numbers(low: float, high: float) -> list[float]:
    """Return the multiples 1, 2 and 5 of powers of ten from low to high, or fewer if their labels would overlap.

    >>> round_numbers(0.3, 6), round_numbers(1, 3000)
    ([0.5, 1.0, 2.0, 5.0], [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples, gap in (((1, 2, 5), 2), ((1, 3), 3), ((1,), 10)):
        numbers = [float(f"{m}e{decade}") for decade in decades for m in multiples]
        numbers = [number for number in numbers if low <= number <= high]
        if math.log(gap) > MIN_GAP * math.log(high / low):
            break
    return numbers
