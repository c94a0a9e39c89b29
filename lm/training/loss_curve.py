"""Plot the training and validation losses of runs over their steps."""

import array
import io
from collections.abc import Iterable, Mapping

from lm.workdir.metrics import validation_losses

SIZE_INCHES = (6.4, 3.6)
DPI = 120
FEW = 30  # points that are drawn with markers


def to_png(figure) -> bytes:
    """Return a figure as the bytes of a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def loss_curve(lines: Iterable[dict], unigram_loss: float | None = None):
    """Return the figure of the lines of a metrics.jsonl, and of a unigram baseline unless None."""
    axes = _axes()
    _draw(axes, lines, "#56B4E9", "#D55E00", ("training", "validation"))
    if unigram_loss is not None:
        look = {"color": "#777777", "linestyle": ":", "linewidth": 1}
        axes.axhline(unigram_loss, **look, label="unigram baseline")
    return _finished(axes)


def loss_curves(runs: Mapping[str, Iterable[dict]], title: str = ""):
    """Return the figure of several runs: dotted validation losses, and thin training losses."""
    axes = _axes()
    axes.set_title(title)
    for i, (name, lines) in enumerate(runs.items()):
        _draw(axes, lines, f"C{i % 10}", f"C{i % 10}", ("", name), alpha=0.3)
    return _finished(axes)


def _axes():
    from matplotlib.figure import Figure

    return Figure(SIZE_INCHES, DPI, layout="constrained").add_subplot()


def _draw(
    axes,
    lines: Iterable[dict],
    training_color: str,
    color: str,
    labels: tuple[str, str],
    alpha: float = 1,
) -> None:
    # of millions of lines, 16 bytes each are kept
    steps = array.array("d")
    losses = array.array("d")
    evaluations = []
    for line in lines:
        if "split" in line:
            evaluations.append(line)
        elif "loss" in line:
            steps.append(line["step"])
            losses.append(line["loss"])
    validation = sorted(validation_losses(evaluations).items())
    average = validation_losses(
        line | {"loss": line["ema_loss"]} for line in evaluations if "ema_loss" in line
    )
    if steps:
        few = "." if len(steps) <= FEW else None  # a line of one point is invisible
        style = {"color": training_color, "linewidth": 1, "marker": few, "alpha": alpha}
        axes.plot(steps, losses, **style, label=labels[0])
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color=color, markersize=4, label=labels[1])
    if average:
        label = f"{labels[1]}, averaged parameters"
        points = zip(*sorted(average.items()), strict=True)
        axes.plot(*points, "--", color=color, linewidth=1, label=label)


def _finished(axes):
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        for text in axes.legend(frameon=False).get_texts():
            text.set_parse_math(False)  # names of runs may have dollar signs
    return axes.figure
