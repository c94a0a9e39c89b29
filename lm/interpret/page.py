"""The page of `lm.inspect`: one self-contained HTML file that shows how a model processes a text."""

import base64
import html
import json
import math
from importlib import resources

import numpy as np

from lm.config import ResolvedModel
from lm.interpret.measure import Measurements, Ranking
from lm.system.text_tables import for_terminal, html_page
from lm.trained_model import TrainedModel


def to_html(run: TrainedModel, m: Measurements) -> str:
    """Return the page for the measurements of a text."""
    c = run.config.model
    title = for_terminal(f"{run.path}, step {run.step}")
    size = (
        f"{c.n_layers} layers of {c.n_heads} heads, width {c.d_model}, {c.vocab_size:,} token ids"
    )
    uniform = math.log(c.vocab_size)  # loss of a uniform guess
    losses = m.losses_T[1:]
    loss = f", mean loss {losses.mean():.3f} nats per token" if len(losses) else ""
    sections = [
        f"<h1>{html.escape(title)}</h1><p>{size}. The text has {len(m.ids_T)} tokens{loss}.</p>",
        _section("loss", "Loss per token", LOSS.format(uniform=uniform), _text(m, uniform)),
        _section("next", "Likely next tokens", NEXT, '<div id="bars"></div>'),
        _section("lens", "Logit lens", LENS, GRID),
        _section("attention", "Attention", _attention_help(m, c), MAPS),
        _section("norms", "Norms by layer", NORMS, norms_table(m)),
    ]
    files = resources.files("lm.interpret")
    style = files.joinpath("page.css").read_text(encoding="utf-8")
    script = files.joinpath("page.js").read_text(encoding="utf-8")
    data = f'<script type="application/json" id="data">{data_json(m)}</script>'
    return html_page(title, style, "".join(sections) + data, script)


LOSS = (
    "The darker a token, the less the model expected it: its loss is the negative logarithm of its "
    "probability, from white for 0 to orange for at least {uniform:.1f} nats, the loss of a "
    "uniform guess. The first token is not predicted. Select a token to see what the model "
    "predicted after it."
)
NEXT = (
    "The bars are the probabilities of the token that follows the selected one; the token that "
    "follows is marked."
)
LENS = (
    "Each cell is the next token that the model would predict if it had no later layers: the final "
    "norm and the output head are applied to the residual stream, the vector of a token to which "
    "each layer adds (nostalgebraist 2020). Read a column downwards to see where the prediction is "
    "made. The darker, the more probable; a frame marks the token that follows in the text."
)
GRID = '<div class="scroll"><table id="grid"></table></div><p id="cell"></p>'
MAPS = (
    '<div id="maps"></div><p id="weight"></p>'
    '<div id="large"><div id="axes"><div id="rows"></div><canvas id="map"></canvas><div id="columns"></div></div>'
    '<p id="sources"></p></div>'
)
NORMS = (
    "The mean length of the vectors that each branch of a layer adds to the residual "
    "stream, and of the residual stream after the layer: a short addition to a long stream changes "
    "little."
)


def _attention_help(m: Measurements, c: ResolvedModel) -> str:
    left_out = ""
    if len(m.weights) < c.n_layers:
        left_out = (
            f" Shown are {len(m.weights)} of {c.n_layers} layers; --layers chooses others that "
            "have attention."
        )
    if c.loops > 1:
        left_out += " Those of looped layers are of the last turn."
    return (
        "Each small map is a head. Its rows are the tokens that read, its columns the tokens that "
        "are read. The darker, the larger the weight (a row adds up to 1). A dark line along the "
        "diagonal means that the head reads the token itself or one just before it; a dark column "
        "is a token that many others read. Select a head, then a row of its map to see the tokens "
        "that it reads. The shade is the square root of the weight, so that small weights are "
        f"visible.{left_out}"
    )


def _section(name: str, title: str, text: str, content: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2><p>{text}</p>{content}</section>'


def _text(m: Measurements, uniform: float) -> str:
    """Return the text, each token colored by its loss."""
    spans = []
    for t, (i, loss) in enumerate(zip(m.ids_T.tolist(), m.losses_T.tolist(), strict=True)):
        shade = 0.0
        title = "not predicted"
        if not math.isnan(loss):
            shade = min(1.0, loss / (uniform or math.log(2)))  # a vocabulary may have one token
            title = f"loss {loss:.3f}, probability {100 * math.exp(-loss):.3g} %"
        text = html.escape(m.labels[i].replace("␣", " "))
        line_end = "\n" * ("↵" in m.labels[i])
        spans.append(
            f'<span data-t="{t}" title="position {t}: {title}" style="--shade:{shade:.3f}">'
            f"{text}</span>{line_end}"
        )
    return f'<div class="text" id="text">{"".join(spans)}</div>'


def data_json(m: Measurements) -> str:
    """Return the data of the page's script; no token can end the script, as "<" is escaped."""
    maps = [{"layer": i, "heads": len(w), "weights": pack(w)} for i, w in m.weights.items()]
    data = {
        "ids": m.ids_T.tolist(),
        "labels": {str(i): text for i, text in m.labels.items()},
        "next": _ranking(m.next),
        "lens": [{"name": name} | _ranking(ranking) for name, ranking in m.lens.items()],
        "attention": maps,
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _ranking(r: Ranking) -> dict:
    def rounded(x):
        return [None if math.isnan(p) else float(f"{p:.4g}") for p in x.tolist()]

    return {
        "ids": r.ids_TR.tolist(),
        "p": [rounded(row) for row in r.p_TR],
        "actual": rounded(r.actual_T),
    }


def pack(weights_HTT: np.ndarray) -> str:
    """Return the lower triangles of maps in base64, row by row, a byte per weight (units 1/255).

    >>> list(base64.b64decode(pack(np.array([[[1.0, 0.0], [0.2, 0.8]]]))))
    [255, 51, 204]
    """
    rows, columns = np.tril_indices(weights_HTT.shape[-1])
    triangles = np.round(255 * np.clip(weights_HTT[:, rows, columns], 0, 1)).astype(np.uint8)
    return base64.b64encode(triangles.tobytes()).decode()


def norms_table(m: Measurements) -> str:
    """Return a table with a row for the embedding, which no branch adds to, and one for each layer."""
    largest = max(np.nanmax(x) for x in m.norms.values()) or 1.0
    rows = ["".join(f"<th>{name}</th>" for name in ("", *m.norms))]
    for name, *values in zip(m.lens, *m.norms.values(), strict=True):
        row = f"<th>{name}</th>"
        for value in values:
            bar = f'<i style="width:{10 * value / largest:.2f}rem"></i>{value:.4g}'
            row += f"<td>{'' if math.isnan(value) else bar}</td>"
        rows.append(row)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
