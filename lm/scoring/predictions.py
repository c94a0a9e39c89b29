"""Predict every token of a split, batch by batch, and sum up losses and hits."""

import dataclasses

import numpy as np
from tqdm import tqdm

from lm.config import Resolved
from lm.data import Split
from lm.data.batches import eval_windows, gather, n_eval_windows
from lm.generation.log_probabilities import padded, score_batch
from lm.scoring.means import MAX_BLOCKS, TextMeans, bin_edges

TOKENS = 2**13  # in a batch, unless its size is given


def score_split(
    params: dict,
    config: Resolved,
    split: Split,
    *,
    stride: int | None = None,
    batch_size: int | None = None,
    title: str = "",
) -> TextMeans:
    """Predict every token of a split once; sum losses and hits by block and context length.

    The memory that this takes does not depend on the length of the split.

    Args:
        params, config: of the model.
        split: the tokens, at least seq_len + 1 of them, or packed rows.
        stride: distance between two windows, see `eval_windows`; None: seq_len.
        batch_size: windows per batch; None: as many as have TOKENS tokens.
        title: of the progress bar in a terminal.
    """
    T = config.train.seq_len
    n = n_eval_windows(split, config, stride=stride)
    # At most the next power of two: few sizes, hence few compiled programs.
    B = min(batch_size or max(1, TOKENS // T), padded(n, 1))
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, batch_size=B))
    n_blocks = min(MAX_BLOCKS, n)
    edges = bin_edges(T)
    sums = np.zeros((n_blocks, len(edges), 3))
    for first in tqdm(range(0, n, B), title, leave=False, disable=None):
        starts_B, weights_BT = eval_windows(split, config, first // B, stride)
        batch = gather(split.arrays, starts_B, T)
        contexts_BT = context_lengths(batch)
        if config.model.masked_diffusion:  # which reads tokens before and after
            contexts_BT = np.full_like(contexts_BT, T)
        batch["weights"] = weights_BT
        weights_BT, losses_BT, hits_BT = score_batch(params, batch, config.model)
        block_B = np.minimum(first + np.arange(B), n - 1) * n_blocks // n
        cells_BT = block_B[:, None] * len(edges) + np.searchsorted(edges, contexts_BT)
        for i, values_BT in enumerate((np.ones_like(losses_BT), losses_BT, hits_BT)):
            counted = np.where(weights_BT > 0, values_BT, 0.0)
            totals = np.bincount(cells_BT.ravel(), counted.ravel(), n_blocks * len(edges))
            sums[..., i] += totals.reshape(n_blocks, len(edges))
    return TextMeans(sums, T, stride or T, split.bytes_per_token)


def context_lengths(batch: dict) -> np.ndarray:
    """Return how many tokens of its document the model sees for each target, int (B, T)."""
    segments_BT = batch.get("segments", np.ones_like(batch["tokens"]))[:, :-1]
    index_T = np.arange(segments_BT.shape[1])
    starts_BT = np.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
    return index_T - np.maximum.accumulate(np.where(starts_BT, index_T, 0), axis=1) + 1
