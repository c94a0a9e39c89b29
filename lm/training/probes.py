"""Probes: generated sequences with answers, whose loss shows what a model reads from its context.

A model that does not use the context cannot predict the answers, whose loss is then about ln V or
more. The sequences are the same for all runs with equal vocabularies and context lengths, like a
validation split.
"""

from collections.abc import Iterator

import numpy as np

from lm.config import Resolved
from lm.data import Corpus
from lm.data.permutation import hash_counters, permute

MIN_ROWS = 64  # sequences; more if a batch has more
MAX_PAIRS = 16
_SEED = 0


def repeat(n_rows: int, length: int, n_ids: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random tokens that are repeated once, and which targets are answers: the second half.

    Its first token is none. Induction heads predict the rest (Olsson et al. 2022,
    arXiv:2209.11895).

    Args:
        n_rows, length: shape of the tokens; length is at least 4.
        n_ids: the vocabulary.

    Returns:
        int32 (n_rows, length), and booleans (length - 1,).
    """
    half = length // 2
    target = np.arange(1, length)
    first = hash_counters(_SEED, 4, np.arange(n_rows)[:, None], np.arange(half)) % np.uint64(n_ids)
    return np.tile(first, 3)[:, :length].astype(np.int32), target > half


def recall(n_rows: int, length: int, n_ids: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of a key and a value, again in another order, and which targets are answers.

    Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): unlike in `repeat`, only
    the token before an answer, a repeated value, tells where to look. There are up to MAX_PAIRS
    pairs, and no two keys or values of a sequence are equal.
    Arguments and results: see `repeat`.
    """
    n = min(length // 4, n_ids // 2, MAX_PAIRS)
    row = np.arange(n_rows)[:, None]

    def drawn(size: int, n_values: int, stream: int) -> np.ndarray:
        numbers = np.tile(np.arange(size), (n_rows, 1))
        return permute(numbers, n_values, hash_counters(_SEED, stream, row))

    pairs = drawn(2 * n, n_ids, 5).reshape(n_rows, n, 2)
    again = np.take_along_axis(pairs, drawn(n, n, 6)[..., None], 1)
    tokens = np.concatenate([pairs, again], 1).reshape(n_rows, 4 * n)
    target = np.arange(1, length)
    answers = (target > 2 * n) & (target < 4 * n) & (target % 2 == 1)
    return np.pad(tokens, ((0, 0), (0, length - 4 * n))).astype(np.int32), answers


PROBES = {"repeat": repeat, "recall": recall}


def batches(name: str, config: Resolved, corpus: Corpus) -> Iterator[dict[str, np.ndarray]]:
    """Yield the batches of a probe (lm/step.py), with weight 1 for answers and 0 for others."""
    size = config.eval.batch_size or config.train.batch_size
    length = config.train.seq_len + 1
    n_ids = corpus.tokenizer.vocab_size if corpus.tokenizer else config.model.vocab_size
    tokens, answers = PROBES[name](-(-MIN_ROWS // size) * size, length, n_ids)
    for rows in np.split(tokens, len(tokens) // size):
        batch = {"tokens": rows, "weights": np.tile(answers.astype(np.float32), (size, 1))}
        if corpus.packed:
            batch["segments"] = np.ones_like(rows)
        yield batch
