"""Which batch is step s: a pure function of (tokens, seed, step), in NumPy alone.

A window is seq_len + 1 consecutive tokens: the inputs are all but the last, the targets all but the
first. A packed split has rows of that length instead, and "window" means row. `train_batch` gives
the batch of a step:

>>> from lm.config import Config, DataConfig, TrainConfig
>>> split = Split("train", np.arange(100, dtype=np.uint16), n_tokens=100, n_bytes=None)
>>> config = Config(train=TrainConfig(seed=0, batch_size=2, seq_len=4), data=DataConfig(order="crops"))
>>> train_batch(split, config, step=17)["tokens"]
array([[82, 83, 84, 85, 86],
       [ 4,  5,  6,  7,  8]], dtype=int32)

A batch is computed in two steps: `window_starts` draws the starts of the windows, on the host, and
`gather` reads their tokens, on the host or inside a jitted step. There is no iterator state to
save, so a resumed run, or a run on another number of processes, sees the same batches.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from lm.config import Config
from lm.data import mixtures
from lm.data.corpus import Split
from lm.data.mixtures import Part
from lm.data.permutation import hash_counters, permute


def train_batch(split: Split, config: Config, step: int) -> dict:
    """Return the whole batch of one training step; steps are numbered from 0.

    Of the config it reads train.{seed, batch_size, seq_len}, data.{order, shuffle, stride} and the
    keys of a mixture.

    Returns:
        {"tokens": int32 (B, T+1)}, and for a packed split {"segments": int32 (B, T+1)} with 0 for
        padding.
    """
    return gather(split.arrays, window_starts(split, config, step), config.train.seq_len)


def window_starts(split: Split, config: Config, steps) -> np.ndarray:
    """Draw the windows of a step, or of an array of k steps; `config` is read as by `train_batch`.

    Returns:
        The index of each window's first token, or of each packed row: int64 (B,), or (k, B) for k
        steps.
    """
    if split.parts:
        return mixtures.starts(split.parts, config, steps)
    numbers = window_numbers(
        config.train.seed,
        steps,
        config.train.batch_size,
        n_windows(split, config),
        order=config.data.order,
        shuffle=config.data.shuffle,
    )
    return numbers if split.packed else numbers * _stride(config)


def n_windows(split: Split, config: Config) -> int:
    """Return how many windows `window_starts` chooses from, or the rows of a packed split."""
    if split.packed:
        return len(split.tokens)
    return max(0, (len(split.tokens) - config.train.seq_len - 1) // _stride(config) + 1)


def _stride(config: Config) -> int:
    """Return the distance of neighbouring windows in tokens; random crops begin at any token."""
    return 1 if config.data.order == "crops" else config.data.stride or config.train.seq_len


def window_numbers(
    seed: int, steps, batch_size: int, n_windows: int, *, order: str, shuffle: bool = True
):
    """Draw the windows of training steps by their numbers in [0, n_windows).

    With order "crops" the draws are independent and uniform (the modulo's bias is below n_windows /
    2^64). With order "epochs" row r of step s is draw k = s * B + r of the run, which is number k
    mod n of epoch k // n. Each epoch visits every window once: in a permutation of its own, or in
    order if not `shuffle`. A batch may contain the end of one epoch and the start of the next.

    Returns:
        int64 (B,), or (k, B) for an array of k steps.

    Raises:
        ValueError: n_windows is 0.
    """
    if n_windows < 1:
        raise ValueError(
            f"a batch needs at least one window to choose from, got n_windows = {n_windows}"
        )
    step = np.asarray(steps, np.int64)[..., None]
    row = np.arange(batch_size)
    if order == "crops":
        return (hash_counters(seed, 0, step, row) % np.uint64(n_windows)).astype(np.int64)
    epoch, position = np.divmod(step * batch_size + row, n_windows)
    if not shuffle:
        return position
    return permute(position, n_windows, hash_counters(seed, 1, epoch))


def gather(arrays: dict, starts, seq_len: int) -> dict:
    """Read the windows that begin at `starts`.

    The same code serves NumPy arrays, memory maps and `ConcatenatedArray` on the host, and jax
    arrays inside jit.

    Args:
        arrays: tokens (n,) of any integer type; or the tokens and segments of packed rows, each (R,
            T+1).
        starts: integers (...): the index of each window's first token, or of each packed row.
        seq_len: T.

    Returns:
        int32 (..., T+1) for each of the arrays. Positions beyond the last token repeat it;
        evaluation gives such targets the weight 0.

    >>> gather({"tokens": np.array([5, 6, 7, 8])}, np.array([0, 2]), seq_len=2)["tokens"]
    array([[5, 6, 7],
           [7, 8, 8]], dtype=int32)
    """
    return {
        name: _windows(array, starts, seq_len).astype("int32") for name, array in arrays.items()
    }


def _windows(array, starts, seq_len: int):
    if array.ndim == 2:  # packed rows
        return array[starts]
    index = starts[..., None] + np.arange(seq_len + 1, dtype=starts.dtype)
    return array[index.clip(max=len(array) - 1)]


def n_eval_windows(
    split: Split, config: Config, max_batches: int = 0, stride: int | None = None
) -> int:
    """Return how many windows an evaluation reads, at most max_batches (0: all) of each source."""
    n_windows = [_windows_of(split, part, config, stride) for part in split.all_parts]
    limit = max_batches * _eval_batch_size(config) or max(n_windows)
    return sum(min(n, limit) for n in n_windows)


def _windows_of(split: Split, part: Part, config: Config, stride: int | None) -> int:
    T = config.train.seq_len
    if split.packed:
        return part.n_tokens
    if part.n_tokens < 2:
        return 0
    # the first window, and one for each further stride that has targets
    return 1 + max(0, -((T - part.n_tokens + 1) // (stride or T)))


def _eval_batch_size(config: Config) -> int:
    return config.eval.batch_size or config.train.batch_size


def eval_batches(
    split: Split, config: Config, max_batches: int = 0, stride: int | None = None
) -> list[tuple[Part, range]]:
    """Return the numbers of the batches of each source, at most max_batches (0: all) of each."""
    batches = []
    first = 0
    for part in split.all_parts:
        n = -(-_windows_of(split, part, config, stride) // _eval_batch_size(config))
        batches.append((part, range(first, first + min(n, max_batches or n))))
        first += n
    return batches


def n_eval_batches(split: Split, config: Config) -> int:
    """Return how many batches an evaluation of the whole split takes."""
    return sum(len(numbers) for _, numbers in eval_batches(split, config))


def eval_windows(
    split: Split, config: Config, batch: int, stride: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows of one evaluation batch.

    Window k reads tokens kT .. kT+T-1 and predicts kT+1 .. kT+T. So an evaluation predicts every
    token but the first exactly once, at the context length of training. Targets beyond the last
    token have weight 0, and so have the windows beyond the last one, which fill up the last batch.
    A batch has windows of one source only.

    With a stride S < T, window k begins at kS, and only its last S targets count, except in the
    first window. So every token is still predicted once, with at least T - S + 1 tokens of context
    wherever the text has that many.

    Args:
        config: reads train.seq_len and eval.batch_size (none: train.batch_size).
        batch: number of the batch, from 0.
        stride: S; None: T. Packed rows are windows of their own.

    Returns:
        Starts (B,) int64 as of `window_starts`, and weights of the targets (B, T) float32. For a
        packed split the weights only mark the rows that exist; the segments mark padding and
        borders between documents.
    """
    T = config.train.seq_len
    B = _eval_batch_size(config)
    S = stride or T
    part, first = next(
        (part, numbers.start)
        for part, numbers in eval_batches(split, config, stride=S)
        if batch in numbers
    )
    k_B = (batch - first) * B + np.arange(B, dtype=np.int64)
    n = part.n_tokens
    if split.packed:
        return np.minimum(k_B, n - 1), np.repeat(k_B[:, None] < n, T, 1).astype(np.float32)
    position_T = np.arange(T, dtype=np.int64)
    is_text_BT = k_B[:, None] * S + 1 + position_T < n
    is_new_BT = (k_B[:, None] == 0) | (position_T >= T - S)
    starts_B = part.start + np.minimum(k_B * S, max(0, n - 1))
    return starts_B, (is_text_BT & is_new_BT).astype(np.float32)


def prefetch(
    function: Callable,
    items: Iterable,
    depth: int = 2,
    wait: Callable[[Future], object] = Future.result,
) -> Generator:
    """Yield function(item) in order, computed by a background thread up to `depth` items ahead.

    The order and the values do not depend on timing. An exception in `function` is raised where its
    result would have been yielded. Closing the generator (or dropping it) cancels the items not yet
    begun and ends the thread. `wait` is called with the future of each result before it is taken.
    """
    pending: deque = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="lm-data") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > depth:
                    wait(pending[0])
                    yield pending.popleft().result()
            while pending:
                wait(pending[0])
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
