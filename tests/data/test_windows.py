import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data import windows

N_LARGE = 10_000_000_019


def test_mix_gives_the_published_splitmix64_stream():
    # The first five outputs for seed 1234567 of the reference C code, as many languages' implementations check them.
    state = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * windows._GOLDEN
    assert windows.mix(state).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(
    ("seed", "step", "n", "order", "expected"),
    [
        (0, 0, 1000, "crops", [776, 699, 839, 298]),
        (17, 123456, 10**10, "crops", [8426936520, 3423887385, 507754491, 9214264076]),
        (0, 0, 1000, "epochs", [134, 8, 592, 440]),
        (17, 123456, 10**10, "epochs", [2668197538, 2900977873, 112390019, 3514247418]),
        (3, 5, 7, "epochs", [1, 0, 6, 1]),  # a batch that straddles two epochs
    ],
)
def test_golden_window_numbers(seed, step, n, order, expected):
    # Changing these changes the data order of every run ever made.
    assert windows.window_numbers(seed, step, 4, n, order=order).tolist() == expected


def permute_in_python(index, n, key):
    """The same network in Python's whole numbers, which cannot wrap around."""
    side = next(s for s in range(1, n + 2) if s * s >= n) if n < 10**6 else int(np.ceil(np.sqrt(n)))
    while True:
        left, right = divmod(index, side)
        for multiplier in windows._PI:
            noise = (key + right) * multiplier % 2**64
            noise = (noise ^ (noise >> 32)) * 0x94D049BB133111EB % 2**64 >> 32
            left, right = right, (left + noise) % side
        index = left * side + right
        if index < n:
            return index


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10_000), st.integers(0, 2**64 - 1), st.data())
def test_permute_equals_whole_number_arithmetic(n, key, data):
    index = data.draw(st.integers(0, n - 1))
    assert windows.permute(np.array([index]), n, np.uint64(key)) == permute_in_python(index, n, key)


def test_permute_equals_whole_number_arithmetic_for_ten_billion():
    index = np.array([0, 1, 99_999, 100_000, 5_000_000_000, N_LARGE - 1])
    key = np.uint64(2**64 - 3)
    assert windows.permute(index, N_LARGE, key).tolist() == [
        permute_in_python(i, N_LARGE, int(key)) for i in index.tolist()
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 17), st.integers(0, 2**32), st.booleans())
def test_an_epoch_visits_every_window_once(n, batch_size, seed, shuffle):
    n_steps = -(-3 * n // batch_size)
    numbers = windows.window_numbers(seed, np.arange(n_steps), batch_size, n, order="epochs", shuffle=shuffle).ravel()
    for epoch in range(3):
        visited = numbers[epoch * n : (epoch + 1) * n]
        assert sorted(visited) == list(range(n))
        if not shuffle:
            assert visited.tolist() == list(range(n))


def test_epochs_and_seeds_have_different_orders():
    orders = [windows.window_numbers(seed, epoch, 100, 100, order="epochs") for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("order", ["crops", "epochs"])
def test_an_array_of_steps_gives_the_batches_of_its_steps(order):
    together = windows.window_numbers(3, np.arange(5, 9), 6, 20, order=order)
    one_by_one = [windows.window_numbers(3, step, 6, 20, order=order) for step in range(5, 9)]
    np.testing.assert_array_equal(together, one_by_one)


def test_the_order_of_epochs_does_not_depend_on_the_batch_size():
    def run(batch_size):
        return windows.window_numbers(5, np.arange(48 // batch_size), batch_size, 13, order="epochs").ravel()

    np.testing.assert_array_equal(run(4), run(12))


@pytest.mark.parametrize("order", ["crops", "epochs"])
def test_ten_billion_windows_are_reached_evenly(order):
    numbers = windows.window_numbers(1, np.arange(20), 1000, N_LARGE, order=order).ravel()
    assert numbers.dtype == np.int64
    assert numbers.min() >= 0
    assert numbers.max() < N_LARGE
    if order == "epochs":
        assert len(np.unique(numbers)) == len(numbers)
    # 20,000 draws into 100 bins: chi-squared has mean 99 and standard deviation 14; this allows 5 of them.
    counts = np.bincount(numbers * 100 // N_LARGE, minlength=100)
    assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * 14


def test_each_window_is_equally_likely_at_each_place_of_an_epoch():
    n, n_epochs = 30, 3000
    order = windows.window_numbers(0, np.arange(n_epochs), n, n, order="epochs")
    counts = np.stack([np.bincount(order[:, place], minlength=n) for place in range(n)])
    expected, freedom = n_epochs / n, (n - 1) ** 2
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_a_run_of_many_steps_stays_exact():
    # k = step * B + row is past 2^53, where float64 would round.
    step, batch_size, n = 2**54 + 1, 3, 1000
    expected = [(step * batch_size + row) % n for row in range(batch_size)]
    got = windows.window_numbers(0, step, batch_size, n, order="epochs", shuffle=False)
    assert got.tolist() == expected


def test_n_windows_counts_the_windows_that_fit():
    # 10 tokens hold windows of 4 at 0..6; at stride 3 the starts 0, 3, 6; at stride 4, 0 and 4.
    assert windows.n_windows(10, 3, "crops") == 7
    assert windows.n_windows(10, 3, "epochs") == 3
    assert windows.n_windows(10, 3, "epochs", stride=4) == 2
    assert windows.n_windows(3, 3, "crops") == windows.n_windows(3, 3, "epochs") == 0


def test_non_overlapping_windows_are_the_text_cut_to_whole_windows():
    # CMU 15-780: windows of 256 tokens, of which 255 are inputs.
    tokens = np.arange(1000)
    n = windows.n_windows(len(tokens), 255, "epochs", stride=256)
    numbers = windows.window_numbers(0, 0, n, n, order="epochs", shuffle=False)
    starts = windows.starts(numbers, 255, "epochs", stride=256)
    np.testing.assert_array_equal(starts[:, None] + np.arange(256), tokens[:768].reshape(3, 256))


def test_no_window_is_an_error():
    with pytest.raises(ValueError, match="at least one window"):
        windows.window_numbers(0, 0, 4, 0)
    with pytest.raises(ValueError, match="'random'"):
        windows.window_numbers(0, 0, 4, 10, order="random")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 7))
def test_evaluation_predicts_every_token_once(n_tokens, seq_len, batch_size):
    n_batches = -(-windows.n_eval_windows(n_tokens, seq_len) // batch_size)
    predicted = []
    for batch in range(n_batches):
        starts, weights = windows.eval_windows(n_tokens, seq_len, batch_size, batch)
        assert starts.shape == (batch_size,)
        assert ((starts >= 0) & (starts < max(1, n_tokens))).all()
        targets = starts[:, None] + 1 + np.arange(seq_len)
        predicted += targets[weights > 0].tolist()
    assert predicted == list(range(1, n_tokens))
