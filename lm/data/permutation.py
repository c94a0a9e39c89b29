"""A counter-based hash and a pseudo-random permutation in O(1) memory, in NumPy alone.

`lm/data/batches.py` draws the windows of each step with them. Unlike the streams of
`np.random.Generator`, which may change between NumPy versions, they give the same numbers on every
machine, and they have no state to save.
"""

import math

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the increment of SplitMix64
# multipliers and shifts of SplitMix64's finalizer
_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)
_S1 = np.uint64(30)
_S2 = np.uint64(27)
_S3 = np.uint64(31)
_HALF = np.uint64(32)
# An odd multiplier for each Feistel round, from the digits of pi; Luby and Rackoff (1988) need four
# rounds.
_PI = (
    0x243F6A8885A308D3,
    0x13198A2E03707345,
    0xA4093822299F31D1,
    0x082EFA98EC4E6C89,
    0x452821E638D01377,
)
_ROUNDS = tuple(map(np.uint64, _PI))


def mix(x):
    """Scramble uint64 values by SplitMix64's finalizer (Steele et al. 2014), a bijection."""
    x = (x ^ (x >> _S1)) * _C1
    x = (x ^ (x >> _S2)) * _C2
    return x ^ (x >> _S3)


def hash_counters(seed: int, *counters):
    """Hash a seed and any number of integer counters to uint64.

    Args:
        seed: any integer; its lowest 64 bits count.
        *counters: integers or integer arrays, broadcast against each other.

    Returns:
        uint64 of the counters' broadcast shape.

    >>> hash_counters(0, np.arange(4)) % np.uint64(10)
    array([5, 5, 0, 0], dtype=uint64)
    """
    # Arithmetic modulo 2^64 is intended; NumPy would warn for scalars.
    with np.errstate(over="ignore"):
        h = np.uint64(seed & _MASK)
        for counter in counters:
            if isinstance(counter, int):
                counter = np.uint64(counter & _MASK)
            h = mix(h + _GOLDEN) + counter.astype(np.uint64)
        return mix(h + _GOLDEN)


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Map `index` through the pseudo-random permutation of [0, n) that `key` selects.

    A Feistel network on pairs (left, right) in [0, s)^2 with s = ceil(sqrt(n)) permutes [0, s^2).
    Images outside [0, n) are permuted again until they fall inside ("cycle walking", Black and
    Rogaway 2002), which is rare because s^2 - n < 2 sqrt(n) + 1. Every index is equally likely at
    every place. For very small n, some orders are more likely than others.

    Args:
        index: integers in [0, n).
        n: size of the permuted range, up to 2^62.
        key: uint64, broadcastable to `index`; each element may belong to another permutation.

    Returns:
        int64 of the shape of `index`.

    >>> permute(np.arange(8), 8, np.uint64(1))
    array([4, 7, 5, 2, 1, 6, 3, 0])
    """
    side = np.uint64(math.isqrt(n - 1) + 1)
    key = np.broadcast_to(key, index.shape)
    x = _feistel(index.astype(np.uint64), side, key)
    while (outside := x >= np.uint64(n)).any():
        x[outside] = _feistel(x[outside], side, key[outside])
    return x.astype(np.int64)


def _feistel(x, side, key):
    left, right = np.divmod(x, side)
    for multiplier in _ROUNDS:
        # Multiply, fold, multiply, and keep the high bits, which are the best mixed bits of a
        # product.
        noise = (key + right) * multiplier
        noise = ((noise ^ (noise >> _HALF)) * _C2) >> _HALF
        left, right = right, (left + noise) % side
    return left * side + right
