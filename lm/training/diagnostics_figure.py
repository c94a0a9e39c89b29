"""Plot the diagnostics of a run by layer, and its scores."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lm.training.loss_curve import to_png
from lm.workdir.metrics import iter_metrics

WIDTH, HEIGHT_OF_ROW, DPI = 10.0, 3.0, 100  # inches
ALL_LAYERS_LABELED = 4  # deeper models label the first and the last layer only
LOG_FROM = 10  # ratio of the largest to the smallest value from which an axis is logarithmic

WEIGHTS = (("layers", "-", ""), ("embedding", "--", "embedding"), ("head/w_DV", ":", "head"))

# Title, unit, and the quantities: kind, path, line style, and a label of the curve ("": layers).
PANELS = (
    ("Largest attention logit", "logit", [("attention", "layers/max_logit", "-", "")]),
    (
        "Attention entropy, mean of heads",
        "nats",
        [
            ("attention", "layers/entropy", "-", ""),
            ("attention", "layers/max_entropy", ":", "equal weights"),
        ],
    ),
    ("Residual stream after each layer", "RMS", [("activations", "layers/output", "-", "")]),
    (
        "Output of attention (solid) and feed-forward (dashed)",
        "RMS",
        [("activations", "layers/attention", "-", ""), ("activations", "layers/ffn", "--", "")],
    ),
    *(
        (title, unit, [(kind, path, style, label) for path, style, label in WEIGHTS])
        for kind, title, unit in (
            ("gradients", "Gradients of weights", "RMS"),
            ("parameters", "Weights", "RMS"),
            ("updates", "Updates of weights", "RMS of one step"),
            ("update_ratio", "Update / weight", "ratio of RMS"),
        )
    ),
)


def diagnostics_png(metrics: Path) -> bytes:
    """Draw the diagnostics in a metrics.jsonl as a PNG, one panel per quantity and one curve per
    layer.

    Curves of layers are dark for the first layer and light for the last. Values that are not
    finite, and those that are not positive on a logarithmic axis, are left out.
    """
    details = [(line["step"], line["detail"]) for line in iter_metrics(metrics) if "detail" in line]
    return _panels_png(details, PANELS)


def scores_png(metrics: Path) -> bytes:
    """Draw the scores of probes and tasks in a metrics.jsonl as a PNG, one panel for each."""
    details = [(line["step"], line) for line in iter_metrics(metrics) if "scores" in line]
    panels = {}
    for _, line in details:
        for name in (name.removesuffix("/ema") for name in line["scores"]):
            unit = "nats" if name.startswith("probe/") else ""
            own = ("scores", name, "-", "parameters")
            average = ("scores", f"{name}/ema", "--", "average")
            panels[name] = (name, unit, [own, average])
    return _panels_png(details, list(panels.values()))


def _panels_png(details: list[tuple[int, dict]], panels: Sequence[tuple]) -> bytes:
    """Draw panels, given as in PANELS, in two columns."""
    from matplotlib.figure import Figure

    n_rows = math.ceil(len(panels) / 2)
    figure = Figure((WIDTH, HEIGHT_OF_ROW * n_rows), DPI, layout="constrained")
    for i, (title, unit, sources) in enumerate(panels):
        axes = figure.add_subplot(n_rows, 2, i + 1)
        _draw(axes, [curve for source in sources for curve in curves_of(details, *source)])
        axes.set_title(title, loc="left", fontsize=10, parse_math=False)
        axes.set(xlabel="step", ylabel=unit)
    return to_png(figure)


def curves_of(
    details: list[tuple[int, dict]], kind: str, path: str, style: str, label: str
) -> list[tuple]:
    """Return (steps, values, label, color, line style) of each curve of one quantity.

    details[i] = step, detail; detail[kind][path] is a number, or a list of one number per layer.
    Lines without it are skipped. Without a label each layer has its own.
    """
    known = [(step, detail[kind][path]) for step, detail in details if path in detail.get(kind, {})]
    if not known:
        return []
    steps = [step for step, _ in known]
    values_NS = np.array([np.atleast_1d(value) for _, value in known], float).T
    if label:
        return [(steps, values_S, label, "#777777", style) for values_S in values_NS]
    looks = [_look(layer, len(values_NS)) for layer in range(len(values_NS))]
    return [
        (steps, *curve, style) for curve in zip(values_NS, *zip(*looks, strict=True), strict=True)
    ]


def _look(layer: int, n_layers: int) -> tuple[str, tuple]:
    """Return the label of a layer's curve, empty if it has none, and its color."""
    from matplotlib import colormaps

    is_labeled = n_layers <= ALL_LAYERS_LABELED or layer in (0, n_layers - 1)
    color = colormaps["viridis"](0.88 * layer / max(1, n_layers - 1))
    return f"layer {layer}" if is_labeled else "", color


def _draw(axes, curves: list[tuple]) -> None:
    values = np.concatenate([curve[1] for curve in curves] or [np.zeros(0)])
    is_log = _is_log(values)
    axes.set_yscale("log" if is_log else "linear")
    labeled = set()
    for steps, y, label, color, style in curves:
        y = np.where(np.isfinite(y) & ((y > 0) | (not is_log)), y, np.nan)
        shown = label if np.isfinite(y).any() and label not in labeled else ""
        labeled.add(shown)
        marker = "o" if np.isfinite(y).sum() == 1 else ""  # a line of one point is invisible
        look = {"color": color, "linestyle": style, "marker": marker, "linewidth": 1.4}
        axes.plot(steps, y, **look, label=shown or "_hidden")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if labeled - {""}:
        place = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        axes.legend(fontsize=8, frameon=False, handlelength=1, **place)
    else:
        axes.set_yticks([])
        why = "zero or not finite" if curves else "not measured"
        axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color="#777777")


def _is_log(values: np.ndarray) -> bool:
    """Return whether the values need a logarithmic axis: zeros, which it cannot show, are ignored.

    >>> _is_log(np.array([0.0, 0.1, 2.0])), _is_log(np.array([1.0, 2.0])), _is_log(np.array([-1.0, 0.1, 2.0]))
    (True, False, False)
    """
    values = values[np.isfinite(values) & (values != 0)]
    return bool(len(values) and values.min() > 0 and values.max() >= LOG_FROM * values.min())
