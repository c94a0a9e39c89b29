"""Dispatches, steps that the device runs without the host, and the pipeline that keeps it busy.

A single run (`lm/training/loop.py`) and the stacked runs of a sweep (`lm/sweeps/stacked.py`) share
both.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

from lm.config import Resolved
from lm.data.batches import prefetch


class Dispatch(NamedTuple):
    """`n_steps` steps that follow the first `step` steps of a run."""

    step: int
    n_steps: int

    @property
    def end(self) -> int:
        return self.step + self.n_steps


class Done(NamedTuple):
    """A dispatch that the device has finished."""

    dispatch: Dispatch
    metrics: dict[str, np.ndarray]  # stacked over its steps
    # the train state after it; None if the next dispatch was already sent, which consumes the state
    state: Any | None


def due(step: int, config: Resolved) -> set[str]:
    """Return what the host does after the first `step` steps, before it sends the next dispatch.

    "detail", "eval", "checkpoint" and "tasks" are due before the last step; "profile" is, where a
    trace starts or ends.

    >>> from lm.config.schema import Config, EvalConfig, TrainConfig
    >>> config = Config(train=TrainConfig(steps=10, profile=(6, 7)), eval=EvalConfig(every=5))
    >>> [sorted(due(step, config)) for step in (0, 5, 6, 7, 10)]
    [[], ['eval', 'profile'], [], ['profile'], []]
    """
    t = config.train
    periods = {"detail": config.log.detail_every}
    if step:
        periods["eval"] = config.eval.every
        periods["checkpoint"] = config.checkpoint.every
        periods["tasks"] = config.eval.harness_every
    tasks = set()
    for task, every in periods.items():
        if every and step % every == 0 and step < t.steps:
            tasks.add(task)
    if t.profile and step in (t.profile[0] - 1, t.profile[1]):
        tasks.add("profile")
    return tasks


def dispatches(
    first: int, config: Resolved, also: Collection[int] = frozenset()
) -> Iterator[Dispatch]:
    """Yield the dispatches from step `first` to the last step.

    A dispatch has at most train.steps_per_dispatch steps. It ends where something is due, see
    `due`, and after the steps of `also`.

    >>> from lm.config.schema import Config, EvalConfig, TrainConfig
    >>> config = Config(train=TrainConfig(steps=10, steps_per_dispatch=4), eval=EvalConfig(every=5))
    >>> [(dispatch.step, dispatch.end) for dispatch in dispatches(0, config)]
    [(0, 4), (4, 5), (5, 9), (9, 10)]
    """
    step = first
    steps = config.train.steps

    def ends(step: int) -> bool:
        return step in also or bool(due(step, config))

    while step < steps:
        longest = min(config.train.steps_per_dispatch, steps - step)
        n = next(n for n in range(1, longest + 1) if n == longest or ends(step + n))
        yield Dispatch(step, n)
        step += n


def pipeline(
    program: Callable[[Any, Any, np.int32], tuple[Any, dict]],
    state: Any,
    plan: Iterable[Dispatch],
    inputs_of: Callable[[int, int], Any],
    *,
    pause: Callable[[Dispatch], bool],
    stop: Callable[[], bool],
    waiting: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Iterator[Done]:
    """Run dispatches; yield each one with its metrics while the device works on the next one.

    Args:
        program: (state, inputs, n_steps) -> (state, metrics). It may donate its state.
        state: the train state before the first dispatch.
        plan: the dispatches, in order.
        inputs_of: (step, n_steps) -> the inputs of that dispatch. A background thread calls it
            ahead of time.
        pause: (dispatch) -> whether the host needs the state after it. The next dispatch is then
            sent only when the caller asks for it.
        stop: polled before each dispatch; once true, no other dispatch is sent.
        waiting: returns a context that is entered while a device without work waits for inputs.

    Yields:
        Every dispatch that was sent, in order. The last one always has its state.
    """
    unread = None

    def wait(inputs: futures.Future) -> None:
        while unread is not None and not (
            all(x.is_ready() for x in unread[1].values()) or inputs.done()
        ):
            futures.wait([inputs], timeout=0.001)
        with waiting():
            futures.wait([inputs])

    with contextlib.closing(prefetch(lambda d: (d, inputs_of(*d)), plan, wait=wait)) as prefetched:
        for dispatch, given in prefetched:
            if stop():
                break
            state, metrics = program(state, given, np.int32(dispatch.n_steps))
            if unread is not None:
                yield Done(unread[0], jax.device_get(unread[1]), None)
            unread = dispatch, metrics
            if pause(dispatch):
                yield Done(dispatch, jax.device_get(metrics), state)
                unread = None
    if unread is not None:
        yield Done(unread[0], jax.device_get(unread[1]), state)
