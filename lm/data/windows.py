"""Which window of the corpus goes where: a pure function of (seed, step), in NumPy alone.

A window is seq_len + 1 consecutive tokens, named by a number in [0, n_windows). The numbers come from a counter-based
64-bit hash rather than from `np.random.Generator`, whose streams may change between NumPy versions, so the batches of a
run are the same on every machine, process count and Python, and there is no iterator whose state must be saved.
"""

import math

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the increment of SplitMix64
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3, _HALF = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
# An odd multiplier for each Feistel round, from the digits of pi; Luby and Rackoff (1988) need four rounds.
_PI = (0x243F6A8885A308D3, 0x13198A2E03707345, 0xA4093822299F31D1, 0x082EFA98EC4E6C89, 0x452821E638D01377)
_ROUNDS = tuple(map(np.uint64, _PI))


def mix(x):
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): a bijection of uint64 whose output bits look random."""
    x = (x ^ (x >> _S1)) * _C1
    x = (x ^ (x >> _S2)) * _C2
    return x ^ (x >> _S3)


def hash_counters(seed: int, *counters):
    """uint64 hash of a seed and any number of integer counters; the result has the counters' broadcast shape."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant; NumPy would warn for scalars
        h = np.uint64(seed & _MASK)
        for counter in counters:
            counter = np.uint64(counter & _MASK) if isinstance(counter, int) else counter.astype(np.uint64)
            h = mix(h + _GOLDEN) + counter
        return mix(h + _GOLDEN)


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """The images of `index` under a pseudo-random permutation of [0, n) chosen by `key`, in O(1) memory.

    index: integers in [0, n); key: uint64, broadcastable to index (each element may belong to another permutation).
    A Feistel network on pairs (left, right) in [0, s)^2 with s = ceil(sqrt(n)) permutes [0, s^2); images outside [0, n)
    are permuted again until they fall inside ("cycle walking", Black and Rogaway 2002), which is rare as
    s^2 - n < 2 sqrt(n) + 1. Exact for n up to 2^62. Every index is equally likely at
    every place; of a handful of windows some orders are likelier than others.
    """
    side = np.uint64(math.isqrt(n - 1) + 1)
    key = np.broadcast_to(key, index.shape)
    x = index.astype(np.uint64)
    x = _feistel(x, side, key)
    while (outside := x >= np.uint64(n)).any():
        x[outside] = _feistel(x[outside], side, key[outside])
    return x.astype(np.int64)


def _feistel(x, side, key):
    left, right = np.divmod(x, side)
    for multiplier in _ROUNDS:
        # Multiply, fold, multiply, and keep the high bits, which are a product's best.
        noise = (key + right) * multiplier
        noise = ((noise ^ (noise >> _HALF)) * _C2) >> _HALF
        left, right = right, (left + noise) % side
    return left * side + right


def n_windows(n_tokens: int, seq_len: int, order: str, stride: int | None = None) -> int:
    """How many windows of seq_len + 1 tokens there are: one per token offset for crops, one per stride for epochs."""
    room = n_tokens - (seq_len + 1)
    if room < 0:
        return 0
    return room + 1 if order == "crops" else room // (stride or seq_len) + 1


def window_numbers(
    seed: int, step, batch_size: int, n_windows: int, *, order: str = "crops", shuffle: bool = True
) -> np.ndarray:
    """The numbers (B,) int64 of the windows that make the global batch of a step; (k, B) for an array of k steps.

    order "crops": independent uniform draws (the modulo's bias is below n_windows / 2^64).
    order "epochs": row r of step s is window k = s * B + r of the run, which is window k mod n of epoch k // n; each
    epoch visits every window once, in order or, with shuffle, in a permutation of its own; a batch may straddle two.
    Raises ValueError when there is no window to choose.
    """
    if n_windows < 1:
        raise ValueError(f"a batch needs at least one window to choose from, and n_windows is {n_windows}")
    step = np.asarray(step, np.int64)[..., None]
    row = np.arange(batch_size)
    if order == "crops":
        return (hash_counters(seed, 0, step, row) % np.uint64(n_windows)).astype(np.int64)
    if order != "epochs":
        raise ValueError(f'order is "crops" or "epochs", not {order!r}')
    epoch, position = np.divmod(step * batch_size + row, n_windows)
    return permute(position, n_windows, hash_counters(seed, 1, epoch)) if shuffle else position


def starts(numbers: np.ndarray, seq_len: int, order: str, stride: int | None = None) -> np.ndarray:
    """The index of the first token of each window; packed rows have none: there the number is the row."""
    return numbers if order == "crops" else numbers * (stride or seq_len)


def n_eval_windows(n_tokens: int, seq_len: int) -> int:
    """How many consecutive windows predict every token but the first exactly once."""
    return max(0, -(-(n_tokens - 1) // seq_len))


def eval_windows(n_tokens: int, seq_len: int, batch_size: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts (B,) int64 and target weights (B, T) float32 of batch number `batch` of an evaluation.

    Window k reads tokens kT .. kT+T-1 and predicts kT+1 .. kT+T, so the evaluation predicts every token once, at the
    context length of training. Targets beyond the last token weigh 0 (the window is filled with copies of the last
    token by `gather`), and so do whole windows beyond the last, which fill up the last batch.
    """
    k = batch * batch_size + np.arange(batch_size, dtype=np.int64)
    targets_BT = k[:, None] * seq_len + 1 + np.arange(seq_len, dtype=np.int64)
    return np.minimum(k * seq_len, max(0, n_tokens - 1)), (targets_BT < n_tokens).astype(np.float32)
