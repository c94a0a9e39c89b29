"""Packing: place documents into rows of seq_len + 1 tokens, so that attention can be kept within
each document.

Rows are numbered like windows, so a packed batch is a function of (seed, step) too.
"""

import numpy as np


def _cut_documents(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Cut documents into pieces of at most seq_len + 1 tokens; return the start and the length of
    each (P, 2).

    Consecutive pieces of a document share one token, the last target of one and the first input of
    the next. So every token of a document but its first is a target exactly once. A document of one
    token has no target and is left out.

    >>> _cut_documents(np.array([3, 6]), seq_len=3).tolist()
    [[0, 3], [3, 4], [6, 3]]
    """
    starts = np.cumsum(lengths) - lengths
    counts = np.maximum(0, -(-(lengths - 1) // seq_len))
    document = np.repeat(np.arange(len(lengths)), counts)
    within = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    return np.stack(
        [starts[document] + within, np.minimum(lengths[document] - within, seq_len + 1)], 1
    )


def pack(tokens, lengths: np.ndarray, seq_len: int, *others) -> tuple[np.ndarray, ...]:
    """Pack documents into rows by next-fit, in their order: a piece that does not fit the current
    row begins the next.

    Args:
        tokens: the documents' tokens (n,), one document after the other.
        lengths: tokens of each document (D,).
        seq_len: T.
        others: further arrays (n,), to be packed in the same way.

    Returns:
        Rows (R, T+1) of tokens, and segments (R, T+1) uint16: 1, 2, ... within each row, 0 for
            padding (token 0). Then
        the rows of each of `others`.

    >>> rows, segments = pack(np.arange(1, 8), np.array([3, 2, 2]), seq_len=4)
    >>> rows.tolist(), segments.tolist()
    ([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]], [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]])
    """
    row, filled, segment, placed = 0, 0, 0, []
    for start, length in _cut_documents(lengths, seq_len).tolist():
        if filled + length > seq_len + 1:
            row, filled, segment = row + 1, 0, 0
        segment += 1
        placed.append((row, filled, segment, start, length))
        filled += length
    shape = row + 1 if placed else 0, seq_len + 1
    rows, *rows_of_others = (np.zeros(shape, array.dtype) for array in (tokens, *others))
    segments = np.zeros(shape, np.uint16)
    for row, column, segment, start, length in placed:
        for filled_rows, array in zip((rows, *rows_of_others), (tokens, *others), strict=True):
            filled_rows[row, column : column + length] = array[start : start + length]
        segments[row, column : column + length] = segment
    return rows, segments, *rows_of_others
