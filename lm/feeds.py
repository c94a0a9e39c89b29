"""What goes to the device for each step: window numbers where the corpus lives there, gathered tokens elsewhere.

Only who gathers differs; the batch of a step is the same function of (tokens, seed, step) either way.
"""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from lm.config import Config
from lm.data import Split, windows
from lm.data.batches import gather, gather_rows


def to_device(split: Split, max_bytes: int) -> dict | None:
    """The arrays of a split on the device, or None if they stay on the host.

    They do if they take more than max_bytes, or are too long for the int32 window starts that the device is given.
    """
    arrays = {"tokens": split.tokens} | ({"segments": split.segments} if split.packed else {})
    if sum(a.nbytes for a in arrays.values()) > max_bytes or len(split.tokens) >= 2**31:
        return None
    return {name: jnp.asarray(np.asarray(a)) for name, a in arrays.items()}


def train_feed(split: Split, resident: bool, config: Config, step: int, n_steps: int) -> dict:
    """The feeds of n_steps steps from `step` on, stacked to (steps_per_dispatch, B, ...); what lies beyond is zeros."""
    t, d = config.train, config.data
    n_windows = split.n_windows(t.seq_len, d.order, d.stride)
    steps = np.arange(step, step + n_steps)
    drawn = windows.window_numbers(t.seed, steps, t.batch_size, n_windows, order=d.order, shuffle=d.shuffle)
    numbers = np.zeros((t.steps_per_dispatch, t.batch_size), np.int64)
    numbers[:n_steps] = split.starts(drawn, t.seq_len, d.order, d.stride)
    return _feed(split, resident, numbers, t.seq_len)


def eval_feeds(split: Split, resident: bool, config: Config, max_batches: int = 0) -> Iterator[dict]:
    """The feeds of an evaluation: every token predicted once, in consecutive windows; at most max_batches if not 0."""
    seq_len, batch_size = config.train.seq_len, config.eval.batch_size or config.train.batch_size
    n_batches = -(-split.n_eval_windows(seq_len) // batch_size)
    for batch in range(min(n_batches, max_batches or n_batches)):
        starts, weights = split.eval_windows(seq_len, batch_size, batch)
        yield _feed(split, resident, starts, seq_len) | {"weights": weights}


def _feed(split: Split, resident: bool, numbers: np.ndarray, seq_len: int) -> dict:
    if resident:
        return {"numbers": numbers.astype(np.int32)}
    if split.packed:
        tokens, segments = gather_rows(split.tokens, split.segments, numbers)
        return {"tokens": tokens, "segments": segments}
    return {"tokens": gather(split.tokens, numbers, seq_len)}
