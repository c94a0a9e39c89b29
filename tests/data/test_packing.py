"""Packing: which tokens are targets; `lm/data/packing.py` has the examples by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data import packing


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 9))
def test_every_token_of_a_document_but_its_first_is_a_target_once(lengths, seq_len):
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    segments, rows = packing.pack(np.array(lengths, np.int64), seq_len, tokens)
    assert rows.shape == segments.shape == (len(rows), seq_len + 1)
    is_target = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    targets, inputs = rows[:, 1:][is_target], rows[:, :-1][is_target]
    ends = np.cumsum(lengths, dtype=int)
    firsts = {int(end - length + 1) for end, length in zip(ends, lengths, strict=True) if length}
    assert targets.tolist() == [i for i in tokens.tolist() if i not in firsts]
    np.testing.assert_array_equal(inputs + 1, targets)  # the token before it in the same document
    assert (rows[segments == 0] == 0).all()
