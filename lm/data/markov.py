"""Synthetic text with an exactly known entropy rate, below which no causal model can score.

The text is a Markov chain over 16 letters: the next letter depends on the last `order` letters, its
context. The probabilities are P(x | c) = w_cx / 2^32 with integers w_cx, so the sampled chain is
exactly the one analyzed. By the chain rule of entropy H(X_1, ..., X_n) / n -> sum_c pi_c H(P_c),
with pi the stationary distribution of the contexts (Cover and Thomas 2006, eq. 4.27). By Gibbs'
inequality this is the least expected loss per character of a causal model.

* Order 1: each letter has a few likely successors and a tail.
* Orders 2 to 4: P(x | c) is proportional to prod_j 1 / rank_j(x), j = 0, ..., order, where rank_j
  orders the letters at random for each string of the last j letters of c: a product of Zipf's laws.
  The letters and their strings are about Zipf-distributed, and each further letter of the context
  lowers the loss, so models learn it gradually.
"""

import dataclasses
import functools
from array import array
from bisect import bisect_right

import numpy as np

from lm.data.permutation import hash_counters

VERSION = 1  # of the text; part of the fingerprint
LETTERS = "abcdefghijklmnop"
ORDERS = (1, 2, 3, 4)
TOTAL = 2**32
_V = len(LETTERS)
_SEED = 15780
_CHUNK = 2**16  # letters that are drawn at a time


@dataclasses.dataclass(frozen=True)
class MarkovChain:
    """A fixed Markov chain of order 1 to 4.

    Context c is the number sum_i 16^(i-1) x_(t-i) of the last letters x_(t-1), x_(t-2), ..., from 0
    to 15. There are at most 2^20 probabilities.
    """

    order: int = 1

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """Return the integers w (16^order, 16), whose rows sum to 2^32."""
        return _first_order_weights() if self.order == 1 else _zipf_weights(self.order)

    @functools.cached_property
    def stationary(self) -> np.ndarray:
        """Return the stationary distribution pi of the contexts (16^order,), by power iteration."""
        p = self.weights / TOTAL
        pi = np.full(_V**self.order, _V**-self.order)
        for _ in range(1000):  # at most 71 are needed
            before = pi
            pi = (pi[:, None] * p).reshape(_V, -1).sum(0)  # forget the oldest letter
            if np.abs(pi - before).max() < 1e-16:
                break
        return pi / pi.sum()

    @functools.cached_property
    def entropy_rate(self) -> float:
        """Return sum_c pi_c H(P_c) in nats per character.

        >>> [round(MarkovChain(order).entropy_rate, 4) for order in (1, 2)]
        [1.9187, 1.9738]
        """
        p = self.weights / TOTAL
        return float(-(self.stationary[:, None] * p * np.log(p)).sum())

    def text(self, length: int | None = None) -> str:
        """Return the first `length` letters, always the same; None: those that `lm.train` reads.

        >>> MarkovChain().text(10), MarkovChain(order=2).text(10)
        ('hjcgknpjio', 'cjpockcgce')
        """
        if length is None:
            length = 1_000_000 if self.order == 1 else 4_000_000
        # bisect compares Python's integers, which an array returns and NumPy does not.
        cumulative = array("Q", np.cumsum(self.weights, axis=1).astype(np.uint64).tobytes())
        n_contexts = _V**self.order
        stream = (1,) if self.order == 1 else (1, self.order)
        context = 0
        letters = bytearray()
        for first in range(0, length, _CHUNK):
            counters = np.arange(first, min(first + _CHUNK, length))
            draws = hash_counters(_SEED, *stream, counters) >> np.uint64(32)
            for draw in draws.tolist():  # uniform in [0, 2^32)
                row = _V * context
                letter = bisect_right(cumulative, draw, row, row + _V) - row
                context = (row + letter) % n_contexts
                letters.append(letter)
        return letters.translate(bytes(map(ord, LETTERS)).ljust(256)).decode()

    def surprisal(self, text: str) -> np.ndarray:
        """Return -ln P(x_t | c_t) of each letter: the loss of the best possible causal model.

        It is 0, a lower bound, for the first letters, whose context is not part of the text.
        """
        letters = np.frombuffer(text.encode(), np.uint8).astype(np.int64) - ord(LETTERS[0])
        n = max(0, len(letters) - self.order)
        contexts = np.zeros(n, np.int64)
        for i in range(self.order):
            contexts += _V**i * letters[self.order - 1 - i :][:n]
        known = np.log(TOTAL) - np.log(self.weights)[contexts, letters[self.order :]]
        return np.concatenate([np.zeros(len(letters) - n), known])


def _first_order_weights() -> np.ndarray:
    row = np.arange(_V)
    noise = hash_counters(_SEED, 0, row[:, None], row) % np.uint64(1000)
    w = _scaled((noise.astype(np.int64) + 1) ** 4, total=2**16)
    w[row, row] += 2**16 - w.sum(1)
    return w * (TOTAL // 2**16)


def _zipf_weights(order: int) -> np.ndarray:
    contexts = np.arange(_V**order)
    products = np.ones((_V**order, _V), np.int64)
    for j in range(order + 1):
        keys = hash_counters(_SEED, 2, j, np.arange(_V**j)[:, None], np.arange(_V))
        ranks = keys.argsort(axis=1).argsort(axis=1) + 1
        products *= ranks[contexts % _V**j]
    w = _scaled(2**28 // products, total=TOTAL)  # products are at most 2^20
    w[contexts, products.argmin(axis=1)] += TOTAL - w.sum(1)
    return w


def _scaled(raw: np.ndarray, total: int) -> np.ndarray:
    """Return positive integers about proportional to the rows of `raw`, with sums <= total."""
    return 1 + raw * (total - 2 * _V) // raw.sum(1, keepdims=True)
