"""Plot the training and validation losses of runs over their steps."""

import io
from pathlib import Path

from lm.workdir.metrics import read_metrics, validation_losses

SIZE_INCHES, DPI = (6.4, 3.6), 120
FEW = 30  # points that are drawn with markers


def loss_curve_png(metrics: Path, unigram_loss: float | None = None) -> bytes:
    """Draw the losses of a metrics.jsonl as a PNG.

    Args:
        metrics: the file.
        unigram_loss: the validation loss of the unigram baseline, drawn as a line; None: no line.
    """
    return to_png(loss_curve(read_metrics(metrics), unigram_loss))


def to_png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def loss_curve(lines: list[dict], unigram_loss: float | None = None):
    """Return the figure of the lines of a metrics.jsonl."""
    axes = _axes()
    _draw(axes, lines, "#56B4E9", "#D55E00", ("training", "validation"))
    if unigram_loss is not None:
        axes.axhline(unigram_loss, color="#777777", linestyle=":", linewidth=1, label="unigram baseline")
    return _finished(axes)


def loss_curves(runs: dict[str, list[dict]]):
    """Return the figure of several runs: dots and lines are validation losses, thin lines training losses."""
    axes = _axes()
    for i, (name, lines) in enumerate(runs.items()):
        _draw(axes, lines, f"C{i % 10}", f"C{i % 10}", ("", name), alpha=0.3)
    return _finished(axes)


def scores_png(metrics: Path) -> bytes:
    """Draw the scores of probes and tasks in a metrics.jsonl as a PNG, a panel for each; dashed: of an average."""
    from matplotlib.figure import Figure

    scores: dict[str, list[tuple[int, float]]] = {}
    for line in read_metrics(metrics):
        for name, value in line.get("scores", {}).items():
            scores.setdefault(name, []).append((line["step"], value))
    names = [name for name in scores if not name.endswith("/ema")]
    n_rows = max(1, -(-len(names) // 2))
    figure = Figure((SIZE_INCHES[0], 2.2 * n_rows), DPI, layout="constrained")
    for axes, name in zip(figure.subplots(n_rows, 2, squeeze=False).flat, names, strict=False):
        for which, style, label in ((name, "o-", ""), (f"{name}/ema", "--", "averaged parameters")):
            if which in scores:
                points = zip(*scores[which], strict=True)
                axes.plot(*points, style, color="#D55E00", markersize=3, linewidth=1, label=label)
        axes.set_title(name, loc="left", fontsize=9, parse_math=False)
        _finished(axes, "loss (nats)" if name.startswith("probe/") else "")
    for axes in figure.axes[len(names) :]:
        axes.remove()
    return to_png(figure)


def _axes():
    from matplotlib.figure import Figure

    return Figure(SIZE_INCHES, DPI, layout="constrained").add_subplot()


def _draw(axes, lines: list[dict], training_color: str, color: str, labels: tuple[str, str], alpha: float = 1) -> None:
    training = [(line["step"], line["loss"]) for line in lines if "split" not in line and "loss" in line]
    validation = sorted(validation_losses(lines).items())
    average = validation_losses(line | {"loss": line["ema_loss"]} for line in lines if "ema_loss" in line)
    if training:
        few = "." if len(training) <= FEW else None  # a line of one point is invisible
        style = {"color": training_color, "linewidth": 1, "marker": few, "alpha": alpha}
        axes.plot(*zip(*training, strict=True), **style, label=labels[0])
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color=color, markersize=4, label=labels[1])
    if average:
        label = f"{labels[1]}, averaged parameters"
        axes.plot(*zip(*sorted(average.items()), strict=True), "--", color=color, linewidth=1, label=label)


def _finished(axes, unit: str = "loss (nats per token)"):
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="step", ylabel=unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        for text in axes.legend(frameon=False).get_texts():
            text.set_parse_math(False)  # names of runs may have dollar signs
    return axes.figure
