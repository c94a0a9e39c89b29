import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data import batches, windows


def test_gather_gives_inputs_and_the_targets_after_them():
    tokens = np.arange(100, 120, dtype=np.uint16)
    got = batches.gather(tokens, np.array([0, 7]), 3)
    assert got.dtype == np.int32
    assert got.tolist() == [[100, 101, 102, 103], [107, 108, 109, 110]]


def test_gather_fills_up_with_the_last_token():
    assert batches.gather(np.array([5, 6, 7], np.uint16), np.array([1]), 3).tolist() == [[6, 7, 7, 7]]


@pytest.mark.parametrize("order", ["crops", "epochs"])
def test_the_device_and_the_host_thread_gather_the_same(order, tmp_path):
    """Resident tokens gathered in a jitted step, and memory-mapped shards gathered by the background thread."""
    tokens = np.random.default_rng(0).integers(0, 60_000, 501).astype(np.uint16)
    for i, part in enumerate(np.split(tokens, [100, 110])):
        np.save(tmp_path / f"{i}.npy", part)
    shards = batches.Shards([np.load(tmp_path / f"{i}.npy", mmap_mode="r") for i in range(3)])
    seq_len, batch_size, k = 16, 4, 3
    n = windows.n_windows(len(tokens), seq_len, order)

    def starts(step):
        numbers = windows.window_numbers(11, np.arange(step, step + k), batch_size, n, order=order)
        return windows.starts(numbers, seq_len, order)

    steps = range(0, 30, k)
    gather = jax.jit(batches.gather, static_argnums=2)
    resident = [gather(jnp.asarray(tokens), starts(step).astype(np.int32), seq_len) for step in steps]
    streamed = list(batches.prefetch(lambda step: batches.gather(shards, starts(step), seq_len), steps))
    assert resident[0].dtype == streamed[0].dtype == np.int32
    assert resident[0].shape == (k, batch_size, seq_len + 1)
    np.testing.assert_array_equal(resident, streamed)


def test_packed_rows_are_gathered_the_same_on_device_and_host():
    rows = np.arange(40, dtype=np.uint16).reshape(5, 8)
    segments = (rows % 3).astype(np.uint16)
    numbers = np.array([[3, 0], [4, 4]])
    on_device = jax.jit(batches.gather_rows)(rows, segments, numbers)
    on_host = batches.gather_rows(batches.Shards([rows[:2], rows[2:]]), segments, numbers)
    np.testing.assert_array_equal(on_host[0], rows[numbers])
    np.testing.assert_array_equal(on_device, on_host)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.data())
def test_shards_index_like_their_concatenation(lengths, data):
    whole = np.arange(sum(lengths), dtype=np.uint32)
    shards = batches.Shards(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(shards) == shards.size == len(whole)
    assert shards.nbytes == whole.nbytes
    np.testing.assert_array_equal(np.asarray(shards), whole)
    start, stop = data.draw(st.integers(-8, 35)), data.draw(st.integers(-8, 35))
    np.testing.assert_array_equal(shards[start:stop], whole[start:stop])
    if len(whole):
        index = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8)), np.int64)
        np.testing.assert_array_equal(shards[index], whole[index])
        assert shards[index].dtype == np.uint32
    for outside in (-1, len(whole)):
        with pytest.raises(IndexError):
            shards[outside]


def test_prefetch_keeps_the_order_and_works_on_one_other_thread():
    threads = set()

    def square(i):
        threads.add(threading.current_thread())
        return i * i

    assert list(batches.prefetch(square, range(20))) == [i * i for i in range(20)]
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert not threads.pop().is_alive()


def test_prefetch_raises_an_exception_where_its_result_was_due():
    def fail_at_3(i):
        if i == 3:
            raise OSError("the disk is gone")
        return i

    stream = batches.prefetch(fail_at_3, range(10))
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


def test_prefetch_runs_ahead_by_its_depth_and_ends_when_closed():
    taken, begun, threads, second_began, release = [], [], [], threading.Event(), threading.Event()

    def wait_after_the_first(i):
        begun.append(i)
        threads.append(threading.current_thread())
        if i > 0:
            second_began.set()
            release.wait(30)
        return i

    stream = batches.prefetch(wait_after_the_first, (taken.append(i) or i for i in range(1000)), depth=3)
    assert next(stream) == 0
    assert taken == [0, 1, 2, 3]
    assert second_began.wait(30)
    threading.Timer(0.5, release.set).start()
    stream.close()  # waits for 1, which has begun, and cancels 2 and 3
    assert begun == [0, 1]
    assert not threads[0].is_alive()
