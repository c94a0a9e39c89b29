"""The picture of an evaluation, as a PNG file."""

import io
from typing import Any

from matplotlib.figure import Figure

from lm.scoring.report import short_names
from lm.scoring.texts import TextResult

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
MARKERS = "osD^vPX"
MAX_LETTERS = 40  # of the name of a text


def context_png(results: list[TextResult], seq_len: int) -> bytes:
    """Draw the loss over the length of the context, with bars of one standard error; baselines beside a single text.

    Args:
        results: the evaluations of one or several texts; their plain windows are drawn.
        seq_len: the longest context.
    """
    figure = Figure((6.4, 3.8 + 0.11 * len(results)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for i, (name, result) in enumerate(zip(_labels(results), results, strict=True)):
        bins = result.plain.by_context
        # The middle of a bin on the logarithmic axis.
        middles = [(b.first * b.last) ** 0.5 for b in bins]
        again, color = divmod(i, len(COLORS))
        look: dict[str, Any] = {"color": COLORS[color], "marker": MARKERS[(i + again) % len(MARKERS)]}
        errors = [b.loss.error or 0.0 for b in bins]
        axes.errorbar(
            middles, [b.loss.value for b in bins], errors, label=name, markersize=5, capsize=2, linewidth=1.4, **look
        )
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.85, 1.15 * seq_len)
    axes.minorticks_off()
    ticks = [2**i for i in range(seq_len.bit_length())]
    step = -(-len(ticks) // 9)
    axes.set_xticks(ticks[::step], [f"{tick:,}" for tick in ticks[::step]])
    axes.set(xlabel="tokens of context", ylabel="loss (nats per token)")
    if len(results) > 1:
        figure.legend(frameon=False, loc="outside lower center", ncols=2)
    else:
        axes.set_title(_labels(results)[0], loc="left", fontsize=10)
        _draw_baselines(axes, results[0].baselines)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_baselines(axes, baselines: dict[str, float]) -> None:
    """Draw a line for each baseline, with its name above the right end."""
    for name, loss in baselines.items():
        axes.axhline(loss, color="#777777", linestyle=":", linewidth=1.2)
        place = {"xy": (0.99, loss), "xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
        axes.annotate(name, xytext=(0, 2), ha="right", va="bottom", color="#555555", fontsize=9, **place)
    axes.margins(y=0.1)


def _labels(results: list[TextResult]) -> list[str]:
    return [name if len(name) <= MAX_LETTERS else f"...{name[3 - MAX_LETTERS :]}" for name in short_names(results)]
