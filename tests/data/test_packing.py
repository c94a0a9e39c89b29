"""Packing: documents in rows, and which tokens are targets."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data import packing


def documents_of(lengths):
    return np.arange(1, sum(lengths) + 1, dtype=np.uint16)


def test_next_fit_by_hand():
    # Documents 1 2 3, 4 5, 6 7 8 and 9 in rows of 5: the third does not fit the first row; 9 has no target.
    rows, segments = packing.pack(documents_of([3, 2, 3, 1]), np.array([3, 2, 3, 1]), 4)
    assert rows.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert segments.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 0, 0]]


def test_a_long_document_is_cut_into_pieces_that_share_a_token():
    rows, segments = packing.pack(documents_of([8]), np.array([8]), 3)
    assert rows.tolist() == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 0, 0]]
    assert segments.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 9))
def test_every_token_of_a_document_but_its_first_is_a_target_once(lengths, seq_len):
    rows, segments = packing.pack(documents_of(lengths), np.array(lengths, np.int64), seq_len)
    assert rows.shape == segments.shape == (len(rows), seq_len + 1)
    is_target = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    targets, inputs = rows[:, 1:][is_target], rows[:, :-1][is_target]
    ends = np.cumsum(lengths, dtype=int)
    firsts = {int(end - length + 1) for end, length in zip(ends, lengths, strict=True) if length}
    assert targets.tolist() == [i for i in range(1, sum(lengths) + 1) if i not in firsts]
    np.testing.assert_array_equal(inputs + 1, targets)  # the token before it in the same document
    assert (rows[segments == 0] == 0).all()
