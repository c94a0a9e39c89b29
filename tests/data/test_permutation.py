"""The hash and the permutation behind the order of the data."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data import permutation

N_LARGE = 10_000_000_019


def test_mix_gives_the_published_splitmix64_stream():
    # The first five outputs of the reference C code for seed 1234567, a common test vector.
    state = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * permutation._GOLDEN
    assert permutation.mix(state).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def permute_in_python(index, n, key):
    """The same network in Python integers, which do not overflow."""
    side = next(s for s in range(1, n + 2) if s * s >= n) if n < 10**6 else int(np.ceil(np.sqrt(n)))
    while True:
        left, right = divmod(index, side)
        for multiplier in permutation._PI:
            noise = (key + right) * multiplier % 2**64
            noise = (noise ^ (noise >> 32)) * 0x94D049BB133111EB % 2**64 >> 32
            left, right = right, (left + noise) % side
        index = left * side + right
        if index < n:
            return index


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10_000) | st.just(N_LARGE), st.integers(0, 2**64 - 1), st.data())
def test_permute_equals_exact_integer_arithmetic(n, key, data):
    index = data.draw(st.integers(0, n - 1))
    assert permutation.permute(np.array([index]), n, np.uint64(key)) == permute_in_python(
        index, n, key
    )
