"""The figure of a sweep with sizes: the loss over the training compute, and the compute saved at each size."""

import math
import textwrap

import numpy as np
from matplotlib.figure import Figure

from lm.sweeps.analysis import Analysis
from lm.sweeps.figures import LETTERS, _legend, _log_ticks, _look, _panels, _round_numbers
from lm.sweeps.multipliers import Saving
from lm.sweeps.scaling import Estimate, power_law

LOWEST = -100  # percent; a bar below ends in a triangle


def savings_figure(a: Analysis) -> Figure:
    """Draw two panels for each pair of variants that has multipliers; there must be one."""
    drawn = [s for s in a.savings if not s.missing]
    figure, panels = _panels(2 * len(drawn), 2 * len(drawn))
    for i, s in enumerate(drawn):
        _draw_losses(s, panels[2 * i])
        _draw_savings(s, panels[2 * i + 1])
    return figure


def _draw_losses(s: Saving, axes) -> None:
    floor, factors, exponent = power_law(s.compute_S2, s.loss_S2)
    compute = np.geomspace(s.compute_S2.min(), s.compute_S2.max(), 100)
    for i, (name, factor) in enumerate(zip((s.variant, s.against), factors, strict=True)):
        look = _look(i)
        axes.plot(compute, floor + factor * compute**-exponent, **look | {"marker": ""})
        axes.plot(s.compute_S2[:, i], s.loss_S2[:, i], **look | {"linestyle": ""})
        axes.plot([], [], label=textwrap.fill(name, LETTERS - 8), **look)
    _compute_axis(s, axes)
    axes.set(ylabel="test loss (nats per token)", title=f"{s.variant} and {s.against}")
    _legend(axes)


def _draw_savings(s: Saving, axes) -> None:
    found, x = s.estimate, np.sqrt(s.compute_S2.prod(axis=1))
    pooled, look = _percents(found.pooled), _look(0)
    axes.axhspan(max(pooled[1], LOWEST), pooled[2], color=look["color"], alpha=0.12, linewidth=0)
    axes.axhline(pooled[0], color=look["color"], linewidth=1)
    axes.axhline(0, color="black", linewidth=0.8)
    for at, size, estimate in zip(x, s.sizes, found.at_sizes, strict=True):
        value, low, high = _percents(estimate)
        axes.plot([at, at], [max(low, LOWEST), high], color=look["color"], linewidth=2)
        axes.plot(at, value, "o", color=look["color"], markersize=5)
        if low < LOWEST:
            axes.plot(at, LOWEST, "v", color=look["color"], markersize=5)
        axes.annotate(size, (at, high), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    _compute_axis(s, axes)
    axes.margins(y=0.15)
    axes.set(ylabel="training compute saved (%)", title="saved at each size; band: mean over sizes")


def _percents(e: Estimate) -> list[float]:
    """Return the saved compute and its interval."""
    return [-100 * math.expm1(-x) for x in (e.value, e.low, e.high)]


def _compute_axis(s: Saving, axes) -> None:
    low, high = s.compute_S2.min() / 1.25, s.compute_S2.max() * 1.25
    axes.set(xscale="log", xlim=(low, high), xlabel="training FLOPs per run")
    _log_ticks(axes, _round_numbers(low, high))
