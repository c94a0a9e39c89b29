"""Packing: documents in rows of seq_len + 1 tokens, so that attention can stay inside each.

Rows are numbered like windows, so a packed batch is a function of (seed, step) too.
"""

import numpy as np


def _cut_documents(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Cut documents into pieces of at most seq_len + 1 tokens; return (start, length) (P, 2).

    Consecutive pieces of a document share one token, the last target of one and the first input of
    the next. So every token of a document but its first is a target exactly once. A document of one
    token has no target and is left out.

    >>> _cut_documents(np.array([3, 6]), seq_len=3).tolist()
    [[0, 3], [3, 4], [6, 3]]
    """
    starts = np.cumsum(lengths) - lengths
    counts = np.maximum(0, -(-(lengths - 1) // seq_len))
    document = np.repeat(np.arange(len(lengths)), counts)
    # the number of a piece among those of all documents, less that of its document's first piece
    piece = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    within = piece * seq_len
    sizes = np.minimum(lengths[document] - within, seq_len + 1)
    return np.stack([starts[document] + within, sizes], axis=1)


def pack(lengths: np.ndarray, seq_len: int, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Pack documents into rows in order: a piece that does not fit begins the next row (next-fit).

    Args:
        lengths: tokens of each document (D,).
        seq_len: T.
        arrays: arrays (n,) of the documents' tokens, one document after the other.

    Returns:
        Segments (R, T+1) uint16: 1, 2, ... within each row, 0 for padding. Then the rows (R, T+1)
        of each array.

    >>> segments, rows = pack(np.array([3, 2, 2]), 4, np.arange(1, 8))
    >>> rows.tolist(), segments.tolist()
    ([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]], [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]])
    """
    places = []  # (row, column, segment) of each piece
    row = column = segment = 0
    pieces = _cut_documents(lengths, seq_len).tolist()
    for _, length in pieces:
        if column + length > seq_len + 1:
            row += 1
            column = segment = 0
        segment += 1
        places.append((row, column, segment))
        column += length
    shape = (row + 1 if pieces else 0, seq_len + 1)
    segments = np.zeros(shape, np.uint16)
    packed = [np.zeros(shape, array.dtype) for array in arrays]
    for (start, length), (row, column, segment) in zip(pieces, places, strict=True):
        segments[row, column : column + length] = segment
        for rows, array in zip(packed, arrays, strict=True):
            rows[row, column : column + length] = array[start : start + length]
    return segments, *packed
