"""The pictures of a sweep's report: readable by colour-blind eyes (Okabe and Ito 2008), and in grey."""

import collections
import io

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from lm.sweeps import statistics
from lm.sweeps.analysis import Analysis, curve, tokens_per_step

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


def _look(a: Analysis, name: str) -> dict:
    again, i = divmod(list(a.variants).index(name), len(COLOURS))  # with a colour's second use everything else differs
    return {"color": COLOURS[i], "linestyle": STYLES[(i + again) % len(STYLES)]}


def _marker(a: Analysis, name: str) -> str:
    again, i = divmod(list(a.variants).index(name), len(MARKERS))
    return MARKERS[(i + again) % len(MARKERS)]


def _legend(axes) -> None:
    """Beside the picture, where it hides nothing."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))


def differences(a: Analysis) -> plt.Figure:
    """The declared comparisons: the difference of each seed, their mean and its interval."""
    figure, axes = plt.subplots(figsize=(6, 0.9 + 0.5 * len(a.comparisons)))
    for y, comparison in enumerate(reversed(a.comparisons)):
        d = comparison.difference
        if d is None:
            axes.text(0, y, " runs diverged", va="center")
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
    """Validation loss over training, with the band of the 95 % interval over seeds; and its last part, larger."""
    figure, (whole, end) = plt.subplots(1, 2, figsize=(9, 3.4))
    curves = {name: curve(v.runs) for name, v in a.variants.items()}
    half = max((steps[-1] for steps, _ in curves.values() if len(steps)), default=0) / 2
    means = []  # of the second half, which shorter runs do not reach
    for name, (steps, losses) in curves.items():
        if len(steps) == 0 or not np.isfinite(losses).all():
            continue  # what diverged is told in the table; a mean over the others would flatter it
        low, mean, high = _band(losses)
        steps = np.array(steps)
        means += list(mean[steps >= half])
        for axes, first in ((whole, 0), (end, half)):
            part = steps >= first
            x = steps[part]
            axes.plot(x, mean[part], label=name, marker=_marker(a, name), markersize=3, **_look(a, name))
            axes.fill_between(x, low[part], high[part], color=_look(a, name)["color"], alpha=0.15, linewidth=0)
    low, high = whole.get_ylim()
    for unigram in {v["data"]["unigram"]["validation"] for v in a.record["variants"].values()} - {None}:
        if low < unigram < high:
            whole.axhline(unigram, label="counting tokens alone", color="#777777", linestyle=":", linewidth=1)
    whole.set(xlabel="step", ylabel=f"validation {LOSS}", title="learning curves")
    end.set(xlabel="step", title="second half")
    if means:  # a band of seeds that part may be wider than all else is high
        lowest, highest = min(means), max(means)
        margin = 0.15 * (highest - lowest) or 0.1
        end.set_ylim(lowest - margin, highest + margin)
    _legend(end)
    figure.tight_layout()
    return figure


def _band(losses: np.ndarray):
    intervals = [statistics.interval(losses[:, i]) for i in range(losses.shape[1])]
    return tuple(np.array([getattr(i, field) for i in intervals]) for field in ("low", "mean", "high"))


def learning_rates(a: Analysis) -> plt.Figure:
    """Validation loss at the end over the learning rate: mean of the tuning seeds, and each fresh seed's run."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    finite = [run["val_loss"] for run in a.results.found.values() if run["val_loss"] is not None]
    roof = np.percentile(finite, 95) + 0.15 * (np.percentile(finite, 95) - min(finite)) if finite else 1.0
    diverged = collections.Counter()
    for name in a.variants:
        grid = a.record["variants"][name]["grid"]
        means = []
        for rate in grid:
            phase, seeds = ("tuning", "tuning_seeds") if len(grid) > 1 else ("final", "seeds")
            losses = [a.results.found[phase, name, rate, seed]["val_loss"] for seed in a.record[seeds]]
            means.append(np.inf if None in losses else np.mean(losses))
        shown = np.minimum(means, roof)
        axes.plot(grid, shown, label=name, marker=_marker(a, name), markersize=4, **_look(a, name))
        diverged.update(rate for rate, mean in zip(grid, means, strict=True) if np.isinf(mean))
        runs = [(k[2], r["val_loss"]) for k, r in a.results.found.items() if k[:2] == ("final", name) and r["val_loss"]]
        axes.plot([x for x, _ in runs], [min(y, roof) for _, y in runs], ".", alpha=0.35, color=_look(a, name)["color"])
    for rate, n in diverged.items():
        axes.annotate(f"{n} diverged", (rate, roof), fontsize=7, rotation=30)
    axes.set_xscale("log")
    rates = sorted({rate for variant in a.record["variants"].values() for rate in variant["grid"]})
    if len(rates) <= 8:  # of more, the decades are enough
        axes.minorticks_off()
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set(xlabel="learning rate", ylabel=f"validation {LOSS}")
    axes.set_title("line: tuning seeds; dots: fresh seeds", pad=20)
    _legend(axes)
    return figure


def equal_cost(a: Analysis) -> plt.Figure:
    """Validation loss over the floating-point operations spent, and over the seconds that they took here."""
    figure, (by_flops, by_time) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for name, v in a.variants.items():
        steps, losses = curve(v.runs)
        keep = np.array(steps) * 2 >= max(steps, default=0)
        mean = losses.mean(axis=0)[keep]
        tokens = np.array(steps)[keep] * tokens_per_step(a, v)
        for axes, x in ((by_flops, tokens * v.flops), (by_time, tokens / v.tokens_per_second)):
            axes.plot(x, mean, label=name, marker=_marker(a, name), markersize=3, **_look(a, name))
    by_flops.set(xlabel="training FLOPs", ylabel=f"validation {LOSS}", title="equal FLOPs")
    by_time.set(xlabel="seconds of this machine a run", title="equal time")
    _legend(by_time)
    figure.tight_layout()
    return figure
