"""The figure of a sweep with sizes and without comparisons: the loss above the irreducible one over the size."""

import math
import textwrap

import numpy as np
from matplotlib.figure import Figure

from lm.sweeps.analysis.exponents import ALL, FLOPS, INNER, INNER_FLOPS, Fall
from lm.sweeps.analysis.outcomes import Analysis
from lm.sweeps.report.figure_parts import LETTERS, label_log_ticks, line_look, round_numbers, stack_panels
from lm.sweeps.statistics.inference import interval
from lm.sweeps.statistics.power_laws import PowerLaw

PANELS = {"parameters": (ALL, INNER), "training FLOPs per run": (FLOPS, INNER_FLOPS)}
LABELS = {ALL: "all", INNER: "without embeddings", FLOPS: "all", INNER_FLOPS: "without embeddings"}


def exponents_figure(a: Analysis) -> Figure:
    """Draw two panels for each variant that has a fit; there must be one."""
    drawn = [f for f in a.falls if f.is_drawable]
    figure, axes = stack_panels(2 * len(drawn), 4 * len(drawn))
    for i, f in enumerate(drawn):
        for panel, (label, measures) in zip(axes[2 * i :], PANELS.items(), strict=False):
            _draw(f, {m: law for m in measures if (law := f.laws[m])}, panel, label)
    return figure


def _draw(f: Fall, laws: dict[str, PowerLaw], axes, label: str) -> None:
    """Draw the means with their intervals over seeds, and the fits, which are straight lines on these axes."""
    means = [interval(losses) for losses in f.losses_SN]
    heights = []
    for i, (measure, law) in enumerate(laws.items()):
        look, x = line_look(i), f.x[measure]
        ends = np.array([x.min() / 1.15, x.max() * 1.15])
        name = f"{LABELS[measure]}: a = {law.exponent.value:.3f}, E = {law.floor.value:.3f}"
        above = np.array([m.mean for m in means]) - law.floor.value
        lows = np.array([m.low for m in means]) - law.floor.value
        highs = np.array([m.high for m in means]) - law.floor.value
        fitted = law(ends) - law.floor.value
        lowest = min(above[above > 0].min(initial=math.inf), fitted.min()) / 1.5
        axes.vlines(x, np.maximum(lows, lowest), np.maximum(highs, lowest), color=look["color"], linewidth=2, alpha=0.5)
        axes.plot(ends, fitted, **look | {"marker": ""})
        axes.plot(x[above > 0], above[above > 0], **look | {"linestyle": "", "markersize": 5})
        axes.plot([], [], label=name, **look)
        heights += [lowest, max(above.max(), fitted.max()) * 1.2]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=label,
        ylabel="test loss − E (nats per token)",
        title=textwrap.fill(f.variant, LETTERS),
    )
    if not laws:
        return
    axes.set_ylim(min(heights), max(heights))
    label_log_ticks(axes, round_numbers(*axes.get_xlim()))
    ticks = _ticks(min(heights), max(heights))
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.2), borderaxespad=0)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high, more of them on a short axis.

    >>> _ticks(0.24, 1.1), _ticks(0.001, 0.3)
    ([0.3, 0.4, 0.5, 0.6, 0.8, 1.0], [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2])
    """
    multiples = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = [float(f"{m}e{decade}") for decade in decades for m in multiples]
    return [number for number in numbers if low <= number <= high]
