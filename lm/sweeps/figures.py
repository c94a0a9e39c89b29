"""The figures of a report: the forest plot of the comparisons, the tuning runs, and the curves.

The colors remain distinct for color-blind readers (Okabe and Ito 2008) and in gray. The figures are
so narrow that their text is legible on a screen of 400 pixels.
"""

import io
import itertools
import math
import textwrap
from collections.abc import Callable, Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from lm.sweeps.analysis import (
    BESIDE,
    CLAIM,
    MEAN,
    OVER_CELLS,
    PLACEBO,
    Analysis,
    Claim,
    Variant,
    mean_curve,
)
from lm.sweeps.declare import in_cell
from lm.sweeps.record import text_of
from lm.sweeps.statistics import Estimate
from lm.sweeps.tuning import LEARNING_RATE

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
WIDTH = 4.8  # inches
FOREST = 6.2  # inches: the forest plot has a column of names and one of numbers
LETTERS = 34  # in a name of the forest plot
LEAST_LETTERS = 24  # of it before a place
ROW = 0.2  # inches of a row of the forest plot
SEED = "#555555"  # the ticks of seeds

plt.rcParams |= {
    "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False, "legend.fontsize": 9, "axes.titlesize": 10, "axes.titlelocation": "left",
    "figure.dpi": 110, "savefig.dpi": 150, "svg.fonttype": "none", "text.parse_math": False,
    "svg.hashsalt": "lm.report",  # else element ids differ from one report to the next
}  # fmt: skip


def figures(a: Analysis) -> dict[str, Figure]:
    """Return the figures by name. One without anything to show is left out."""
    drawn = {}
    if a.claims:
        drawn["differences"] = differences(a)
    if any(len(v.about["tune"].get(LEARNING_RATE, ())) > 1 for v in a.variants.values()):
        drawn["learning_rates"] = learning_rates(a)
    # The runs of a published page have no curves: its figure stays as it is.
    if a.of_kind(CLAIM) and any(run.curve for run in a.runs):
        drawn["curves"] = curves(a)
    return drawn


def to_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as "png" or "svg", the same bytes every time."""
    buffer = io.BytesIO()
    # the first layout changes the tick labels, and the second makes room for them
    figure.draw_without_rendering()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def differences(a: Analysis) -> Figure:
    """Draw a comparison per row: its name, seeds, mean and intervals, and the numbers.

    A diamond is a mean over cells, its ticks are the cells, in a color per text, and its dotted line
    is the prediction interval. The thin bar is the interval of Holm's level. A gray band is the
    spread of the placebos of a row's control.
    """
    claims = a.shown()
    margin = a.record["margin"]
    rows = range(len(claims), 0, -1)
    figure = Figure(figsize=(FOREST, 0.9 + ROW * len(claims)), layout="constrained")
    axes = figure.subplots()
    limits = _limits(claims, margin)
    of_cells = _text_colors(a)
    beside = axes.get_yaxis_transform()
    for claim, y in zip(claims, rows, strict=True):
        axes.text(1.05, y, _numbers(claim), transform=beside, va="center", fontsize=7.5)
        band = np.clip(a.placebo_band(claim.against, claim.cell), *limits)
        if claim.kind != PLACEBO and band[0] < band[1]:
            axes.fill_betweenx((y - 0.5, y + 0.5), *band, color="#cccccc", linewidth=0, zorder=-0.5)
        if claim.difference:
            ticks = list(of_cells.values()) if claim.cell == MEAN else []
            _draw_claim(axes, claim, claim.difference, y, limits, ticks)
    names = [_label(claim, with_cell=not a.are_many) for claim in claims]
    axes.set_yticks(rows, names, fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.axvspan(-margin, margin, color="#eeeeee", linewidth=0, zorder=-1)
    axes.axvline(0, color="black", linewidth=0.8, zorder=0)
    axes.set(ylim=(0.4, len(claims) + 0.6), xlim=limits)
    axes.set_xlabel("difference in test loss (nats per token)", fontsize=8)
    axes.spines["left"].set_visible(False)
    axes.grid(False, axis="y")
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(axis="x", labelsize=7.5)
    if len(set(of_cells.values())) > 1 and any(claim.cell == MEAN for claim in claims):
        texts = {color: text_of(a.record, cell) for cell, color in of_cells.items()}
        for color, text in texts.items():
            axes.plot([], [], "|", color=color, markersize=7, markeredgewidth=1.5, label=text)
        figure.legend(loc="outside upper center", ncols=len(texts), fontsize=7.5)
    return figure


def _text_colors(a: Analysis) -> dict[str, str]:
    """Return a color by cell, the same for all cells of a text; gray if there is one text."""
    texts = {cell: text_of(a.record, cell) for cell in a.record["cells"]}
    order = list(dict.fromkeys(texts.values()))
    if len(order) == 1:
        return dict.fromkeys(texts, SEED)
    # the bars have the first color
    colors = dict(zip(order, itertools.cycle(COLORS[1:]), strict=False))
    return {cell: colors[text] for cell, text in texts.items()}


def _label(claim: Claim, with_cell: bool) -> str:
    place = ""
    if with_cell and claim.cell:
        place = f" ({claim.cell})" if claim.cell in OVER_CELLS else f", {claim.cell}"
    # Names are shortened, places are not: rows of the same names differ in them.
    left = max(LETTERS - len(place), LEAST_LETTERS)
    return textwrap.shorten(f"{claim.variant} − {claim.against}", left, placeholder="…") + place


def _numbers(claim: Claim) -> str:
    if not claim.difference:
        return textwrap.shorten(claim.missing, LETTERS, placeholder="…")
    low, high = claim.difference.interval()
    return f"{nats(claim.difference.mean)} [{nats(low)}, {nats(high)}]"


def nats(x: float) -> str:
    """Format a difference of losses with four decimals.

    >>> nats(0.25), nats(-4e-6), nats(float("inf"))
    ('+0.2500', '-0.0000', '∞')
    """
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    return f"{x:+.4f}"


def _limits(claims: list[Claim], margin: float) -> tuple[float, float]:
    """Return the limits of an axis that shows 0, the margin and all comparisons but outliers.

    An outlier reaches more than 4 times as far from 0 as the median of the comparisons.
    """
    ends: list[tuple[float, float]] = []
    reach: list[float] = []
    for c in claims:
        values = [margin, *c.differences]
        # The interval of two seeds is too wide to be shown; that of two cells is not, because it
        # has the seeds of each.
        if c.cell in OVER_CELLS or len(c.differences) > 2:
            values += [c.holm_low, c.holm_high]
        if c.difference:
            ends.append((min(values), max(values)))
            reach.append(max(map(abs, values)))
    shown = [(-margin, margin)]
    shown += [e for e, far in zip(ends, reach, strict=True) if far <= 4 * np.median(reach)]
    low = min(low for low, _ in shown)
    high = max(high for _, high in shown)
    space = 0.06 * (high - low)
    return low - space, high + space


def _draw_claim(
    axes,
    claim: Claim,
    difference: Estimate,
    y: float,
    limits: tuple[float, float],
    ticks: Sequence[str],
) -> None:
    """Draw a row; `ticks` has a color per difference, or none for those of seeds."""
    low, high = limits
    color = "#777777" if claim.kind in (PLACEBO, BESIDE) else COLORS[0]

    def draw(xs: Sequence[float], style: str, **look) -> None:
        axes.plot(np.clip(xs, low, high), [y] * len(xs), style, **({"color": color} | look))

    if claim.cell == MEAN:
        draw(claim.prediction, ":", linewidth=0.9)
    draw((claim.holm_low, claim.holm_high), "-", linewidth=1.2, solid_capstyle="butt")
    draw(difference.interval(), "-", linewidth=3, solid_capstyle="butt")
    for x, tick in zip(claim.differences, ticks or itertools.repeat(SEED), strict=False):
        draw([x], "|", color=tick, markersize=7, markeredgewidth=1.5 if ticks else 1)
    if low <= difference.mean <= high:
        draw([difference.mean], "D" if claim.cell == MEAN else "o", markersize=4)
    # An arrow where the interval leaves the figure.
    if claim.holm_low < low:
        draw([low], "<", clip_on=False)
    if claim.holm_high > high:
        draw([high], ">", clip_on=False)


def learning_rates(a: Analysis) -> Figure:
    """Draw the tuning losses of each variant over the learning rate.

    They are relative to the baseline's lowest one. Other tuned values are the best ones.
    """
    baseline = a.record["baseline"]
    pairs = {v.about["arm"]: (v.about["arm"], baseline) for v in a.variants.values()}

    def line(variant: Variant, against: Variant) -> dict[float, float]:
        lowest = min(_tuning_losses(a, against).values(), default=math.nan)
        return {rate: loss - lowest for rate, loss in _tuning_losses(a, variant).items()}

    return _panels(a, pairs, line, xscale="log", xlabel="learning rate")


def _tuning_losses(a: Analysis, v: Variant) -> dict[float, float]:
    """Return the mean validation loss by learning rate, infinite where a run diverged."""
    losses: dict[float, list[float]] = {}
    best = dict(zip(v.about["tune"], v.choice.best or (), strict=True))
    best.pop(LEARNING_RATE, None)
    for run in a.runs:
        if (run.phase, run.variant) == ("tuning", v.name) and best.items() <= run.point.items():
            loss = math.inf if run.val_loss is None else run.val_loss
            losses.setdefault(run.point[LEARNING_RATE], []).append(loss)
    return {rate: float(np.mean(losses[rate])) for rate in sorted(losses)}


def curves(a: Analysis) -> Figure:
    """Draw for each comparison the mean difference in validation loss during training."""
    claims = a.of_kind(CLAIM)
    pairs = {f"{c.variant} − {c.against}": (c.variant, c.against) for c in claims}

    def line(variant: Variant, against: Variant) -> dict[int, float]:
        seeds = [seed for seed in variant.runs if seed in against.runs]
        ours, theirs = (mean_curve([v.runs[seed] for seed in seeds]) for v in (variant, against))
        return {step: ours[step] - theirs[step] for step in ours if step in theirs}

    return _panels(a, pairs, line, xscale="linear", xlabel="step")


def _panels(
    a: Analysis,
    pairs: dict[str, tuple[str, str]],
    line: Callable[[Variant, Variant], dict],
    xscale: str,
    xlabel: str,
) -> Figure:
    """Draw line(variant, baseline), nats by x, in a panel per pair with a color per cell."""
    cells = a.record["cells"]
    columns = 3
    rows = -(-len(pairs) // columns)
    figure = Figure(figsize=(WIDTH, 1.25 * rows + 0.2 * len(cells) + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    shown: list[float] = []
    positions: set[float] = set()
    for panel, title in itertools.zip_longest(panels, pairs):
        if title is None:
            panel.set_axis_off()
            continue
        for cell, color in zip(cells, itertools.cycle(COLORS), strict=False):
            variant, against = (a.variants.get(in_cell(arm, cell)) for arm in pairs[title])
            if not (variant and against):
                continue
            points = line(variant, against)
            y = list(points.values())
            panel.plot(list(points), y, "o-", color=color, markersize=2.5, linewidth=1, label=cell)
            shown += filter(math.isfinite, y)
            positions |= points.keys()
        panel.axhline(0, color="black", linewidth=0.6)
        panel.set_title(textwrap.shorten(title, 24, placeholder="…"), fontsize=8)
        panel.tick_params(labelsize=7)
    low, high = np.percentile(shown or [0.0, 1.0], (1, 90))  # outliers must not flatten the rest
    margin = 0.15 * (high - low) or 0.1
    figure.axes[0].set(ylim=(min(low, 0) - margin, high + margin), xscale=xscale)
    ticks = sorted(positions)[:: max(1, len(positions) // 2)]
    figure.axes[0].minorticks_off()
    figure.axes[0].set_xticks(ticks, [f"{x:.3g}" for x in ticks])
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel("difference in validation loss", fontsize=9)
    if cells != [""]:
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=2, fontsize=8)
    return figure


def words(key: str) -> str:
    return key.rpartition(".")[2].replace("_", " ")
