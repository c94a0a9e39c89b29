"""The figures of a report: the forest plot of the comparisons, the tuning runs, and the curves.

The colors remain distinct for color-blind readers (Okabe and Ito 2008) and in gray. All figures are
WIDTH inches wide, panels below each other and the legend below its panel, so that the text is
legible on a screen of 400 pixels.
"""

import io
import itertools
import math
import textwrap
from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from lm.sweeps import statistics
from lm.sweeps.analysis import CLAIM, MEAN, PLACEBO, Analysis, Claim, Variant, curve
from lm.sweeps.declare import in_cell
from lm.sweeps.statistics import Estimate
from lm.sweeps.tuning import LEARNING_RATE

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
WIDTH = 4.8  # inches
LETTERS = 58  # in a line of this width
LOSS = "validation loss (nats per token)"
ROW = 0.4  # inches below the text of a comparison
MAX_BANDS = 5  # in one panel; more would hide each other

plt.rcParams |= {
    "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False, "legend.fontsize": 9, "axes.titlesize": 10, "axes.titlelocation": "left",
    "figure.dpi": 110, "savefig.dpi": 150, "svg.fonttype": "none", "text.parse_math": False,
    "svg.hashsalt": "lm.report",  # else element ids differ from one report to the next
}  # fmt: skip


def figures(a: Analysis) -> dict[str, Figure]:
    """Return the figures by name; without comparisons no "differences", without curves in the runs
    no "curves".
    """
    drawn = {"differences": differences(a)} if a.claims else {}
    if any(len(values) > 1 for v in a.variants.values() for values in v.about["tune"].values()):
        drawn["learning_rates"] = small_tuning(a) if a.are_many else tuning(a)
    if any(run.curve for v in a.variants.values() for run in v.runs.values()):
        drawn["curves"] = small_curves(a) if a.are_many else curves(a)
    return drawn


def to_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as "png" or "svg", the same bytes every time."""
    buffer = io.BytesIO()
    # the first layout changes the tick labels, and the second makes room for them
    figure.draw_without_rendering()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def differences(a: Analysis) -> Figure:
    """Draw each comparison below its name: seeds, mean, 95 % interval and the interval of Holm's
    level.

    A diamond is a mean over cells, its ticks are the cells, and its dotted line is the prediction
    interval.
    """
    claims = a.shown()
    labels = [_label(claim, with_cell=not a.are_many) for claim in claims]
    heights = [0.16 * (label.count("\n") + 1) for label in labels]  # inches
    figure = Figure(figsize=(WIDTH, 0.7 + sum(heights) + ROW * len(labels)), layout="constrained")
    axes = figure.subplots()
    limits = _limits(claims, a.record["margin"])
    top = 0.0
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for claim, label, height in zip(claims, labels, heights, strict=True):
        axes.text(
            0.0, top, label, transform=axes.get_yaxis_transform(), va="top", fontsize=9, bbox=white
        )
        top -= height + ROW
        if claim.difference:
            _draw_claim(axes, claim, claim.difference, top + 0.65 * ROW, limits)
    margin = a.record["margin"]
    axes.axvspan(-margin, margin, color="#eeeeee", linewidth=0, zorder=-1)
    axes.axvline(0, color="black", linewidth=0.8, zorder=0)
    axes.set(
        yticks=[], ylim=(top, 0), xlim=limits, xlabel="difference in test loss (nats per token)"
    )
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=6)
    return figure


def _label(claim: Claim, with_cell: bool) -> str:
    at = {"": "", MEAN: " (mean)"}.get(claim.cell, f" at {claim.cell}") if with_cell else ""
    names = f"{claim.variant} − {claim.against}{at}:"
    if claim.difference is None:
        numbers = claim.missing
    else:
        numbers = "{} [{}, {}]".format(
            *map(nats, (claim.difference.mean, *claim.difference.interval()))
        )
    if len(names) + 1 + len(numbers) <= LETTERS:
        return f"{names} {numbers}"
    return f"{textwrap.fill(names, LETTERS)}\n{textwrap.fill(numbers, LETTERS)}"


def nats(x: float) -> str:
    """Format a difference of losses with its sign and four decimals, or with one digit where these
    would all be 0.

    >>> nats(0.25), nats(-4e-6), nats(float("inf"))
    ('+0.2500', '-4e-06', '∞')
    """
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    return f"{x:+.4f}" if x == 0 or abs(x) >= 5e-5 else f"{x:+.0e}"


def _limits(claims: list[Claim], margin: float) -> tuple[float, float]:
    """Return the limits of an axis that shows 0, the margin and all comparisons but outliers.

    An outlier reaches more than 4 times as far from 0 as the median of the comparisons.
    """
    found = [c for c in claims if c.difference]
    # The interval of two seeds is too wide to be shown; that of two cells is not, because it has
    # the seeds of each.
    ends = [
        (
            -margin,
            margin,
            *c.differences,
            *((c.holm_low, c.holm_high) if c.cell == MEAN or len(c.differences) > 2 else ()),
        )
        for c in found
    ]
    reach = [max(map(abs, values)) for values in ends]
    shown = [v for v, far in zip(ends, reach, strict=True) if far <= 4 * np.median(reach)] or [
        (-1.0, 1.0)
    ]
    low, high = min(map(min, shown)), max(map(max, shown))
    space = 0.06 * (high - low)
    return low - space, high + space


def _draw_claim(
    axes, claim: Claim, difference: Estimate, y: float, limits: tuple[float, float]
) -> None:
    low, high = limits
    mean = difference.mean
    color = "#777777" if claim.kind == PLACEBO else COLORS[0]
    axes.plot(
        np.clip(claim.differences, low, high),
        [y] * len(claim.differences),
        "|",
        color="#555555",
        markersize=9,
    )
    lines = [((claim.holm_low, claim.holm_high), 1.2, "-"), (difference.interval(), 3.5, "-")]
    if claim.cell == MEAN:
        lines.append((claim.prediction, 0.9, ":"))
    for ends, width, style in lines:
        axes.plot(
            np.clip(ends, low, high),
            [y, y],
            style,
            color=color,
            linewidth=width,
            solid_capstyle="butt",
        )
    if low <= mean <= high:
        axes.plot(mean, y, "D" if claim.cell == MEAN else "o", color=color, markersize=6)
    for leaves, x, mark in ((claim.holm_low < low, low, "<"), (claim.holm_high > high, high, ">")):
        if leaves:
            axes.plot(x, y, mark, color=color, clip_on=False)


def groups(a: Analysis) -> list[list[Variant]]:
    """Return the variants that share a panel: those on one text with the same lists, or with
    nothing to tune.
    """
    found: dict[tuple, list[Variant]] = {}
    for v in a.variants.values():
        lists = tuple(
            (key, tuple(values)) for key, values in v.about["tune"].items() if len(values) > 1
        )
        found.setdefault((v.about["data"]["fingerprint"], lists), []).append(v)
    return list(found.values())


def tuning(a: Analysis) -> Figure:
    """Draw the validation loss over each tuned value: means of the tuning seeds, and the runs on
    fresh seeds.

    The other tuned values are the best ones.
    """
    panels = [
        (key, variants)
        for variants in groups(a)
        for key, values in variants[0].about["tune"].items()
        if len(values) > 1
    ]
    figure, all_axes = _panels(len(panels), sum(len(variants) for _, variants in panels))
    for (key, variants), axes in zip(panels, all_axes, strict=True):
        lines = {v.name: _tuning_line(a, v, key) for v in variants}
        values = sorted(
            {x for line in lines.values() for x in line} | {v.point[key] for v in variants},
            key=_order,
        )
        is_scale = all(type(x) is float and x > 0 for x in values)
        at = {x: x if is_scale else i for i, x in enumerate(values)}
        fresh = {
            v.name: [run.val_loss for run in v.runs.values() if run.val_loss is not None]
            for v in variants
        }
        low, high = _loss_limits(
            variants, [*lines.values(), *({0: x} for xs in fresh.values() for x in xs)]
        )
        for i, v in enumerate(variants):
            look = _look(i)
            line = lines[v.name]
            xs = [at[x] for x in line]
            ys = np.array(list(line.values()))
            axes.plot(xs, np.clip(ys, None, high), label=textwrap.fill(v.name, LETTERS - 8), **look)
            dots = np.clip(fresh[v.name], None, high)
            axes.plot([at[v.point[key]]] * len(dots), dots, ".", alpha=0.4, color=look["color"])
            above = [x for x, y in zip(xs, ys, strict=True) if y > high]
            if above:  # an empty line that is not clipped spoils the layout
                axes.plot(above, [high] * len(above), "^", color=look["color"], clip_on=False)
        axes.set(
            xscale="log" if is_scale else "linear", ylim=(low, high), xlabel=words(key), ylabel=LOSS
        )
        tried = {x for line in lines.values() for x in line}
        _label_values(axes, {x: at[x] for x in sorted(values, key=lambda x: x not in tried)})
        _add_legend(axes)
    return figure


def _tuning_line(a: Analysis, v: Variant, key: str) -> dict:
    """Return by value of a key the mean validation loss of the tuning runs, infinite where one
    diverged.
    """
    found: dict = {}
    best = dict(zip(v.about["tune"], v.choice.best or (), strict=True))
    for run in a.runs:
        others = all(run.point[k] == x for k, x in best.items() if k != key)
        if (run.phase, run.variant) == ("tuning", v.name) and others:
            found.setdefault(run.point[key], []).append(
                math.inf if run.val_loss is None else run.val_loss
            )
    return {x: float(np.mean(found[x])) for x in sorted(found, key=_order)}


def _loss_limits(variants: list[Variant], lines: list[dict]) -> tuple[float, float]:
    """Return the limits of an axis for most losses; it ends not far above the loss of the unigram
    baseline.
    """
    losses = [y for line in lines for y in line.values() if math.isfinite(y)] or [0.0, 1.0]
    unigram = max(v.about["data"]["unigram"]["validation"] for v in variants)
    low, high = min(losses), min(max(losses), max(1.1 * unigram, float(np.percentile(losses, 75))))
    return low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)


def _label_values(axes, positions: dict) -> None:
    """Label values at their positions on the x axis; one that would overlap an earlier one has no
    label.
    """
    axes.minorticks_off()
    scale = np.log if axes.get_xscale() == "log" else np.asarray
    low, high = scale(axes.get_xlim())
    shown: list[tuple[float, str]] = []
    for value, x in positions.items():
        if all(abs(scale(x) - scale(other)) > 0.11 * (high - low) for other, _ in shown):
            shown.append((x, f"{value:.3g}" if isinstance(value, float) else str(value)))
    axes.set_xticks([x for x, _ in shown], [text for _, text in shown])


def _order(value):
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))


def words(key: str) -> str:
    return key.rpartition(".")[2].replace("_", " ")


def curves(a: Analysis) -> Figure:
    """Draw the validation loss of the final runs during training, and the second half enlarged."""
    drawn = [
        [v for v in variants if not v.n_diverged and any(r.curve for r in v.runs.values())]
        for variants in groups(a)
    ]
    drawn = [variants for variants in drawn if variants]
    figure, panels = _panels(2 * len(drawn), sum(map(len, drawn)))
    for variants, whole, end in zip(drawn, panels[::2], panels[1::2], strict=True):
        found = [
            (np.array(steps), losses)
            for steps, losses in (curve(list(v.runs.values())) for v in variants)
        ]
        half = max(steps[-1] for steps, _ in found) / 2
        for axes, first, title in ((whole, 0, "whole training"), (end, half, "second half")):
            means = []
            for i, (v, (steps, losses)) in enumerate(zip(variants, found, strict=True)):
                part = steps >= first
                look = _look(i)
                means.append(losses.mean(0)[part])
                axes.plot(steps[part], means[-1], label=textwrap.fill(v.name, LETTERS - 8), **look)
                if len(variants) <= MAX_BANDS and len(losses) > 2 and not v.n_stuck:
                    ends = [statistics.estimate(column).interval() for column in losses[:, part].T]
                    axes.fill_between(
                        steps[part], *zip(*ends, strict=True), color=look["color"], alpha=0.15, lw=0
                    )
            low, high = np.min(np.concatenate(means)), np.max(np.concatenate(means))
            margin = 0.12 * (high - low) or 0.1
            axes.set(xlabel="step", ylabel=LOSS, title=title, ylim=(low - margin, high + margin))
        _add_legend(end)
    return figure


def small_tuning(a: Analysis) -> Figure:
    """Draw for each comparison the tuning losses of the variant over the learning rate, in a small
    panel.

    They are relative to the lowest of the baseline in the same cell. Other tuned values are the
    best ones.
    """

    def line(v: Variant, against: Variant) -> dict:
        lowest = min(_tuning_line(a, against, LEARNING_RATE).values(), default=math.nan)
        return {rate: loss - lowest for rate, loss in _tuning_line(a, v, LEARNING_RATE).items()}

    return _small_panels(a, line, xscale="log", xlabel="learning rate")


def small_curves(a: Analysis) -> Figure:
    """Draw for each comparison the mean difference in validation loss during training, in a small
    panel.
    """

    def line(v: Variant, against: Variant) -> dict:
        seeds = [seed for seed in v.runs if seed in against.runs]
        (steps, ours), (others, theirs) = (
            curve([x.runs[seed] for seed in seeds]) for x in (v, against)
        )
        return dict(zip(steps, (ours - theirs).mean(0), strict=True)) if steps == others else {}

    return _small_panels(a, line, xscale="linear", xlabel="step")


def _small_panels(
    a: Analysis, line: Callable[[Variant, Variant], dict], xscale: str, xlabel: str
) -> Figure:
    """Draw line(variant, its baseline), a number of nats by x, in one panel per comparison with a
    color per cell.
    """
    claims = a.of_kind(CLAIM)
    cells = a.record["cells"]
    columns = 3
    rows = -(-len(claims) // columns)
    figure = Figure(figsize=(WIDTH, 1.25 * rows + 0.2 * len(cells) + 0.3), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    shown: list[float] = []
    at: set[float] = set()
    for panel, claim in itertools.zip_longest(panels, claims):
        if claim is None:
            panel.set_axis_off()
            continue
        for cell, color in zip(cells, itertools.cycle(COLORS), strict=False):
            variant, against = (
                a.variants.get(in_cell(arm, cell)) for arm in (claim.variant, claim.against)
            )
            if variant and against and (found := line(variant, against)):
                x, y = list(found), list(found.values())
                panel.plot(x, y, "o-", color=color, markersize=2.5, linewidth=1, label=cell)
                shown += filter(math.isfinite, y)
                at |= found.keys()
        panel.axhline(0, color="black", linewidth=0.6)
        panel.set_title(textwrap.shorten(claim.variant, 24, placeholder="…"), fontsize=8)
        panel.tick_params(labelsize=7)
    low, high = np.percentile(shown or [0.0, 1.0], (1, 90))  # outliers must not flatten the rest
    margin = 0.15 * (high - low) or 0.1
    figure.axes[0].set(ylim=(min(low, 0) - margin, high + margin), xscale=xscale)
    ticks = sorted(at)[:: max(1, len(at) // 2)]
    figure.axes[0].minorticks_off()
    figure.axes[0].set_xticks(ticks, [f"{x:.3g}" for x in ticks])
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel("difference in validation loss (nats per token)", fontsize=9)
    if cells != [""]:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside upper center",
            ncols=2,
            fontsize=8,
        )
    return figure


def _panels(n: int, n_labels: int):
    """Return a figure of n panels below each other, and its axes, with room for n_labels entries in
    all legends.
    """
    figure = Figure(figsize=(WIDTH, 2.9 * n + 0.2 * n_labels), layout="constrained")
    return figure, list(figure.subplots(n, 1, squeeze=False)[:, 0])


def _look(i: int) -> dict:
    """Return the style of the i-th line of a panel; lines of the same color have another style and
    marker.
    """
    again, i = divmod(i, len(COLORS))
    marker = MARKERS[(i + again) % len(MARKERS)]
    return {
        "color": COLORS[i],
        "linestyle": STYLES[(i + again) % len(STYLES)],
        "marker": marker,
        "markersize": 3.5,
    }


def _add_legend(axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.18), borderaxespad=0)
