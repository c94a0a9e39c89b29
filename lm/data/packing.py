"""Packing: documents laid into rows of seq_len + 1 tokens, so that attention can be kept inside a document.

Rows are numbered, so a packed batch is as much a function of (seed, step) as any other.
"""

import numpy as np


def pieces(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Cuts documents (D,) of these lengths into pieces (P, 2) of start and length, at most seq_len + 1 tokens each.

    The pieces of a long document share one token, the last target of one being the first input of the next, so every
    token of a document but its first is a target exactly once. A document of one token has no target and is left out.
    """
    starts = np.cumsum(lengths) - lengths
    counts = np.maximum(0, -(-(lengths - 1) // seq_len))
    document = np.repeat(np.arange(len(lengths)), counts)
    within = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    return np.stack([starts[document] + within, np.minimum(lengths[document] - within, seq_len + 1)], 1)


def pack(tokens, lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (R, T+1) of tokens, and segment ids (R, T+1) uint16: 1, 2, ... in each row, 0 for padding (token 0).

    tokens (n,): the documents one after the other; lengths (D,): theirs. Next-fit in the order of the documents: a
    piece goes into the current row if it fits, or else begins the next.
    """
    row, filled, segment, plan = 0, 0, 0, []
    for start, length in pieces(lengths, seq_len).tolist():
        if filled + length > seq_len + 1:
            row, filled, segment = row + 1, 0, 0
        segment += 1
        plan.append((row, filled, segment, start, length))
        filled += length
    rows = np.zeros((row + 1 if plan else 0, seq_len + 1), tokens.dtype)
    segments = np.zeros(rows.shape, np.uint16)
    for row, column, segment, start, length in plan:
        rows[row, column : column + length] = tokens[start : start + length]
        segments[row, column : column + length] = segment
    return rows, segments
