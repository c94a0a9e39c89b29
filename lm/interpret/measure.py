"""Measure everything that the page of `lm.inspect` shows."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lm.config import branches_of, query_heads
from lm.data.tokenizers import HFTokenizer, Tokenizer
from lm.interpret.intermediates import applied_layers, capture, logit_lens, names
from lm.system.errors import UserError
from lm.trained_model import TrainedModel

MAX_TOKENS = 1024  # on a page
MAX_WEIGHTS = 2**24  # attention weights on a page, one byte each
# likely next tokens for each position, and for each position and layer of the logit lens
N_NEXT = 10
N_LENS = 5


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The R likeliest next tokens after each of the T tokens of a text, by falling probability."""

    ids_TR: np.ndarray
    p_TR: np.ndarray  # their probabilities
    # the probability of the token that follows in the text; NaN after the last one
    actual_T: np.ndarray


@dataclasses.dataclass(frozen=True)
class Measurements:
    """The measurements of a model that reads a text."""

    ids_T: np.ndarray
    labels: dict[int, str]  # printable texts of all tokens that occur, by id
    losses_T: np.ndarray  # loss of each token given those before it, in nats; NaN for the first
    next: Ranking
    lens: dict[str, Ranking]  # the same after each layer, by its name
    # attention weights (H, T, T) of some layers, in the last turn of a loop
    weights: dict[int, np.ndarray]
    # Mean Euclidean norm over the tokens, (N + 1,): of the embedding and of the residual stream
    # after each layer that is applied, and of what branches add to it (NaN for the embedding).
    norms: dict[str, np.ndarray]


def measure(run: TrainedModel, text: str, layers: Sequence[int] | None = None) -> Measurements:
    """Run a model on a text.

    Args:
        text: at least one token, and not more than the context of the model or MAX_TOKENS.
        layers: layers whose attention weights are kept; None: all, or as many as MAX_WEIGHTS
            allows, evenly spaced.

    Raises:
        UserError: if the text or the layers do not fit the model or the page, or its logits are not
            finite.
    """
    ids_T = run.encode(text)
    n_layers = run.config.model.n_layers
    limit = min(run.seq_len, MAX_TOKENS)
    if not 0 < len(ids_T) <= limit:
        why = "the context of the model" if limit == run.seq_len else "the limit of a page"
        raise UserError(f"--prompt: {len(ids_T)} tokens; expected 1 to {limit}, {why}")
    n_pairs = len(ids_T) * (len(ids_T) + 1) // 2  # of a query and a key before it
    layers = choose_layers(layers, n_layers, query_heads(run.config.model) * n_pairs)
    known = names(run)
    rows = {"embedding": "embedding"}
    applied = applied_layers(run)
    last_turn = {}  # of each layer
    for path in applied:
        turn, _, layer = path.removeprefix("turns/").rpartition("layers/")
        title = f"turn {turn.rstrip('/')}, layer {layer}" if turn else f"layer {layer}"
        rows[title] = f"{path}/residual"
        last_turn[int(layer)] = path
    # what a branch adds to the stream, through its norm if it has one there
    branches = {}
    for branch in branches_of(run.config.model):
        title = branch.name.replace("ffn", "feed-forward").replace("_", " ")
        normed = f"{branch.name}_post_norm/output"
        branches[title] = normed if f"layers/0/{normed}" in known else f"{branch.name}/output"
    # of those with attention
    weights = {i: name for i in layers if (name := f"{last_turn[i]}/attention/weights") in known}
    wanted = [*rows.values(), *weights.values()]
    wanted += [f"{path}/{output}" for path in applied for output in branches.values()]
    logits_TV, acts = capture(run, ids_T, wanted)
    if not jnp.isfinite(logits_TV).all():
        raise UserError(
            f"{run.path}, step {run.step}: the logits are not finite; choose another --step"
        )

    assert run.tokenizer  # it has encoded the prompt
    ranking = _rank(logits_TV, ids_T, N_NEXT)
    lens = {row: _rank(logit_lens(run, acts[name]), ids_T, N_LENS) for row, name in rows.items()}
    shown = {*ids_T.tolist(), *ranking.ids_TR.flat}
    for of_layer in lens.values():
        shown.update(of_layer.ids_TR.flat)
    norms = {"residual stream": np.array([_mean_norm(acts[name]) for name in rows.values()])}
    for title, output in branches.items():
        of_layers = [_mean_norm(acts[f"{path}/{output}"]) for path in applied]
        norms[title] = np.array([math.nan, *of_layers])
    return Measurements(
        ids_T=ids_T,
        labels={i: label(run.tokenizer, i) for i in sorted(map(int, shown))},
        losses_T=np.concatenate([[np.nan], -np.log(np.maximum(ranking.actual_T[:-1], 1e-38))]),
        next=ranking,
        lens=lens,
        weights={i: np.asarray(acts[name], np.float32) for i, name in weights.items()},
        norms=norms,
    )


def choose_layers(layers: Sequence[int] | None, n_layers: int, n_weights: int) -> list[int]:
    """Return the layers whose attention a page shows, at most MAX_WEIGHTS weights.

    With layers = None, these are all if they fit, else evenly spaced ones with the first and the
    last. A layer of the model has n_weights.

    Raises:
        UserError: if a layer does not exist, or they do not fit.

    >>> choose_layers(None, n_layers=12, n_weights=MAX_WEIGHTS // 4)
    [0, 4, 7, 11]
    """
    n_fit = MAX_WEIGHTS // n_weights
    if layers is None:
        spaced = np.linspace(0, n_layers - 1, min(n_layers, max(1, n_fit)))
        layers = spaced.round().astype(int).tolist()
    chosen = sorted(set(layers))
    if unknown := [i for i in chosen if not 0 <= i < n_layers]:
        raise UserError(f"--layers: {unknown[0]} is not a layer; expected 0 to {n_layers - 1}")
    if len(chosen) > n_fit:
        fewer = f"at most {n_fit} layers or " * (n_fit > 0)
        raise UserError(
            f"--layers: the attention of {len(chosen)} layers has {len(chosen) * n_weights:,} "
            f"weights; a page shows at most {MAX_WEIGHTS:,}: use {fewer}a shorter prompt"
        )
    return chosen


def label(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a printable text for a token: white space and control characters are made visible.

    >>> from lm.data.tokenizers import ByteTokenizer, CharTokenizer
    >>> [label(CharTokenizer("a \\n\\u200b"), i) for i in range(5)], label(ByteTokenizer(), 0xE2)
    (['↵', '␣', 'a', 'U+200B', '<4>'], '<0xE2>')
    """
    if token_id >= tokenizer.vocab_size:  # the model may have more ids than its tokenizer
        return f"<{token_id}>"
    text = tokenizer.decode([token_id])
    token = ""
    if isinstance(tokenizer, HFTokenizer):
        token = tokenizer.model.id_to_token(token_id) or ""
    if "\ufffd" in text:  # part of a character
        return token or (f"<0x{token_id:02X}>" if tokenizer.kind == "byte" else text)
    # SentencePiece drops the space before the first word
    if token.startswith("▁") and not text.startswith(" "):
        text = f" {text}"
    return "".join(map(_visible, text)) or f"<{token or token_id}>"


def _visible(character: str) -> str:
    named = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
    return named.get(character, character if character.isprintable() else f"U+{ord(character):04X}")


def _mean_norm(x_TD) -> float:
    return float(np.linalg.norm(np.asarray(x_TD, np.float64), axis=-1).mean())


def _rank(logits_TV, ids_T: np.ndarray, n: int) -> Ranking:
    p_TR, ids_TR, actual_T = jax.device_get(_top(logits_TV, jnp.asarray(ids_T, jnp.int32), n))
    return Ranking(ids_TR, p_TR, np.append(actual_T, math.nan))


@functools.partial(jax.jit, static_argnames="n")
def _top(logits_TV, ids_T, n: int):
    p_TV = jax.nn.softmax(logits_TV)
    p_TR, ids_TR = jax.lax.top_k(p_TV, min(n, p_TV.shape[-1]))
    return p_TR, ids_TR, jnp.take_along_axis(p_TV[:-1], ids_T[1:, None], axis=-1)[:, 0]
