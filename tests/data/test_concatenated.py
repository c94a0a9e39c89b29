"""Arrays joined without a copy are indexed like the copied array."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.concatenated import ConcatenatedArray


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.data())
def test_indexing_equals_that_of_the_copied_array(lengths, data):
    whole = np.arange(sum(lengths), dtype=np.uint32)
    joined = ConcatenatedArray(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(joined) == len(whole)
    assert joined.nbytes == whole.nbytes
    np.testing.assert_array_equal(np.asarray(joined), whole)
    start, stop = data.draw(st.integers(-8, 35)), data.draw(st.integers(-8, 35))
    np.testing.assert_array_equal(joined[start:stop], whole[start:stop])
    assert joined[start:stop].dtype == np.uint32
    if len(whole):
        index = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8)), np.int64)
        np.testing.assert_array_equal(joined[index], whole[index])
        assert joined[index].dtype == np.uint32
        windows = index[: len(index) // 4 * 4].reshape(-1, 2, 2)
        np.testing.assert_array_equal(joined[windows], whole[windows])
        with pytest.raises(IndexError):
            joined[np.array([[0, len(whole)]])]
    for outside in (-1, len(whole)):
        with pytest.raises(IndexError):
            joined[outside]


def test_joining_joined_arrays_copies_nothing():
    parts = [np.arange(3), np.arange(4), np.arange(5)]
    joined = ConcatenatedArray([ConcatenatedArray(parts[:2]), parts[2]])
    assert [np.shares_memory(a, b) for a, b in zip(joined.parts, parts, strict=True)] == [True] * 3
    np.testing.assert_array_equal(np.asarray(joined), np.concatenate(parts))
