"""Losses of unigram, bigram and trigram models of a training text.

They are baselines for the loss of a trained model. The unigram model predicts each token by its
frequency with add-one smoothing (Laplace). The bigram and trigram models are interpolated
Kneser-Ney models with one discount D (Kneser and Ney 1995; Chen and Goodman 1999, section 2.7):

    p(w | h) = max(c(h w) - D, 0) / c(h) + D N(h) / c(h) p(w | h without its first token)

N(h) is the number of different tokens after the history h, so that the probabilities sum to 1. At
the highest order c counts the n-gram; at lower orders, the different tokens that precede it. Below
the unigrams is the uniform distribution.

Every token but the first of a document is a target, or those that config.data.targets chooses, as
in the evaluation of a trained model; all tokens are counted. An n-gram model sees the n - 1 tokens
before it, also across the border of two windows.
"""

from collections.abc import Sequence

import numpy as np

from lm.data.corpus import Corpus, Split
from lm.system.errors import UserError

# of each split, for `unigram_loss`: enough for frequencies, and fast to read
MAX_UNIGRAM_TOKENS = 2**22
MAX_TRAIN_TOKENS = 2**24  # counted for `ngram_losses`
MAX_SCORED_TOKENS = 2**24
ORDERS = {"bigram": 2, "trigram": 3}
DISCOUNT = 0.75


def unigram_loss(corpus: Corpus, name: str, vocab_size: int) -> float | None:
    """Compute the loss of the unigram model of the train split on the split `name`.

    It is a baseline for training.

    Returns:
        Mean loss in nats per token, with the first MAX_UNIGRAM_TOKENS tokens of either split. Of a
        mixture these are divided among the sources, whose losses are weighted. None if there is no
        such split.
    """
    if name not in corpus.splits:
        return None
    if parts := corpus.splits[name].parts:
        counted = _by_source(corpus.split("train"))
        scored = _by_source(corpus.split(name), only_targets=True)
        probabilities = unigram_probabilities(np.concatenate(counted), None, vocab_size)
        losses = [-float(np.log(probabilities[ids]).mean()) for ids in scored]
        return sum(part.weight * loss for part, loss in zip(parts, losses, strict=True))
    train_ids, train_documents = _first_tokens(corpus.split("train"), MAX_UNIGRAM_TOKENS)
    ids, documents = _first_tokens(corpus.split(name), MAX_UNIGRAM_TOKENS)
    probabilities = unigram_probabilities(train_ids, train_documents, vocab_size)
    targets = _targets(corpus.split(name), ids, documents)
    return _losses(targets, {"unigram": probabilities[ids]})["unigram"]


def _by_source(split: Split, *, only_targets: bool = False) -> list[np.ndarray]:
    """Return the first tokens of each source of a mixture, as many of each.

    `only_targets`: those of them that are targets.
    """
    most = MAX_UNIGRAM_TOKENS // len(split.parts)
    sources = []
    for part in split.parts:
        own = slice(part.start, part.start + min(part.n_tokens, most))
        ids = np.asarray(split.tokens[own])
        if only_targets and split.targets:
            ids = ids[split.targets.is_target[own] > 0]
        sources.append(ids)
    return sources


def unigram_probabilities(tokens, documents, vocab_size: int) -> np.ndarray:
    """Return the probability of each id, float64 (V,): its frequency with add-one smoothing.

    Args:
        tokens: ids (n,).
        documents: document numbers (n,); 0 is padding, which is not counted; None: no padding.
        vocab_size: V.

    >>> unigram_probabilities(np.array([0, 0, 1]), None, vocab_size=3)
    array([0.5       , 0.33333333, 0.16666667])
    """
    if documents is not None:
        tokens = tokens[documents > 0]
    counts = 1 + np.bincount(tokens, minlength=vocab_size)
    return counts / counts.sum()


def ngram_losses(corpus: Corpus, scored: Split, vocab_size: int) -> dict[str, float]:
    """Return the losses of the unigram, bigram and trigram models of a corpus.

    The first MAX_TRAIN_TOKENS tokens of the train split are counted, and the first
    MAX_SCORED_TOKENS of `scored`, a split of this corpus or of another one with the same tokenizer,
    are predicted.

    Returns:
        Mean losses in nats per token, {"unigram": ..., "bigram": ..., "trigram": ...}. Models whose
        n-grams do not fit into 63 bits are left out.

    Raises:
        UserError: if the corpus has no train split, `scored` has no target, or an id is outside the
            vocabulary.
    """
    train = _first_tokens(corpus.split("train"), MAX_TRAIN_TOKENS)
    target = _first_tokens(scored, MAX_SCORED_TOKENS)
    for tokens, _ in (train, target):
        if len(tokens) and tokens.max() >= vocab_size:
            raise UserError(
                f"n-grams: the id {tokens.max()} is outside the vocabulary of {vocab_size} ids"
            )
    probs = {"unigram": unigram_probabilities(*train, vocab_size)[target[0]]}
    for name, order in ORDERS.items():
        if vocab_size**order <= 2**63:
            probs[name] = kneser_ney(train, target, vocab_size, order)
    return _losses(_targets(scored, *target), probs)


def kneser_ney(
    train: tuple, scored: tuple, vocab_size: int, order: int, discounts: Sequence | None = None
):
    """Return the probability of each token of a text under an n-gram model of another one.

    The result is float64 (n,). A token with fewer than order - 1 tokens before it in its document
    is predicted by a lower order.

    Args:
        train: ids and document numbers of the text that is counted, see `ngram_keys`.
        scored: the same of the text that is predicted.
        vocab_size: V; V^order must fit into 63 bits.
        order: n, 2 for bigrams.
        discounts: D of each order from 1; None: DISCOUNT.
    """
    probs = np.full(len(scored[0]), 1 / vocab_size)
    for n in range(1, order + 1):
        keys = ngram_keys(train[0], train[1], min(n + 1, order), vocab_size)
        keys = keys[keys >= 0]
        if n < order:  # count the different tokens that precede an n-gram
            keys = np.unique(keys) % vocab_size**n
        keys, counts = np.unique(keys, return_counts=True)
        # Keys are sorted, so those of one history are neighbors.
        histories, first = np.unique(keys // vocab_size, return_index=True)
        totals = np.add.reduceat(counts, first) if len(first) else counts
        # N(h), the number of keys of a history, is the distance to the first key of the next one.
        discount = discounts[n - 1] if discounts else DISCOUNT
        backoffs = discount * np.diff(first, append=len(keys)) / totals
        targets = ngram_keys(scored[0], scored[1], n, vocab_size)
        complete = targets >= 0
        # sorted keys are found faster
        distinct, place = np.unique(targets[complete], return_inverse=True)
        left = np.maximum(_look_up(keys, counts, distinct, 0) - discount, 0)
        known = left / _look_up(histories, totals, distinct // vocab_size, 1)
        # A history that was never seen leaves all to the lower order.
        backoff = _look_up(histories, backoffs, distinct // vocab_size, 1.0)
        probs[complete] = known[place] + backoff[place] * probs[complete]
    return probs


def ngram_keys(tokens, documents, order: int, vocab_size: int) -> np.ndarray:
    """Return the key of the n-gram that ends at each token, int64 (n,).

    It is -1 where the document has too few tokens. The key of (w_1 ... w_n) is w_1 V^(n-1) + ... +
    w_n. The key of its history is the quotient by V, and that of the n-gram without its first token
    the remainder by V^(n-1).

    Args:
        tokens: ids (n,).
        documents: document numbers (n,): n-grams are within documents, and 0 is padding; None: one
            document.
        order: n of the n-grams.
        vocab_size: V.

    >>> ngram_keys(np.array([1, 0, 2, 3]), np.array([7, 7, 7, 8]), order=2, vocab_size=10)
    array([-1, 10,  2, -1])
    """
    keys = np.full(len(tokens), -1)
    n = len(tokens) - order + 1
    if n > 0:
        keys[order - 1 :] = 0
        for i in range(order):
            place = vocab_size ** (order - 1 - i)
            keys[order - 1 :] += place * tokens[i : i + n].astype(np.int64)
        if documents is not None:
            inside = (documents[:n] == documents[order - 1 :]) & (documents[:n] > 0)
            keys[order - 1 :][~inside] = -1
    return keys


def _look_up(sorted_keys, values, keys, missing: float) -> np.ndarray:
    if not len(sorted_keys):
        return np.full(len(keys), missing)
    place = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == keys, values[place], missing)


def _first_tokens(split: Split, n: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the first n tokens of a split, and their document numbers if it is packed; (n,)."""
    if split.segments is None:
        return np.asarray(split.tokens[:n]), None
    n_rows = max(1, n // split.tokens.shape[1])
    rows = np.asarray(split.tokens[:n_rows])
    segments = np.asarray(split.segments[:n_rows])
    # Each row numbers its documents from 1; the sums are different numbers in all rows.
    n_numbers = 1 + int(segments.max(initial=0))
    first = np.arange(len(rows))[:, None] * n_numbers
    return rows.ravel(), np.where(segments > 0, first + segments, 0).ravel()


def _targets(split: Split, tokens, documents) -> np.ndarray:
    """Return which of the first tokens of a split are targets, (n,).

    Those are all with another one before them, or the marked ones among these.
    """
    has_before = ngram_keys(tokens, documents, 2, vocab_size=1) >= 0
    if split.targets is None:
        return has_before
    n = len(tokens) if split.segments is None else len(tokens) // split.tokens.shape[1]
    return has_before & (np.asarray(split.targets.is_target[:n]).ravel() > 0)


def _losses(targets, probs: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the mean loss of the targets of each model; probs: of each token."""
    if not targets.any():
        raise UserError(
            "n-grams: the text to predict has no two tokens in a document, or no answers"
        )
    return {name: float(-np.log(p[targets]).mean()) for name, p in probs.items()}
