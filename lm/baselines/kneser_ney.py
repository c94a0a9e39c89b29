"""Interpolated n-gram models with modified Kneser-Ney smoothing, over token ids, in NumPy alone.

The probability of a token w after a history h of n - 1 tokens is (Kneser and Ney 1995, Improved backing-off for m-gram
language modeling; Chen and Goodman 1999, An empirical study of smoothing techniques for language modeling, section 3)

    p(w | h) = (c(h w) - D(c(h w))) / c(h) + backoff(h) p(w | h without its first token),    c(h) = sum_w c(h w),

where backoff(h) is the probability that the discounts D subtract, so that the probabilities of all w sum to 1. At the
highest order c counts the n-gram. At lower orders it counts the different tokens that precede the n-gram in the text
(its continuation count). Below the unigrams is the uniform distribution. After an unseen history, backoff(h) = 1.

An n-gram (w_1 ... w_n) is one integer, its key: w_1 V^(n-1) + ... + w_n. Its history is the key divided by V, and the
n-gram without its first token is the key modulo V^(n-1).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

CHUNK = 2**22  # tokens that are scored at once
MAX_KEY = 2**63
FALLBACK = (0.5, 1.0, 1.5)  # discounts where they cannot be estimated; those of KenLM (Heafield et al. 2013)


@dataclasses.dataclass(frozen=True)
class Level:
    """The n-grams of one order.

    Attributes:
        keys: keys of the n-grams, sorted.
        probs: (c(h w) - D(c(h w))) / c(h) of each n-gram.
        histories: keys of the histories, sorted.
        backoffs: weight of the next lower order after each history.
    """

    keys: np.ndarray
    probs: np.ndarray
    histories: np.ndarray
    backoffs: np.ndarray

    def interpolate(self, keys, lower, vocab_size: int) -> np.ndarray:
        """Return p(w | h) of n-grams, float64 (n,).

        Args:
            keys: their keys (n,), see `ngram_keys`.
            lower: their probabilities (n,) at the next lower order.
            vocab_size: V.
        """
        distinct, place = np.unique(keys, return_inverse=True)  # a search for sorted keys is several times faster
        probs = _look_up(self.keys, self.probs, distinct, 0.0)
        backoffs = _look_up(self.histories, self.backoffs, distinct // vocab_size, 1.0)
        return probs[place] + lower * backoffs[place]


def _look_up(sorted_keys, values, keys, missing: float) -> np.ndarray:
    """Return the value of each key; `missing` for unknown keys."""
    if not len(sorted_keys):
        return np.full(len(keys), missing)
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[at] == keys, values[at], missing)


@dataclasses.dataclass(frozen=True)
class KneserNey:
    """An n-gram model, as returned by `fit`.

    Attributes:
        vocab_size: V; the probabilities of the ids 0 .. V-1 sum to 1 after every history.
        levels: the orders 1 .. n.
    """

    vocab_size: int
    levels: tuple[Level, ...]

    def probabilities(self, tokens, documents=None) -> np.ndarray:
        """Return the probability of each token after the tokens before it in its document, float64 (n,).

        A token with fewer than order - 1 tokens before it is predicted by a lower order.

        Args:
            tokens: ids (n,).
            documents: document numbers (n,), see `ngram_keys`; None: one document.
        """
        probs, overlap = np.empty(len(tokens)), len(self.levels) - 1
        for start in range(0, len(tokens), CHUNK):
            first = max(0, start - overlap)
            part = slice(first, start + CHUNK)
            scored = self._probabilities(tokens[part], None if documents is None else documents[part])
            probs[start : start + CHUNK] = scored[start - first :]
        return probs

    def _probabilities(self, tokens, documents) -> np.ndarray:
        probs = np.full(len(tokens), 1 / self.vocab_size)
        for order, level in enumerate(self.levels, 1):
            keys = ngram_keys(tokens, documents, order, self.vocab_size)
            complete = keys >= 0
            probs[complete] = level.interpolate(keys[complete], probs[complete], self.vocab_size)
        return probs


def ngram_keys(tokens, documents, order: int, vocab_size: int) -> np.ndarray:
    """Return the key of the n-gram that ends at each token, int64 (n,); -1 where the document has too few tokens.

    Args:
        tokens: ids (n,).
        documents: document numbers (n,): n-grams are within documents, and 0 is padding; None: one document.
        order: n of the n-grams.
        vocab_size: V.

    >>> ngram_keys(np.array([1, 0, 2, 3]), np.array([7, 7, 7, 8]), order=2, vocab_size=10)
    array([-1, 10,  2, -1])
    """
    keys = np.full(len(tokens), -1)
    if (n := len(tokens) - order + 1) > 0:
        keys[order - 1 :] = 0
        for i in range(order):
            keys[order - 1 :] += vocab_size ** (order - 1 - i) * tokens[i : i + n].astype(np.int64)
        if documents is not None:
            inside = (documents[:n] == documents[order - 1 :]) & (documents[:n] > 0)
            keys[order - 1 :][~inside] = -1
    return keys


def fit(tokens, vocab_size: int, order: int, *, documents=None, discounts: Sequence | None = None) -> KneserNey:
    """Count the n-grams of a text.

    Args:
        tokens: ids (n,), all below vocab_size.
        vocab_size: V.
        order: n, 2 for bigrams.
        documents: see `ngram_keys`.
        discounts: for each order from 1, the discounts of the counts 1, 2, and 3 or more; None: `estimate_discounts`.
            Three equal discounts give the original method of Kneser and Ney.

    Raises:
        ValueError: if V^order does not fit into 63 bits.
    """
    if vocab_size**order > MAX_KEY:
        raise ValueError(f"{order}-grams over {vocab_size} ids do not fit into 63 bits")
    raw = {}
    for n in {order, *range(2, order)}:
        keys = ngram_keys(tokens, documents, n, vocab_size)
        raw[n] = _count(keys[keys >= 0])
    levels = []
    for n in range(1, order + 1):
        keys, counts = raw[n] if n == order else _count(raw[n + 1][0] % vocab_size**n)
        levels.append(_level(keys, counts, vocab_size, discounts[n - 1] if discounts else estimate_discounts(counts)))
    return KneserNey(vocab_size, tuple(levels))


def _count(keys) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct keys in ascending order, and how often each occurs. Sorts `keys` in place."""
    keys.sort()
    starts = _starts(keys)
    return keys[starts], np.diff(starts, append=len(keys))


def _starts(sorted_keys) -> np.ndarray:
    """Return the index of the first of each group of equal keys."""
    return np.flatnonzero(np.diff(sorted_keys, prepend=-1))


def _level(keys, counts, vocab_size: int, discounts) -> Level:
    histories = keys // vocab_size
    starts = _starts(histories)
    removed = np.asarray(discounts, float)[np.minimum(counts, 3) - 1]
    if not len(keys):
        return Level(keys, removed, histories, removed)
    totals, total_removed = np.add.reduceat(counts, starts), np.add.reduceat(removed, starts)
    total_per_key = np.repeat(totals, np.diff(starts, append=len(keys)))
    return Level(keys, (counts - removed) / total_per_key, histories[starts], total_removed / totals)


def estimate_discounts(counts) -> tuple[float, float, float]:
    """Return the discounts of the counts 1, 2, and 3 or more (Chen and Goodman 1999, section 3).

    They follow from the numbers n_1 .. n_4 of n-grams with the counts 1 .. 4. With few n-grams, such as the unigrams of
    characters, one of these can be 0, or an estimate not positive; then FALLBACK is returned. A discount of 0 would
    give unseen n-grams the probability 0.

    Args:
        counts: the count of each n-gram.

    >>> estimate_discounts(np.repeat([1, 2, 3, 4], [8, 4, 2, 1]))  # n_1 .. n_4; Y = 8 / (8 + 2 * 4)
    (0.5, 1.25, 2.0)
    """
    n_1, n_2, n_3, n_4 = np.bincount(np.minimum(counts, 5), minlength=5)[1:5].tolist()
    if not (n_1 and n_2 and n_3 and n_4):
        return FALLBACK
    y = n_1 / (n_1 + 2 * n_2)
    found = 1 - 2 * y * n_2 / n_1, 2 - 3 * y * n_3 / n_2, 3 - 4 * y * n_4 / n_3
    return found if min(found) > 0 else FALLBACK
