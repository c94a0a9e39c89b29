"""From window numbers to tokens, on the device inside a jitted step or on the host in a background thread."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class Shards:
    """Several arrays joined along their first axis without copying: just enough of an array for `gather`.

    It can be indexed with integers from 0 up, arrays of them, and slices of step 1; np.asarray copies it into memory.
    """

    def __init__(self, parts: Sequence[np.ndarray]):
        # As plain arrays, because np.memmap is slow to index; the file stays mapped.
        self.parts = [np.asarray(part) for part in parts if len(part)] or [np.asarray(parts[0])]
        self.ends = np.cumsum([len(part) for part in self.parts])
        self.dtype = np.result_type(*self.parts)
        self.shape = (int(self.ends[-1]), *self.parts[0].shape[1:])
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape))
        self.nbytes = self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index) -> np.ndarray:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            index = np.arange(start, max(start, stop), step)
        index = np.asarray(index)
        out = np.empty(index.shape + self.shape[1:], self.dtype)
        if index.ndim > 1:  # row by row, because a window lies in one shard or two
            for i, row in enumerate(index):
                out[i] = self[row]
        elif index.size:
            if index.min() < 0 or index.max() >= len(self):
                raise IndexError(f"an index outside [0, {len(self)})")
            first, last = np.searchsorted(self.ends, [index.min(), index.max()], side="right")
            for part, end in zip(self.parts[first : last + 1], self.ends[first : last + 1], strict=True):
                here = ... if first == last else (index < end) & (index >= end - len(part))
                out[here] = part[index[here] - (end - len(part))]
        return out

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.concatenate(self.parts).astype(dtype or self.dtype, copy=False)


def gather(tokens, starts, seq_len: int):
    """The windows (..., T+1) int32 that begin at `starts` (...): inputs are [..., :-1], targets [..., 1:].

    tokens: (n,) of any integer type. The same code serves NumPy arrays, memory maps and `Shards` on the host, and
    jax.numpy arrays inside jit. Indices beyond the last token repeat it, where evaluation weighs the target 0.
    """
    index = starts[..., None] + np.arange(seq_len + 1, dtype=starts.dtype)
    return tokens[index.clip(max=len(tokens) - 1)].astype("int32")


def gather_rows(rows, segments, numbers):
    """Packed rows (..., T+1) int32 and their segment ids (..., T+1) int32 (0 = padding) by row number."""
    return rows[numbers].astype("int32"), segments[numbers].astype("int32")


def prefetch(function: Callable, items: Iterable, depth: int = 2) -> Iterator:
    """Yields function(item) for each item in order, computed by one background thread up to `depth` items ahead.

    The order and the values do not depend on timing. An exception in `function` is raised where its result would have
    been yielded. Closing the generator (or dropping it) cancels what has not begun and ends the thread.
    """
    pending = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="lm-data") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > depth:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
