"""Log-probabilities of given tokens: of a batch, and of many texts in windows."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm import model
from lm.config import ResolvedModel
from lm.ideas import masked_diffusion
from lm.layers.losses import head_logits, token_losses
from lm.step import fields_read

LOGITS = 2**25  # in a batch, unless its size is given
MAX_LOGITS = 2**26  # at most about this many logits exist at a time


def score_batch(
    params: dict, batch: dict, c: ResolvedModel
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weight and loss of each target, and whether it is the likeliest token: (B, T) each.

    Of masked diffusion these are its terms of the bound, and whether it is the likeliest token
    times the same weight: 0 where the model reads the token.
    """
    counts_BT, weights_BT, targets_BT, h_BTD = _hidden(params, batch, c)
    B, T = targets_BT.shape
    n = max(1, min(T, MAX_LOGITS // (B * c.vocab_size)))  # positions at a time
    losses = []
    hits = []
    for i in range(0, T, n):
        part = _score_targets(params, h_BTD[:, i : i + n], targets_BT[:, i : i + n], c)
        losses.append(np.asarray(part[0]))
        hits.append(np.asarray(part[1]))
    losses_BT = np.concatenate(losses, 1)
    hits_BT = np.concatenate(hits, 1)
    if c.masked_diffusion:
        losses_BT = losses_BT * np.asarray(weights_BT)
        hits_BT = hits_BT * np.asarray(weights_BT)
    return np.asarray(counts_BT), losses_BT, hits_BT


@functools.partial(jax.jit, static_argnames="c")
def _hidden(params, batch, c):
    fields = fields_read(batch, c)
    # of packed rows
    documents = {name: fields[name] for name in ("segments", "positions") if name in fields}
    h_BTD = model.hidden(params, c, fields["inputs"], **documents)
    counts_BT = fields.get("counts", fields["weights"])
    return counts_BT, fields["weights"], fields["targets"], h_BTD


@functools.partial(jax.jit, static_argnames="c")
def _score_targets(params, h_BTD, targets_BT, c):
    logits_BTV = head_logits(h_BTD, model.head(params, c))
    return token_losses(logits_BTV, targets_BT)[0], jnp.argmax(logits_BTV, -1) == targets_BT


class Window(NamedTuple):
    """At most context + 1 tokens: the last n_scored are predicted from those before them."""

    ids: Sequence[int]
    n_scored: int


class Likelihood(NamedTuple):
    """How likely the scored tokens of a window are."""

    log_p: float  # the sum of the natural logarithms of their probabilities
    is_greedy: bool  # whether each of them is the likeliest token


def split_text(
    context: Sequence[int], ids: Sequence[int], seq_len: int, *, full_last: bool
) -> Iterator[Window]:
    """Split a text into windows in which each token is predicted once.

    Args:
        context: the ids before the text, at least one.
        ids: the ids to score.
        seq_len: the number of tokens that the model sees.
        full_last: the last window starts early enough to be full; otherwise it starts where the one
            before it ends.

    >>> [(w.ids, w.n_scored) for w in split_text([9], [0, 1, 2, 3, 4], 3, full_last=True)]
    [([9, 0, 1, 2], 3), ([1, 2, 3, 4], 2)]
    >>> [(w.ids, w.n_scored) for w in split_text([9], [0, 1, 2, 3, 4], 3, full_last=False)]
    [([9, 0, 1, 2], 3), ([2, 3, 4], 2)]
    """
    text = [*context, *ids]
    for first in range(len(context), len(text), seq_len):
        end = min(first + seq_len, len(text))
        start = end - seq_len if full_last else first
        yield Window(text[max(0, start - 1) : end], end - first)


def likelihoods(
    params: dict,
    c: ResolvedModel,
    windows: Sequence[Window],
    *,
    seq_len: int,
    batch_size: int | None = None,
    on_batch: Callable[[int], object] = lambda n: None,
) -> list[Likelihood]:
    """Return the likelihoods of windows in order. Batches of similar lengths share few shapes.

    Args:
        params, c: parameters as nested dicts, and the model section of a resolved config.
        seq_len: the number of tokens that the model sees.
        batch_size: number of windows in a batch; None: as many as have LOGITS logits, and at most
            64.
        on_batch: called with the number of windows of each finished batch.
    """
    masked_diffusion.refuse(c, "the probability of a text")
    batch_size = batch_size or min(64, max(1, LOGITS // (seq_len * c.vocab_size)))
    by_window: dict[int, Likelihood] = {}
    # memory runs out in the first batch or never
    longest_first = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids))
    for first in range(0, len(windows), batch_size):
        batch = longest_first[first : first + batch_size]
        n_rows = min(padded(len(batch), 1), batch_size)
        n_inputs = min(padded(len(windows[batch[0]].ids) - 1), seq_len)
        tokens_BT = np.zeros((n_rows, n_inputs + 1), np.int32)
        for row, i in zip(tokens_BT, batch, strict=False):
            row[: len(windows[i].ids)] = windows[i].ids
        _, losses_BT, hits_BT = score_batch(params, {"tokens": tokens_BT}, c)
        for losses_T, hits_T, i in zip(losses_BT, hits_BT, batch, strict=False):
            end = len(windows[i].ids) - 1
            scored = slice(end - windows[i].n_scored, end)
            log_p = -float(losses_T[scored].sum(dtype=np.float64))
            by_window[i] = Likelihood(log_p, is_greedy=bool(hits_T[scored].all()))
        on_batch(len(batch))
    return [by_window[i] for i in range(len(windows))]


def padded(n: int, smallest: int = 16) -> int:
    """Return the next power of two, so that texts of similar lengths share a compiled program.

    >>> [padded(n) for n in (1, 16, 17)], padded(3, smallest=1)
    ([16, 16, 32], 4)
    """
    return max(smallest, 1 << (int(n) - 1).bit_length())
