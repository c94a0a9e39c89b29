"""The pictures of a sweep's report: readable by colour-blind eyes (Okabe and Ito 2008), and in grey."""

import collections
import io

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from lm.sweeps import statistics
from lm.sweeps.analysis import Analysis, curve, tokens_per_step
from lm.sweeps.results import tuned

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
LOSS = "loss (nats per token)"

plt.rcParams |= {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False, "figure.dpi": 110, "savefig.bbox": "tight", "svg.fonttype": "none",
}  # fmt: skip


def figures(a: Analysis) -> dict[str, plt.Figure]:
    """Every picture by its name."""
    return {
        "differences": differences(a),
        "curves": learning_curves(a),
        "learning_rates": learning_rates(a),
        "equal_cost": equal_cost(a),
    }


def to_bytes(figure: plt.Figure, kind: str) -> bytes:
    """The picture as "png" or "svg"."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def panels(a: Analysis) -> list[list[str]]:
    """The variants that are drawn together: those that choose from the same learning rates, those without a choice."""
    by_grid = {}
    for name, v in a.variants.items():
        by_grid.setdefault(v.grid if len(v.grid) > 1 else None, []).append(name)
    return list(by_grid.values())


def _look(i: int) -> dict:
    """Of the i-th line of a panel; with a colour's second use everything else differs."""
    again, i = divmod(i, len(COLOURS))
    marker = MARKERS[(i + again) % len(MARKERS)]
    return {"color": COLOURS[i], "linestyle": STYLES[(i + again) % len(STYLES)], "marker": marker, "markersize": 3.5}


def _legend(axes) -> None:
    """Beside the picture, where it hides nothing."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))


def _rows(n: int, **options):
    """n rows of two pictures."""
    figure, axes = plt.subplots(n, 2, figsize=(9, 3.2 * n), squeeze=False, **options)
    return figure, list(axes)


def _curves(a: Analysis):
    """(steps, losses) of the variants that trained and of which no run diverged, and the names of each panel.

    What diverged is named beside the picture; a mean over the other runs would flatter it. Panels without a curve are
    not drawn: their names are in the last one.
    """
    curves = {name: curve(v.runs) for name, v in a.variants.items() if not v.n_diverged}
    curves = {name: (np.array(steps), losses) for name, (steps, losses) in curves.items() if any(steps)}
    rows = [names for names in panels(a) if curves.keys() & set(names)] or [[]]
    rows[-1] = rows[-1] + [name for name in a.variants if not any(name in names for names in rows)]
    return curves, rows


def _name_diverged(a: Analysis, names: list[str], axes) -> None:
    """In the legend, the variants that have no line."""
    for v in (a.variants[name] for name in names):
        if v.n_diverged:  # the others without a line trained nothing
            axes.plot([], [], " ", label=f"not drawn: {v.name}, {v.n_diverged} of {len(v.losses)} diverged")


def differences(a: Analysis) -> plt.Figure:
    """The declared comparisons: the difference of each seed, their mean and its interval."""
    figure, axes = plt.subplots(figsize=(6, 0.9 + 0.5 * len(a.comparisons)))
    for y, comparison in enumerate(reversed(a.comparisons)):
        d = comparison.difference
        if d is None:
            axes.text(0, y, f" {comparison.lost}", va="center")
            continue
        pairs = zip(a.variants[comparison.variant].losses, a.variants[comparison.against].losses, strict=True)
        axes.plot([x - z for x, z in pairs], [y + 0.16] * d.n, "|", color="#777777", markersize=6)
        axes.plot([d.low, d.high], [y, y], color=COLOURS[0], linewidth=2)
        axes.plot(d.mean, y, "o", color=COLOURS[0])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(a.comparisons)), [f"{c.variant} − {c.against}" for c in reversed(a.comparisons)])
    axes.set_ylim(-0.5, len(a.comparisons) - 0.4)
    axes.set_xlabel("difference in test loss (nats per token): mean, 95 % interval, each seed; left is better")
    return figure


def learning_curves(a: Analysis) -> plt.Figure:
    """Validation loss over training, with the band of the 95 % interval over seeds; and its last part, larger.

    Of a variant of which runs got stuck the median is drawn: their band would cover the others.
    """
    curves, rows = _curves(a)
    figure, pictures = _rows(len(rows))
    for names, (whole, end) in zip(rows, pictures, strict=True):
        half = max((curves[name][0][-1] for name in names if name in curves), default=0) / 2
        means = []  # of the second half, which shorter runs do not reach
        for i, name in enumerate(names):
            if name not in curves:
                continue
            steps, losses = curves[name]
            v = a.variants[name]
            low, middle, high = (v.middle(losses),) * 3 if v.n_stuck else _band(losses)
            means += list(middle[steps >= half])
            for axes, part in ((whole, steps >= 0), (end, steps >= half)):
                axes.plot(steps[part], middle[part], label=v.label, **_look(i))
                axes.fill_between(steps[part], low[part], high[part], color=_look(i)["color"], alpha=0.15, linewidth=0)
        low, high = whole.get_ylim()
        for unigram in {a.record["variants"][name]["data"]["unigram"]["validation"] for name in names} - {None}:
            if low < unigram < high:
                whole.axhline(unigram, label="counting tokens alone", color="#777777", linestyle=":", linewidth=1)
        whole.set(xlabel="step", ylabel=f"validation {LOSS}", title="learning curves")
        end.set(xlabel="step", title="second half")
        if means:  # a band of seeds that part may be wider than all else is high
            lowest, highest = min(means), max(means)
            margin = 0.15 * (highest - lowest) or 0.1
            end.set_ylim(lowest - margin, highest + margin)
        _name_diverged(a, names, end)
        _legend(end)
    figure.tight_layout()
    return figure


def _band(losses: np.ndarray):
    intervals = [statistics.interval(losses[:, i]) for i in range(losses.shape[1])]
    return tuple(np.array([getattr(i, field) for i in intervals]) for field in ("low", "mean", "high"))


def learning_rates(a: Analysis) -> plt.Figure:
    """Validation loss at the end over the learning rate: mean of the tuning seeds, and each fresh seed's run.

    Variants of one rate are left out where others have a choice. What is above the picture stands at its upper edge.
    """
    rows = [names for names in panels(a) if len(a.variants[names[0]].grid) > 1] or panels(a)
    figure, pictures = plt.subplots(len(rows), 1, figsize=(6, 3.4 * len(rows)), squeeze=False)
    clipped = [_rates_of(a, names, axes) for names, axes in zip(rows, pictures[:, 0], strict=True)]
    chosen = any(len(v.grid) > 1 for v in a.variants.values())
    marks = ["triangles: above the picture"] * any(clipped)
    marks += ["numbers: runs that diverged"] * any(axes.texts for axes in pictures[:, 0])
    lines = ["line: tuning seeds; " * chosen + "dots: fresh seeds", "; ".join(marks)]
    pictures[0, 0].set_title("\n".join(filter(None, lines)), pad=16, fontsize=9)
    figure.tight_layout()
    return figure


def _rates_of(a: Analysis, names: list[str], axes) -> bool:
    """The learning rates of one panel's variants; whether a loss is above the picture."""
    grid = sorted({rate for name in names for rate in a.variants[name].grid})
    ours = [run for run in a.results.found.values() if run["variant"] in names]
    low, high = _limits([run["val_loss"] for run in ours if run["val_loss"] is not None])
    clipped = False
    for i, name in enumerate(names):
        look = _look(i)
        found = [tuned(a.results, a.record, name, r) for r in (grid if len(a.variants[name].grid) > 1 else ())]
        means = [np.nan if t.n_diverged else t.loss for t in found]
        axes.plot(grid[: len(means)], means, label=name, **look)  # a line may leave the picture
        fresh = [r for r in ours if r["variant"] == name and r["phase"] == "final" and r["val_loss"] is not None]
        shown = [(r["learning_rate"], r["val_loss"]) for r in fresh if r["val_loss"] <= high]
        above = [r["learning_rate"] for r in fresh if r["val_loss"] > high]
        above += [rate for rate, mean in zip(grid, means, strict=False) if mean > high]
        axes.plot([rate for rate, _ in shown], [loss for _, loss in shown], ".", alpha=0.35, color=look["color"])
        if above:
            axes.plot(above, [high] * len(above), "^", alpha=0.6, color=look["color"], clip_on=False)
            clipped = True
    margin = max((grid[-1] / grid[0]) ** 0.05, 1.1)
    axes.set(xlim=(grid[0] / margin, grid[-1] * margin), ylim=(low, high), xscale="log")
    for rate, n in collections.Counter(run["learning_rate"] for run in ours if run["val_loss"] is None).items():
        axes.text(rate, 1.02, f"{n}", fontsize=8, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    if len(grid) <= 8:  # of more, the decades are enough
        axes.minorticks_off()
        axes.set_xticks(grid, [f"{rate:g}" for rate in grid])
    axes.set(xlabel="learning rate", ylabel=f"validation {LOSS}")
    _legend(axes)
    return clipped


def _limits(losses: list[float]) -> tuple[float, float]:
    """Where the picture begins and ends: most of the runs fill it, whatever a few come to."""
    if not losses:
        return 0.0, 1.0
    low, high = min(losses), np.percentile(losses, 95)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, min(max(losses) + margin, high + 10 * margin)


def equal_cost(a: Analysis) -> plt.Figure:
    """Validation loss over the floating-point operations spent, and over the seconds that they took here."""
    curves, rows = _curves(a)
    figure, pictures = _rows(len(rows), sharey="row")
    for names, (by_flops, by_time) in zip(rows, pictures, strict=True):
        _over_cost(a, curves, names, by_flops, lambda v: v.flops)
        _over_cost(a, curves, names, by_time, lambda v: 1 / v.tokens_per_second)
        by_flops.set(xlabel="training FLOPs", ylabel=f"validation {LOSS}", title="equal FLOPs")
        by_time.set(xlabel="seconds of this machine a run", title="equal time")
        _name_diverged(a, names, by_time)
        _legend(by_time)
    figure.tight_layout()
    return figure


def _over_cost(a: Analysis, curves: dict, names: list[str], axes, cost_per_token) -> None:
    """The second halves of the curves, which tell ends apart; whole curves where costs are too far apart for that."""
    costs = {n: curves[n][0] * tokens_per_step(a, v) * cost_per_token(v) for n, v in a.variants.items() if n in curves}
    ends = [costs[name][-1] for name in names if name in curves]
    far_apart = bool(ends) and max(ends) > 2 * min(ends)
    for i, name in enumerate(names):
        if name in curves:
            steps, losses = curves[name]
            keep = (steps > 0) & (far_apart | (steps * 2 >= steps[-1]))
            v = a.variants[name]
            axes.plot(costs[name][keep], v.middle(losses)[keep], label=v.label, **_look(i))
    axes.set_xscale("log" if far_apart else "linear")
