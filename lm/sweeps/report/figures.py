"""The figures of a report."""

import collections
import io
import math
import textwrap

import numpy as np
from matplotlib.figure import Figure

from lm.sweeps.analysis.answers import difference
from lm.sweeps.analysis.outcomes import Analysis, Comparison, VariantResult, curve
from lm.sweeps.report.figure_parts import (
    COLOURS,
    LETTERS,
    LOSS,
    WIDTH,
    add_legend,
    label_log_ticks,
    line_look,
    stack_panels,
)
from lm.sweeps.statistics import inference
from lm.sweeps.storage.results import tuning_result

MAX_BANDS = 5  # in one panel; more would hide each other


def figures(a: Analysis) -> dict[str, Figure]:
    """Return the figures that every sweep has, by name, and those that depend on its design."""
    found = {"differences": differences(a)} if a.comparisons else {}
    found["curves"] = learning_curves(a)
    return found if a.record["search"] else found | {"learning_rates": learning_rates(a)}


def to_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as "png" or "svg", the same bytes every time."""
    buffer = io.BytesIO()
    figure.draw_without_rendering()  # the first layout changes the tick labels, and the second makes room for them
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


# ---- Differences -----------------------------------------------------------------------------------------------


def differences(a: Analysis) -> Figure:
    """Draw the mean, the intervals and the single seeds of each comparison, its names and numbers above them."""
    labels = [_comparison_label(c) for c in a.comparisons]
    heights = [0.16 * (label.count("\n") + 1) for label in labels]  # inches
    figure = Figure(figsize=(WIDTH, 0.7 + sum(heights) + 0.38 * len(labels)), layout="constrained")
    axes = figure.subplots()
    low, high = _difference_limits(a)
    top, white = 0.0, {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for comparison, label, height in zip(a.comparisons, labels, heights, strict=True):
        axes.text(0.0, top, label, transform=axes.get_yaxis_transform(), va="top", fontsize=9, bbox=white)
        top -= height + 0.38
        if comparison.difference:
            _draw_difference(a, comparison, axes, top + 0.25, (low, high))
    axes.axvspan(-a.record["margin"], a.record["margin"], color="#eeeeee", linewidth=0, zorder=-1)
    axes.axvline(0, color="black", linewidth=0.8, zorder=0)
    axes.set(yticks=[], ylim=(top, 0), xlim=(low, high), xlabel="difference in test loss (nats per token)")
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=6)
    return figure


def _comparison_label(c: Comparison) -> str:
    d, names = c.difference, f"{c.variant} − {c.against}:"
    numbers = f"{difference(d.mean)} [{difference(d.low)}, {difference(d.high)}]" if d else c.missing
    one_line = f"{names} {numbers}"
    return one_line if len(one_line) <= LETTERS else f"{textwrap.fill(names, LETTERS)}\n{numbers}"


def _difference_limits(a: Analysis) -> tuple[float, float]:
    """Return the limits of an axis that shows 0 and all comparisons but outliers.

    An outlier reaches more than 4 times as far from 0 as the median of the comparisons.
    """
    found = [(c.difference, _seed_differences(a, c)) for c in a.comparisons if c.difference]
    ends = [(*d.simultaneous, *seeds) for d, seeds in found if d.n > 2]
    ranges = [(min(0, *values), max(0, *values)) for values in ends]
    ranges += [(min(0, *seeds), max(0, *seeds)) for d, seeds in found if d.n == 2]  # an interval of n = 2 is huge
    reach = [max(-low, high) for low, high in ranges]
    shown = [r for r, far in zip(ranges, reach, strict=True) if far <= 4 * np.median(reach)] or [(-1.0, 1.0)]
    low, high = min(low for low, _ in shown), max(high for _, high in shown)
    margin = 0.06 * (high - low) or 1e-3
    return low - margin, high + margin


def _seed_differences(a: Analysis, c: Comparison) -> list[float]:
    ours, theirs = (a.variants[name].losses[: c.difference.n] for name in (c.variant, c.against))
    return [x - z for x, z in zip(ours, theirs, strict=True)]


def _draw_difference(a: Analysis, c: Comparison, axes, y: float, limits: tuple[float, float]) -> None:
    (low, high), d, color = limits, c.difference, COLOURS[0]
    seeds = np.clip(_seed_differences(a, c), low, high)
    axes.plot(seeds, [y] * d.n, "|", color="#777777", markersize=9)
    for ends, width in ((d.simultaneous, 1), ((d.low, d.high), 3)):
        axes.plot(np.clip(ends, low, high), [y, y], color=color, linewidth=width, solid_capstyle="butt")
    if low <= d.mean <= high:
        axes.plot(d.mean, y, "o", color=color, markersize=5)
    left, right = d.simultaneous
    if left < low:
        axes.plot(low, y, "<", color=color, clip_on=False)
    if right > high:
        axes.plot(high, y, ">", color=color, clip_on=False)


# ---- Curves ----------------------------------------------------------------------------------------------------


def learning_curves(a: Analysis) -> Figure:
    """Draw the validation loss during training, and its second half enlarged."""
    curves, groups = _curves(a)
    figure, panels = stack_panels(2 * len(groups), sum(map(len, groups)))
    for names, whole, end in zip(groups, panels[::2], panels[1::2], strict=True):
        drawn = [name for name in names if name in curves]
        half = max((curves[name][0][-1] for name in drawn), default=0) / 2
        for axes, first in ((whole, 0), (end, half)):
            for i, name in enumerate(names):
                if name in curves:
                    steps, losses = curves[name]
                    part = steps >= first
                    v, look = a.variants[name], line_look(i)
                    label = textwrap.fill(v.label, LETTERS - 8)
                    axes.plot(steps[part], v.center(losses)[part], label=label, **look)
                    if len(drawn) <= MAX_BANDS:
                        _draw_variation(axes, v, steps[part], losses[:, part], look["color"])
            middles = [a.variants[n].center(curves[n][1])[curves[n][0] >= first] for n in drawn]
            _fit(axes, np.concatenate(middles) if middles else np.zeros(0))
        low, high = whole.get_ylim()
        for unigram in {a.record["variants"][name]["data"]["unigram"]["validation"] for name in names} - {None}:
            if low < unigram < high:
                whole.axhline(unigram, label="unigram baseline", color="#777777", linestyle=":", linewidth=1)
        whole.set(xlabel="step", ylabel=LOSS, title="whole training")
        end.set(xlabel="step", ylabel=LOSS, title="second half")
        _name_diverged(a, names, end)
        add_legend(end, whole)
    return figure


def _name_diverged(a: Analysis, names: list[str], axes) -> None:
    """List in the legend the variants that have no line because runs diverged."""
    for v in (a.variants[name] for name in names):
        if v.n_diverged:
            label = f"not drawn: {v.name}, {v.n_diverged} of {len(v.losses)} diverged"
            axes.plot([], [], " ", label=textwrap.fill(label, LETTERS - 8))


def _draw_variation(axes, v: VariantResult, steps: np.ndarray, losses: np.ndarray, color: str) -> None:
    """Draw the variation of the runs: a band for three seeds or more, else the single runs.

    With two seeds a t interval is 12.7 standard errors wide and would fill the panel. A stuck run would do the same.
    """
    if v.n_stuck or not len(steps):
        return
    if len(losses) < 3:
        axes.plot(steps, losses.T, color=color, alpha=0.4, linewidth=0.8)
        return
    intervals = [inference.interval(losses[:, i]) for i in range(losses.shape[1])]
    low, high = [i.low for i in intervals], [i.high for i in intervals]
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def _fit(axes, values: np.ndarray) -> None:
    """Set the y axis to the values, so that a wide band does not squeeze the curves."""
    values = values[np.isfinite(values)]
    if len(values):
        low, high = values.min(), values.max()
        margin = 0.12 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def _curves(a: Analysis) -> tuple[dict, list[list[str]]]:
    """Return (steps, losses) of the variants that can be drawn, and the names in each group.

    A variant with a diverged run has no curve, because the mean of the other runs would be too low. A group without
    any curve is not drawn; its names are in the last group.
    """
    curves = {name: curve(v.runs) for name, v in a.variants.items() if not v.n_diverged}
    curves = {name: (np.array(steps), losses) for name, (steps, losses) in curves.items() if any(steps)}
    drawn = [names for names in groups(a) if curves.keys() & set(names)] or [[]]
    drawn[-1] = drawn[-1] + [name for name in a.variants if not any(name in names for names in drawn)]
    return curves, drawn


def groups(a: Analysis) -> list[list[str]]:
    """Return the variants that share a panel: those on one text with the same grid, or with one rate each."""
    found = {}
    for name, v in a.variants.items():
        text = a.record["variants"][name]["data"]["fingerprint"]
        found.setdefault((text, v.grid if len(v.grid) > 1 else None), []).append(name)
    return list(found.values())


# ---- Learning rates --------------------------------------------------------------------------------------------


def learning_rates(a: Analysis) -> Figure:
    """Draw the final validation loss over the learning rate: means over seeds, and each run on a fresh seed."""
    drawn = [names for names in groups(a) if len(a.variants[names[0]].grid) > 1] or groups(a)
    figure, panels = stack_panels(len(drawn), sum(map(len, drawn)))
    for names, axes in zip(drawn, panels, strict=True):
        _draw_rates(a, names, axes)
    return figure


def _draw_rates(a: Analysis, names: list[str], axes) -> None:
    grid = sorted({rate for name in names for rate in a.variants[name].grid})
    ours = [run for run in a.results.runs.values() if run["variant"] in names]
    unigram = max(a.record["variants"][name]["data"]["unigram"]["validation"] or math.inf for name in names)
    low, high = _loss_limits([run["val_loss"] for run in ours if run["val_loss"] is not None], unigram)
    is_clipped = False
    for i, name in enumerate(names):
        look = line_look(i)
        final = [r for r in ours if r["variant"] == name and r["phase"] == "final"]
        fresh = [r for r in final if r["val_loss"] is not None]
        means = _mean_losses(a, name, grid, final)
        axes.plot(grid, means, label=textwrap.fill(name, LETTERS - 8), **look)
        shown = [(r["learning_rate"], r["val_loss"]) for r in fresh if r["val_loss"] <= high]
        above = [r["learning_rate"] for r in fresh if r["val_loss"] > high]
        above += [rate for rate, mean in zip(grid, means, strict=True) if mean > high]
        axes.plot([rate for rate, _ in shown], [loss for _, loss in shown], ".", alpha=0.35, color=look["color"])
        if above:
            axes.plot(above, [high] * len(above), "^", alpha=0.6, color=look["color"], clip_on=False)
            is_clipped = True
    margin = max((grid[-1] / grid[0]) ** 0.05, 1.1)
    axes.set(xlim=(grid[0] / margin, grid[-1] * margin), ylim=(low, high), xscale="log")
    diverged = collections.Counter(run["learning_rate"] for run in ours if run["val_loss"] is None)
    for rate, n in diverged.items():
        axes.text(rate, 1.02, f"{n}", fontsize=8, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    label_log_ticks(axes, grid)
    marks = ["triangles: above the axis"] * is_clipped + ["numbers on top: runs that diverged"] * bool(diverged)
    axes.set_title("; ".join(marks), pad=16 if diverged else 8, fontsize=9)
    axes.set(xlabel="learning rate", ylabel=LOSS)
    add_legend(axes)


def _mean_losses(a: Analysis, name: str, grid: list[float], final: list[dict]) -> list[float]:
    """Return the mean loss at each rate over the tuning seeds, or over the fresh seeds if there are no tuning runs.

    nan where a run diverged, and where there are no runs.
    """
    if a.variants[name].tuned_rates:
        tuned = [tuning_result(a.results, a.record, name, rate) for rate in grid]
        return [math.nan if t.n_diverged else t.loss for t in tuned]
    losses = [[run["val_loss"] for run in final if run["learning_rate"] == rate] for rate in grid]
    return [float(np.mean(of_rate)) if of_rate and None not in of_rate else math.nan for of_rate in losses]


def _loss_limits(losses: list[float], unigram: float) -> tuple[float, float]:
    """Return the limits of an axis for most of the losses. It ends not far above the loss of the unigram baseline."""
    if not losses:
        return 0.0, 1.0
    low, high = min(losses), np.percentile(losses, 95)
    margin = 0.05 * (high - low) or 0.05
    high = min(max(losses) + margin, high + 10 * margin, max(1.1 * unigram, np.percentile(losses, 75) + margin))
    return low - 0.05 * (high - low), high
