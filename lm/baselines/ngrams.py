"""Losses of unigram, bigram and trigram models of a training text: baselines for the loss of a trained model.

The unigram model predicts each token by its frequency with add-one smoothing (Laplace). The bigram and trigram models
are those of lm/baselines/kneser_ney.py. Every token but the first of a document is a target, as in the evaluation of
a trained model. An n-gram model sees the n - 1 tokens before it, also across the border of two windows.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lm.baselines import kneser_ney
from lm.data import cache
from lm.data.corpus import Corpus, Split
from lm.errors import UserError
from lm.files import parse_json, to_json

FORMAT = 1  # version of the cached losses and of their computation
MAX_UNIGRAM_TOKENS = 2**22  # of each split, for `unigram_loss`: enough for frequencies, and fast to read
MAX_TRAIN_TOKENS = 2**25  # counted for `ngram_losses`, which takes about 2 GB of memory for trigrams
MAX_SCORED_TOKENS = 2**24
ORDERS = {"bigram": 2, "trigram": 3}


def unigram_loss(corpus: Corpus, name: str, vocab_size: int) -> float | None:
    """Compute the loss of the unigram model on a split: a baseline for training.

    Args:
        corpus: the corpus; the train split is counted.
        name: the split to score.
        vocab_size: size of the vocabulary.

    Returns:
        Mean loss in nats per token, with the first MAX_UNIGRAM_TOKENS tokens of either split; None if there is no such
        split.
    """
    if name not in corpus.splits:
        return None
    train, scored = (_first_tokens(corpus.split(part), MAX_UNIGRAM_TOKENS) for part in ("train", name))
    return _losses(*scored, {"unigram": unigram_probabilities(*train, vocab_size)[scored[0]]})["unigram"]


def unigram_probabilities(tokens, documents, vocab_size: int) -> np.ndarray:
    """Return the probability of each id, float64 (V,): its frequency with add-one smoothing.

    Args:
        tokens: ids (n,).
        documents: document numbers (n,); 0 is padding, which is not counted; None: no padding.
        vocab_size: V.

    >>> unigram_probabilities(np.array([0, 0, 1]), None, vocab_size=3)
    array([0.5       , 0.33333333, 0.16666667])
    """
    counts = 1 + np.bincount(tokens if documents is None else tokens[documents > 0], minlength=vocab_size)
    return counts / counts.sum()


def ngram_losses(
    corpus: Corpus, scored: Split, vocab_size: int, *, cache_dir: Path, say: Callable[[str], None] = print
) -> dict[str, float]:
    """Return the losses of the unigram, bigram and trigram models of a corpus; computed once and cached.

    The first MAX_TRAIN_TOKENS tokens of the train split are counted, and the first MAX_SCORED_TOKENS of `scored` are
    predicted.

    Args:
        corpus: its train split is counted.
        scored: the tokens to predict: a split of this corpus, or of another one with the same tokenizer.
        vocab_size: size of the vocabulary.
        cache_dir: the directory of caches, see `lm.data.cache.user_cache`.
        say: receives lines of information and warnings.

    Returns:
        Mean losses in nats per token, {"unigram": ..., "bigram": ..., "trigram": ...}. Models whose n-grams do not fit
        into 63 bits are left out.

    Raises:
        UserError: if the corpus has no train split, `scored` has no target, or an id is outside the vocabulary.
    """
    tokens, documents = _first_tokens(scored, MAX_SCORED_TOKENS)
    digest = hashlib.sha256(tokens.astype("<u4").tobytes())
    digest.update(b"" if documents is None else documents.tobytes())
    limits = vocab_size, MAX_TRAIN_TOKENS
    path = cache_dir / "ngrams" / cache.key_of(FORMAT, corpus.fingerprint, *limits, digest.hexdigest())[:32]
    if (losses := _read(path)) is None:
        with cache.lock(path, say):
            if (losses := _read(path)) is None:  # else another process has computed them
                say(f"counting the n-grams of {corpus.name}")
                train = _first_tokens(corpus.split("train"), MAX_TRAIN_TOKENS)
                losses = compute_losses(train, (tokens, documents), vocab_size)
                _write(path, losses, say)
    return losses


def compute_losses(train: tuple, scored: tuple, vocab_size: int) -> dict[str, float]:
    """Return the losses of the models without a cache.

    Args:
        train: ids (n,) and document numbers (n,) or None of the text that is counted.
        scored: the same of the text that is predicted.
        vocab_size: size of the vocabulary.

    Raises:
        UserError: an id is outside the vocabulary, or no token is predicted.
    """
    for tokens, _ in (train, scored):
        if len(tokens) and tokens.max() >= vocab_size:
            raise UserError(f"n-grams: the id {tokens.max()} is outside the vocabulary of {vocab_size} ids")
    probs = {"unigram": unigram_probabilities(*train, vocab_size)[scored[0]]}
    for name, order in ORDERS.items():
        if vocab_size**order <= kneser_ney.MAX_KEY:
            model = kneser_ney.fit(train[0], vocab_size, order, documents=train[1])
            probs[name] = model.probabilities(*scored)
    return _losses(*scored, probs)


def _first_tokens(split: Split, n: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the first n tokens of a split, and their document numbers if it is packed, both (n,)."""
    if not split.packed:
        return np.asarray(split.tokens[:n]), None
    n_rows = max(1, n // split.tokens.shape[1])
    rows, segments = (np.asarray(array[:n_rows]) for array in (split.tokens, split.segments))
    first = np.arange(len(rows))[:, None] * (1 + int(segments.max(initial=0)))
    return rows.ravel(), np.where(segments > 0, first + segments, 0).ravel()


def _losses(tokens, documents, probs: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the mean loss of the targets: the tokens that have another one before them in their document."""
    targets = kneser_ney.ngram_keys(tokens, documents, 2, vocab_size=1) >= 0
    if not targets.any():
        raise UserError("n-grams: the text to predict has no two tokens in a document")
    return {name: float(-np.log(p[targets]).mean()) for name, p in probs.items()}


def _read(path: Path) -> dict[str, float] | None:
    text = cache.read_file(path)
    return None if text is None else parse_json(text, {str: float})


def _write(path: Path, losses: dict[str, float], say: Callable[[str], None]) -> None:
    try:
        cache.write_file(path, to_json(losses))
    except UserError as error:
        say(f"WARNING: the losses of n-gram models are not cached: {error.problems[0]}")
