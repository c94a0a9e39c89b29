"""The figure of a sweep with sizes: the loss over the training compute, and the compute multiplier at each size."""

import math
import textwrap

import numpy as np
from matplotlib.figure import Figure

from lm.sweeps.analysis.multipliers import Saving
from lm.sweeps.analysis.outcomes import Analysis
from lm.sweeps.report.figure_parts import LETTERS, add_legend, label_log_ticks, line_look, round_numbers, stack_panels
from lm.sweeps.statistics.scaling import Estimate, power_law

# Ticks for axes of multipliers that span at most this factor.
TICKS = {
    1.3: (0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.25),
    4: (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5),
    math.inf: (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100),
}
LARGEST = math.log(1000)  # larger multipliers, which a flat loss gives, are drawn at the edge of the axis


def savings_figure(a: Analysis) -> Figure:
    """Draw two panels for each pair of variants that has multipliers; there must be one."""
    drawn = [s for s in a.savings if not s.missing]
    figure, panels = stack_panels(2 * len(drawn), 2 * len(drawn))
    for i, s in enumerate(drawn):
        _draw_losses(s, panels[2 * i])
        _draw_multipliers(s, panels[2 * i + 1])
    return figure


def _draw_losses(s: Saving, axes) -> None:
    floor, factors, exponent = power_law(s.compute_S2, s.loss_S2)
    compute = np.geomspace(s.compute_S2.min(), s.compute_S2.max(), 100)
    for i, (name, factor) in enumerate(zip((s.variant, s.against), factors, strict=True)):
        look = line_look(i)
        axes.plot(compute, floor + factor * compute**-exponent, **look | {"marker": ""})
        axes.plot(s.compute_S2[:, i], s.loss_S2[:, i], **look | {"linestyle": ""})
        axes.plot([], [], label=textwrap.fill(name, LETTERS - 8), **look)
    _compute_axis(s, axes)
    axes.set(ylabel="test loss (nats per token)", title=f"{s.variant} and {s.against}")
    add_legend(axes)


def _draw_multipliers(s: Saving, axes) -> None:
    found, x, look = s.estimate, np.sqrt(s.compute_S2.prod(axis=1)), line_look(0)
    bottom, top = _limits([*found.at_sizes, found.pooled])
    axes.axhspan(*np.exp(np.clip(found.pooled[1:3], bottom, top)), color=look["color"], alpha=0.12, linewidth=0)
    axes.axhline(np.exp(np.clip(found.pooled.value, bottom, top)), color=look["color"], linewidth=1)
    axes.axhline(1, color="black", linewidth=0.8)
    for at, size, (value, low, high, _) in zip(x, s.sizes, found.at_sizes, strict=True):
        axes.plot([at, at], np.exp(np.clip([low, high], bottom, top)), color=look["color"], linewidth=2)
        axes.plot(at, np.exp(np.clip(value, bottom, top)), "o", color=look["color"], markersize=5)
        for end, limit, mark in ((low, bottom, "v"), (high, top, "^")):
            if np.clip(end, bottom, top) != end:
                axes.plot(at, math.exp(limit), mark, color=look["color"], markersize=5, clip_on=False)
        label_at = at, math.exp(min(high, top))
        axes.annotate(size, label_at, xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8)
    _compute_axis(s, axes)
    axes.set(yscale="log", ylim=np.exp([bottom, top]), ylabel="compute multiplier")
    axes.set_title("at each size; band: mean over sizes", pad=14)
    axes.minorticks_off()
    candidates = next(ticks for factor, ticks in TICKS.items() if top - bottom <= math.log(factor))
    ticks = [m for m in candidates if bottom <= math.log(m) <= top]
    axes.set_yticks(ticks, [f"{m:g}" for m in ticks])


def _limits(estimates: list[Estimate]) -> tuple[float, float]:
    """Return the limits of an axis of ln m for m = 1, all estimates up to LARGEST, and intervals up to twice as far."""
    values = np.clip([e.value for e in estimates], -LARGEST, LARGEST)
    low, high = min(0, *values), max(0, *values)
    reach = high - low + 0.05
    bottom, top = (
        max(min(0, *(e.low for e in estimates)), low - reach),
        min(max(0, *(e.high for e in estimates)), high + reach),
    )
    margin = 0.06 * (top - bottom) or 0.05  # without variation and difference
    return bottom - margin, top + margin


def _compute_axis(s: Saving, axes) -> None:
    low, high = s.compute_S2.min() / 1.25, s.compute_S2.max() * 1.25
    axes.set(xscale="log", xlim=(low, high), xlabel="training FLOPs per run")
    label_log_ticks(axes, round_numbers(low, high))
