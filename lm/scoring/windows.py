"""The windows in which a text is predicted: consecutive ones as in training, sliding ones, and packed rows.

Window k reads the seq_len tokens from k * stride and predicts the token after each of them. With stride = seq_len the
windows are those of `batches.eval_windows`. With a smaller stride they overlap, and only the last `stride` predictions
of a window count, except in the first window. So every token but the first is predicted exactly once, with at least
seq_len - stride + 1 tokens of context wherever the text has that many.
"""

import dataclasses

import numpy as np

from lm.data import Split
from lm.data.batches import gather


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of a split.

    Attributes:
        split: the tokens; packed rows are windows of their own.
        seq_len: tokens that the model sees at once.
        stride: distance between two windows, from 1 to seq_len; seq_len for packed rows.
    """

    split: Split
    seq_len: int
    stride: int

    def __len__(self) -> int:
        n = len(self.split.tokens)
        if self.split.packed:
            return n
        return 1 + max(0, -(-(n - 1 - self.seq_len) // self.stride)) if n > 1 else 0

    def batch(self, first: int, size: int) -> tuple[dict, np.ndarray]:
        """Return the windows first, ..., first + size - 1.

        Args:
            first: number of a window.
            size: B; windows beyond the last one have no predictions that count.

        Returns:
            The batch of `lm/step.py`, (B, T+1) arrays and the weights (B, T); and the length of the context of each
            prediction, int (B, T): the number of tokens of the same document that the model sees.
        """
        n, T = len(self.split.tokens), self.seq_len
        k_B = first + np.arange(size)
        exists_B1 = (k_B < len(self))[:, None]
        if self.split.packed:
            batch = gather(self.split.arrays, np.minimum(k_B, n - 1), T)
            return batch | {"weights": exists_B1 * np.ones((1, T), np.float32)}, _document_contexts(batch["segments"])
        starts_B = np.minimum(k_B * self.stride, n - 1)
        position_T = np.arange(T)
        is_text_BT = k_B[:, None] * self.stride + 1 + position_T < n
        is_new_BT = (k_B[:, None] == 0) | (position_T >= T - self.stride)
        weights_BT = (exists_B1 & is_text_BT & is_new_BT).astype(np.float32)
        contexts_BT = np.broadcast_to(position_T + 1, (size, T))
        return gather(self.split.arrays, starts_B, T) | {"weights": weights_BT}, contexts_BT


def _document_contexts(segments_BT) -> np.ndarray:
    """Return the lengths of contexts that begin at 1 in each document of packed rows, from segments (B, T+1)."""
    index_T = np.arange(segments_BT.shape[1] - 1)
    starts_BT = np.pad(segments_BT[:, 1:-1] != segments_BT[:, :-2], ((0, 0), (1, 0)))
    return index_T - np.maximum.accumulate(np.where(starts_BT, index_T, 0), axis=1) + 1
