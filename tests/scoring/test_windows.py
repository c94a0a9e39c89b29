"""Windows: which tokens are predicted, and with how much context."""

import numpy as np
import pytest
from tiny import tiny

from lm.data import Split
from lm.data.batches import eval_windows, gather, n_eval_windows
from lm.scoring.predictions import context_lengths


@pytest.mark.parametrize("n", [9, 17, 31, 40, 41, 42])
@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("size", [1, 4])
def test_each_token_is_predicted_once_with_at_least_seq_len_minus_stride_tokens_of_context(n, stride, size):
    split, config = Split("test", np.arange(n), n, None), tiny(eval={"batch_size": size})  # token i is at place i
    found = {}
    for i in range(-(-n_eval_windows(split, config, stride=stride) // size)):
        starts_B, weights_BT = eval_windows(split, config, i, stride)
        batch = gather(split.arrays, starts_B, 8)
        assert batch["tokens"].shape == (size, 9)
        for row, t in zip(*np.nonzero(weights_BT), strict=True):
            place, context = int(batch["tokens"][row, t + 1]), int(context_lengths(batch)[row, t])
            assert place not in found
            assert batch["tokens"][row, 0] + context == place
            found[place] = context
    assert sorted(found) == list(range(1, n))
    assert all(min(place, 8 - stride + 1) <= context <= 8 for place, context in found.items())


def test_the_context_of_packed_rows_begins_in_each_document():
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]], np.uint16)
    assert context_lengths({"tokens": np.ones((2, 6)), "segments": segments}).tolist() == [
        [1, 2, 3, 1, 2],
        [1, 2, 1, 2, 3],
    ]
