"""Plot the training and validation loss of a run over its steps."""

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
    buffer = io.BytesIO()
    loss_curve(read_metrics(metrics), unigram_loss).savefig(buffer, format="png")
    return buffer.getvalue()


def loss_curve(lines: list[dict], unigram_loss: float | None = None):
    """Return the figure of the lines of a metrics.jsonl."""
    from matplotlib.figure import Figure

    # Skip lines of stacked runs, which have a list of losses.
    training = [(line["step"], x) for line in lines if "split" not in line and isinstance(x := line.get("loss"), float)]
    validation = sorted(validation_losses(lines).items())
    figure = Figure(SIZE_INCHES, DPI, layout="constrained")
    axes = figure.add_subplot()
    if training:
        few = "." if len(training) <= FEW else None  # a line of one point is invisible
        axes.plot(*zip(*training, strict=True), color="#56B4E9", linewidth=1, marker=few, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="#D55E00", markersize=4, label="validation")
    if unigram_loss is not None:
        axes.axhline(unigram_loss, color="#777777", linestyle=":", linewidth=1, label="unigram baseline")
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return figure
