"""Synthetic text whose entropy rate is known exactly: the floor that no honest model's loss can pass.

The text is a first-order Markov chain over 16 letters. Its transition probabilities are P_ij = w_ij / 2^16 with whole
numbers w_ij, so the chain that is sampled is exactly the one that is analysed. By the chain rule of entropy
H(X_1, ..., X_n) / n -> H(X_2 | X_1) = sum_i pi_i H(P_i), with pi = pi P (Cover and Thomas 2006, eq. 4.27).
By Gibbs' inequality a causal model's expected loss per character is at least that; a lower one means that it saw the
character which it predicted.
"""

from bisect import bisect_right

import numpy as np

from lm.data.permutation import hash_counters

VERSION = 1  # of the text; part of the fingerprint
LETTERS = "abcdefghijklmnop"
LENGTH = 1_000_000
_SEED = 15780
_WHOLE = 2**16


def weights() -> np.ndarray:
    """The whole numbers w (16, 16), rows summing to 2^16: few likely successors for each letter, and a long tail."""
    n = len(LETTERS)
    row = np.arange(n)
    noise = hash_counters(_SEED, 0, row[:, None], row) % np.uint64(1000)
    raw = (noise.astype(np.int64) + 1) ** 4
    w = 1 + raw * (_WHOLE - 2 * n) // raw.sum(1, keepdims=True)
    w[row, row] += _WHOLE - w.sum(1)
    return w


def stationary() -> np.ndarray:
    """The distribution pi (16,) with pi P = pi, in float64."""
    n = len(LETTERS)
    equations = np.vstack([(weights() / _WHOLE).T - np.eye(n), np.ones(n)])
    return np.linalg.lstsq(equations, np.append(np.zeros(n), 1.0), rcond=None)[0]


def entropy_rate() -> float:
    """sum_i pi_i H(P_i), in nats per character."""
    p = weights() / _WHOLE
    return float(-(stationary()[:, None] * p * np.log(p)).sum())


def text(length: int = LENGTH) -> str:
    """The first `length` letters of the chain, always the same."""
    cumulative = np.cumsum(weights(), axis=1).tolist()
    draws = (hash_counters(_SEED, 1, np.arange(length)) >> np.uint64(48)).tolist()  # uniform in [0, 2^16)
    state, states = 0, []
    for draw in draws:
        state = bisect_right(cumulative[state], draw)
        states.append(state)
    return "".join(map(LETTERS.__getitem__, states))


def surprisal(text: str) -> np.ndarray:
    """-ln P(x_t | x_{t-1}) for t = 1, 2, ...: the best model's loss at each character, whose mean tends to the rate."""
    states = np.array([LETTERS.index(c) for c in text])
    return -np.log(weights()[states[:-1], states[1:]] / _WHOLE)
