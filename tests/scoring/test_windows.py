"""Windows: which tokens are predicted, and with how much context."""

import dataclasses

import numpy as np
import pytest
from tiny import tiny

from lm.data import Split
from lm.data.batches import eval_windows, gather, n_eval_batches
from lm.scoring.windows import Windows


def text(n: int) -> Split:
    """Return a split whose token at place i is i."""
    return Split("test", np.arange(n), n, None)


def predictions(windows: Windows, size: int) -> dict[int, tuple[int, int]]:
    """Return (context, first token of the window) of each prediction by its place in the text; each is made once."""
    found = {}
    for first in range(0, len(windows), size):
        batch, contexts_BT = windows.batch(first, size)
        assert batch["tokens"].shape == (size, windows.seq_len + 1)
        for row, t in zip(*np.nonzero(batch["weights"]), strict=True):
            tokens = batch["tokens"][row]
            assert tokens[t + 1] not in found
            assert contexts_BT[row, t] == t + 1
            found[int(tokens[t + 1])] = int(contexts_BT[row, t]), int(tokens[0])
    return found


@pytest.mark.parametrize("n", [9, 17, 31, 40, 41, 42])
@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("size", [1, 4])
def test_each_token_is_predicted_once_with_at_least_seq_len_minus_stride_tokens_of_context(n, stride, size):
    found = predictions(Windows(text(n), 8, stride), size)
    assert sorted(found) == list(range(1, n))
    for place, (context, start) in found.items():
        assert min(place, 8 - stride + 1) <= context <= 8
        assert start + context == place


@pytest.mark.parametrize("n", [9, 10, 64, 65, 70])
def test_windows_without_a_stride_are_those_of_the_evaluation_of_a_run(n):
    config, windows = tiny(train={"batch_size": 3}), Windows(text(n), 8, 8)
    assert -(-len(windows) // 3) == n_eval_batches(windows.split, config)
    for i in range(n_eval_batches(windows.split, config)):
        starts, weights = eval_windows(windows.split, config, i)
        batch, _ = windows.batch(3 * i, 3)
        np.testing.assert_array_equal(batch["weights"], weights)
        np.testing.assert_array_equal(batch["tokens"], gather(windows.split.arrays, starts, 8)["tokens"])


def test_the_context_of_packed_rows_begins_in_each_document():
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]], np.uint16)
    split = Split("test", np.ones((2, 6), int), 11, None, segments)
    batch, contexts_BT = Windows(split, 5, 5).batch(0, 3)
    assert contexts_BT[:2].tolist() == [[1, 2, 3, 1, 2], [1, 2, 1, 2, 3]]
    assert batch["weights"].tolist() == [[1.0] * 5, [1.0] * 5, [0.0] * 5]
    assert len(Windows(dataclasses.replace(split), 5, 5)) == 2
