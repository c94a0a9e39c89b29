"""What goes to the device for each step: window numbers where the corpus lives there, gathered tokens elsewhere.

Only who gathers differs; the batch of a step is the same function of (tokens, seed, step) either way.
"""

from collections.abc import Iterator

import numpy as np

from lm.config import Config
from lm.data import Split, windows
from lm.data.batches import gather, gather_rows
from lm.parallel import sharding


def to_device(split: Split, max_bytes: int, mesh=None) -> dict | None:
    """The arrays of a split on every device, or None if they stay on the host.

    They do if they take more than max_bytes, or are too long for the int32 window starts that the device is given.
    """
    arrays = {"tokens": split.tokens} | ({"segments": split.segments} if split.packed else {})
    if sum(a.nbytes for a in arrays.values()) > max_bytes or len(split.tokens) >= 2**31:
        return None
    return {name: sharding.replicate(mesh, np.asarray(a)) for name, a in arrays.items()}


def train_feed(split: Split, resident: bool, config: Config, step: int, n_steps: int, mesh=None) -> dict:
    """The feeds of n_steps steps from `step` on, stacked to (steps_per_dispatch, B, ...); what lies beyond is zeros."""
    t, d = config.train, config.data
    n_windows = split.n_windows(t.seq_len, d.order, d.stride)
    steps = np.arange(step, step + n_steps)
    drawn = windows.window_numbers(t.seed, steps, t.batch_size, n_windows, order=d.order, shuffle=d.shuffle)
    numbers = np.zeros((t.steps_per_dispatch, t.batch_size), np.int64)
    numbers[:n_steps] = split.starts(drawn, t.seq_len, d.order, d.stride)
    return _feed(split, resident, numbers, t.seq_len, mesh)


def eval_feeds(split: Split, resident: bool, config: Config, max_batches: int = 0, mesh=None) -> Iterator[dict]:
    """The feeds of an evaluation: every token predicted once, in consecutive windows; at most max_batches if not 0."""
    seq_len, batch_size = config.train.seq_len, config.eval.batch_size or config.train.batch_size
    n_batches = -(-split.n_eval_windows(seq_len) // batch_size)
    for batch in range(min(n_batches, max_batches or n_batches)):
        starts, weights = split.eval_windows(seq_len, batch_size, batch)
        weights_fed = {"weights": sharding.shard_examples(mesh, weights.shape, 0, weights.__getitem__)}
        yield _feed(split, resident, starts, seq_len, mesh) | weights_fed


def _feed(split: Split, resident: bool, numbers: np.ndarray, seq_len: int, mesh) -> dict:
    """Window numbers (..., B), or the windows themselves (..., B, T+1); a process gathers those of its devices only."""

    def fed(shape, rows):
        return sharding.shard_examples(mesh, shape, numbers.ndim - 1, rows)

    if resident:
        return {"numbers": fed(numbers.shape, numbers.astype(np.int32).__getitem__)}
    shape = (*numbers.shape, seq_len + 1)
    if not split.packed:
        return {"tokens": fed(shape, lambda index: gather(split.tokens, numbers[index], seq_len))}
    rows = lambda i: lambda index: gather_rows(split.tokens, split.segments, numbers[index])[i]  # noqa: E731
    return {"tokens": fed(shape, rows(0)), "segments": fed(shape, rows(1))}
