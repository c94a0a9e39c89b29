"""Synthetic text with an exactly known entropy rate, below which no causal model can score.

The text is a first-order Markov chain over 16 letters. Its transition probabilities are P_ij = w_ij / 2^16 with
integers w_ij, so the sampled chain is exactly the analysed one. By the chain rule of entropy
H(X_1, ..., X_n) / n -> H(X_2 | X_1) = sum_i pi_i H(P_i), with pi = pi P (Cover and Thomas 2006, eq. 4.27).
By Gibbs' inequality this is the least expected loss per character of a causal model. A lower loss shows that the model
has seen the character it predicts.
"""

from bisect import bisect_right

import numpy as np

from lm.data.permutation import hash_counters

VERSION = 1  # of the text; part of the fingerprint
LETTERS = "abcdefghijklmnop"
LENGTH = 1_000_000
_SEED = 15780
_TOTAL = 2**16


def weights() -> np.ndarray:
    """Return the integers w (16, 16), whose rows sum to 2^16: each letter has a few likely successors and a tail."""
    n = len(LETTERS)
    row = np.arange(n)
    noise = hash_counters(_SEED, 0, row[:, None], row) % np.uint64(1000)
    raw = (noise.astype(np.int64) + 1) ** 4
    w = 1 + raw * (_TOTAL - 2 * n) // raw.sum(1, keepdims=True)
    w[row, row] += _TOTAL - w.sum(1)
    return w


def stationary() -> np.ndarray:
    """Return the stationary distribution pi (16,), pi P = pi, in float64."""
    n = len(LETTERS)
    equations = np.vstack([(weights() / _TOTAL).T - np.eye(n), np.ones(n)])
    return np.linalg.lstsq(equations, np.append(np.zeros(n), 1.0), rcond=None)[0]


def entropy_rate() -> float:
    """Return sum_i pi_i H(P_i) in nats per character.

    >>> round(entropy_rate(), 4)
    1.9187
    """
    p = weights() / _TOTAL
    return float(-(stationary()[:, None] * p * np.log(p)).sum())


def text(length: int = LENGTH) -> str:
    """Return the first `length` letters of the chain, which are always the same.

    >>> text(10)
    'hjcgknpjio'
    """
    cumulative = np.cumsum(weights(), axis=1).tolist()
    draws = (hash_counters(_SEED, 1, np.arange(length)) >> np.uint64(48)).tolist()  # uniform in [0, 2^16)
    state, states = 0, []
    for draw in draws:
        state = bisect_right(cumulative[state], draw)
        states.append(state)
    return "".join(map(LETTERS.__getitem__, states))
