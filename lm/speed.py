"""How fast configs train here, measured beside each other: their dispatches alternate, so that a machine that others
share slows all of them alike."""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from lm.cohort import make_programs, split_config
from lm.config import Config
from lm.data import Corpus
from lm.feeds import to_device, train_feed

ROUNDS = 9


def timer(config: Config, corpus: Corpus) -> Callable[[], float]:
    """A function that trains one run on each device for a dispatch and returns tokens per second over all of them."""
    program, values = split_config(config)
    programs, by_member, shared = make_programs(program, None)
    n, split, t = jax.device_count(), corpus.split("train"), program.train
    resident = jax.device_put(to_device(split, program.data.device_bytes), shared)
    k = min(t.steps_per_dispatch, t.steps)
    feed = train_feed(split, resident is not None, program, 0, k)
    feeds = jax.device_put(jax.tree.map(lambda a: np.stack([a] * n), feed), by_member)
    values = jax.device_put({name: np.full(n, value, np.float32) for name, value in values.items()}, by_member)
    states = programs.init(jax.device_put(np.zeros(n, np.uint32), by_member))

    def dispatch() -> float:
        nonlocal states
        began = time.monotonic()
        states, out = programs.steps(states, resident, feeds, values, np.int32(k))
        jax.block_until_ready(out)
        return n * k * t.batch_size * t.seq_len / (time.monotonic() - began)

    dispatch()  # compiles
    return dispatch


def measure(runs: dict[str, tuple[Config, Corpus]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median tokens per second of each, over rounds that go through all of them, forwards and backwards in turn."""
    timers = {name: timer(config, corpus) for name, (config, corpus) in runs.items()}
    speeds = {name: [] for name in timers}
    for i in range(rounds):
        for name in list(timers)[:: -1 if i % 2 else 1]:
            speeds[name].append(timers[name]())
    return {name: statistics.median(values) for name, values in speeds.items()}
