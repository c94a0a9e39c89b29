"""The batch of a step is a pure function of (tokens, seed, step), wherever it is gathered."""

import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import Config, DataConfig, TrainConfig
from lm.config.schema import EvalConfig
from lm.data import Split, batches
from lm.data.concatenated import ConcatenatedArray

N_LARGE = 10_000_000_019


def test_golden_window_numbers():
    """Changing these numbers changes the data order of every run ever made."""
    for seed, step, n, order, expected in (
        (0, 0, 1000, "crops", [776, 699, 839, 298]),
        (17, 123456, 10**10, "crops", [8426936520, 3423887385, 507754491, 9214264076]),
        (0, 0, 1000, "epochs", [134, 8, 592, 440]),
        (17, 123456, 10**10, "epochs", [2668197538, 2900977873, 112390019, 3514247418]),
        (3, 5, 7, "epochs", [1, 0, 6, 1]),  # the end of one epoch and the start of the next
    ):
        assert batches.window_numbers(seed, step, 4, n, order=order).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 17), st.integers(0, 2**32), st.booleans())
def test_an_epoch_visits_every_window_once_in_an_order_that_does_not_depend_on_the_batch_size(
    n, batch_size, seed, shuffle
):
    def numbers_in_batches_of(size):
        steps = np.arange(-(-3 * n // size))
        return batches.window_numbers(
            seed, steps, size, n, order="epochs", shuffle=shuffle
        ).ravel()[: 3 * n]

    numbers = numbers_in_batches_of(batch_size)
    np.testing.assert_array_equal(numbers, numbers_in_batches_of(1))
    for epoch in range(3):
        visited = numbers[epoch * n : (epoch + 1) * n]
        assert sorted(visited) == list(range(n))
        if not shuffle:
            assert visited.tolist() == list(range(n))


def test_ten_billion_windows_are_drawn_uniformly():
    for order in ("crops", "epochs"):
        numbers = batches.window_numbers(1, np.arange(20), 1000, N_LARGE, order=order).ravel()
        assert numbers.dtype == np.int64
        assert (numbers.min() >= 0) & (numbers.max() < N_LARGE)
        assert order == "crops" or len(np.unique(numbers)) == len(numbers)
        # 20,000 draws into 100 bins: chi-squared has mean 99 and standard deviation 14; this allows
        # 5 of them.
        counts = np.bincount(numbers * 100 // N_LARGE, minlength=100)
        assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * 14


def test_each_window_is_equally_likely_at_each_place_of_an_epoch():
    n, n_epochs = 30, 3000
    order = batches.window_numbers(0, np.arange(n_epochs), n, n, order="epochs")
    counts = np.stack([np.bincount(order[:, place], minlength=n) for place in range(n)])
    expected, freedom = n_epochs / n, (n - 1) ** 2
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_step_times_batch_size_beyond_2_to_the_53_is_exact():
    # float64 would round k = step * B + row.
    step, batch_size, n = 2**54 + 1, 3, 1000
    expected = [(step * batch_size + row) % n for row in range(batch_size)]
    got = batches.window_numbers(0, step, batch_size, n, order="epochs", shuffle=False)
    assert got.tolist() == expected


def config_of(*, seq_len=3, batch_size=4, eval_batch_size=None, **data) -> Config:
    train = TrainConfig(seed=11, seq_len=seq_len, batch_size=batch_size)
    return Config(train=train, eval=EvalConfig(batch_size=eval_batch_size), data=DataConfig(**data))


def split_of(tokens, segments=None) -> Split:
    return Split("train", tokens, tokens.size, None, segments)


def packed_split(n_rows=5, seq_len=7) -> Split:
    rows = np.arange(n_rows * (seq_len + 1), dtype=np.uint16).reshape(n_rows, seq_len + 1)
    return split_of(rows, (rows % 3).astype(np.uint16))


def test_n_windows_counts_the_windows_that_fit():
    # 10 tokens contain windows of 4 at 0..6; at stride 3 they start at 0, 3, 6; at stride 4 at 0
    # and 4.
    split = split_of(np.arange(10))
    assert batches.n_windows(split, config_of(order="crops")) == 7
    assert batches.n_windows(split, config_of(order="epochs")) == 3
    assert batches.n_windows(split, config_of(order="epochs", stride=4)) == 2
    for order in ("crops", "epochs"):
        assert batches.n_windows(split_of(np.arange(3)), config_of(order=order)) == 0
        assert batches.n_windows(packed_split(n_rows=5), config_of(order=order, seq_len=7)) == 5
    with pytest.raises(ValueError, match="at least one window"):
        batches.window_numbers(0, 0, 4, 0, order="crops")


def test_non_overlapping_windows_cover_the_text_up_to_the_last_full_window():
    # CMU 15-780: windows of 256 tokens, with 255 inputs each.
    config = config_of(seq_len=255, batch_size=3, order="epochs", shuffle=False, stride=256)
    batch = batches.train_batch(split_of(np.arange(1000)), config, 0)
    np.testing.assert_array_equal(batch["tokens"], np.arange(768).reshape(3, 256))


def test_the_batch_of_a_step_is_the_windows_at_its_starts():
    for order in ("crops", "epochs"):
        split, config = split_of(np.arange(100)), config_of(order=order)
        starts = batches.window_starts(split, config, 6)
        assert starts.shape == (4,)
        for first, last in ((5, 8), (0, 40)):  # an array of steps gives the starts of each
            several = batches.window_starts(split, config, np.arange(first, last))
            np.testing.assert_array_equal(several[6 - first], starts)
        np.testing.assert_array_equal(
            batches.train_batch(split, config, 6)["tokens"], starts[:, None] + np.arange(4)
        )


def test_the_batch_of_a_packed_split_is_rows_and_segments_on_device_and_host():
    split, config = packed_split(), config_of(seq_len=7, order="epochs")
    rows = batches.window_starts(split, config, np.arange(3))
    parts = {
        name: ConcatenatedArray([array[:2], array[2:]]) for name, array in split.arrays.items()
    }
    on_device = jax.jit(batches.gather, static_argnums=2)(split.arrays, rows, 7)
    on_host, batch = batches.gather(parts, rows, 7), batches.train_batch(split, config, 2)
    for name, expected in (("tokens", split.tokens[rows]), ("segments", split.segments[rows])):
        np.testing.assert_array_equal(on_device[name], expected)
        np.testing.assert_array_equal(on_host[name], expected)
        np.testing.assert_array_equal(batch[name], expected[2])
        assert batch[name].dtype == np.int32


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 20), st.integers(1, 7))
def test_evaluation_predicts_every_token_once_with_at_least_seq_len_minus_stride_tokens_of_context(
    n_tokens, seq_len, stride, batch_size
):
    stride, position = min(stride, seq_len), np.arange(seq_len)
    split, config = (
        split_of(np.arange(n_tokens)),
        config_of(seq_len=seq_len, eval_batch_size=batch_size),
    )
    targets, contexts = [], []
    for batch in range(-(-batches.n_eval_windows(split, config, stride=stride) // batch_size)):
        starts, weights = batches.eval_windows(split, config, batch, stride)
        assert starts.shape == (batch_size,)
        assert ((starts >= 0) & (starts < max(1, n_tokens))).all()
        targets += (starts[:, None] + 1 + position)[weights > 0].tolist()
        contexts += np.broadcast_to(position + 1, weights.shape)[weights > 0].tolist()
    assert targets == list(range(1, n_tokens))
    assert all(
        context >= min(target, seq_len - stride + 1)
        for target, context in zip(targets, contexts, strict=True)
    )


def test_evaluation_of_a_packed_split_reads_every_row_once():
    split, config = packed_split(n_rows=5), config_of(seq_len=7, eval_batch_size=3)
    windows = [
        batches.eval_windows(split, config, batch)
        for batch in range(batches.n_eval_batches(split, config))
    ]
    rows, weights_BT = (np.concatenate(parts) for parts in zip(*windows, strict=True))
    assert rows.tolist() == [0, 1, 2, 3, 4, 4]
    assert weights_BT.tolist() == [[1.0] * 7] * 5 + [[0.0] * 7]


def test_prefetch_keeps_the_order_in_one_background_thread_and_raises_an_exception_in_its_place():
    threads = set()

    def square(i):
        threads.add(threading.current_thread())
        if i == 20:
            raise OSError("the disk is gone")
        return i * i

    stream = batches.prefetch(square, range(30))
    assert [next(stream) for _ in range(20)] == [i * i for i in range(20)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert not threads.pop().is_alive()


def test_prefetch_runs_ahead_by_its_depth_and_ends_when_closed():
    taken, begun, threads, second_began, release = [], [], [], threading.Event(), threading.Event()

    def wait_after_the_first(i):
        begun.append(i)
        threads.append(threading.current_thread())
        if i > 0:
            second_began.set()
            release.wait(30)
        return i

    stream = batches.prefetch(
        wait_after_the_first, (taken.append(i) or i for i in range(1000)), depth=3
    )
    assert next(stream) == 0
    assert taken == [0, 1, 2, 3]
    assert second_began.wait(30)
    threading.Timer(0.5, release.set).start()
    stream.close()  # waits for 1, which has begun, and cancels 2 and 3
    assert begun == [0, 1]
    assert not threads[0].is_alive()
