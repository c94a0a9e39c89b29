"""Arrays joined along their first axis without copying them into memory."""

from collections.abc import Sequence

import numpy as np


class ConcatenatedArray:
    """A read-only view of several (memory-mapped) arrays as one array.

    Supports what `batches.gather` needs: integers from 0 up, integer arrays, and slices of step 1.
    `np.asarray` copies the full array into memory.
    """

    def __init__(self, parts: "Sequence[np.ndarray | ConcatenatedArray]"):
        flat: list[np.ndarray] = []
        for part in parts:
            flat += part.parts if isinstance(part, ConcatenatedArray) else [part]
        not_empty = [part for part in flat if len(part)] or flat[:1]
        # As plain arrays, because np.memmap is slow to index; the file stays mapped.
        self.parts: list[np.ndarray] = [np.asarray(part) for part in not_empty]
        self.ends = np.cumsum([len(part) for part in self.parts])
        self.dtype = np.result_type(*self.parts)
        self.shape = (int(self.ends[-1]), *self.parts[0].shape[1:])
        self.ndim = len(self.shape)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index) -> np.ndarray:
        if isinstance(index, slice):
            if index.step not in (None, 1):
                raise IndexError(f"slices must have step 1, not {index.step}")
            return self._slice(*index.indices(len(self))[:2])
        index = np.asarray(index)
        if index.size and not 0 <= index.min() <= index.max() < len(self):
            raise IndexError(f"index out of range [0, {len(self)})")
        out = np.empty(index.shape + self.shape[1:], self.dtype)
        if not index.size:
            return out
        # The rows are windows. Most lie in one part and are read together.
        rows = index.reshape(-1, index.shape[-1] if index.ndim > 1 else 1)
        values = out.reshape(*rows.shape, *self.shape[1:])  # a view
        first, last = np.searchsorted(self.ends, [rows.min(1), rows.max(1)], side="right")
        for i in np.unique(first[first == last]):
            own = (first == i) & (last == i)
            start = self.ends[i] - len(self.parts[i])
            values[own] = self.parts[i][rows[own] - start]
        for i in np.flatnonzero(first != last):
            values[i] = self[rows[i]]
        return out

    def _slice(self, start: int, stop: int) -> np.ndarray:
        pieces = [self.parts[0][:0].astype(self.dtype)]
        for part, end in zip(self.parts, self.ends.tolist(), strict=True):
            first = end - len(part)
            if first < stop and start < end:
                pieces.append(part[max(start - first, 0) : stop - first])
        return np.concatenate(pieces)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.concatenate(self.parts).astype(dtype or self.dtype, copy=False)
