"""How fast configs train here, measured beside each other: their dispatches alternate, so that a machine that others
share slows all of them alike."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from lm.config import Config
from lm.data import Corpus
from lm.sweeps.stacked import make_programs, split_config
from lm.training.batch_source import BatchSource

ROUNDS = 9


class Runs(NamedTuple):
    """What is timed: together x n_devices runs of one config at once."""

    config: Config
    corpus: Corpus
    together: int
    n_devices: int


def timer(runs: Runs) -> Callable[[], float]:
    """A function that trains the runs for one dispatch and returns tokens per second over all of them."""
    program, values = split_config(runs.config)
    programs, n = make_programs(program, runs.together, runs.n_devices), runs.together * runs.n_devices
    source, t = BatchSource(runs.corpus.split("train"), program), program.train
    resident = jax.device_put(source.resident, programs.shared)
    k = t.steps_per_dispatch
    feed = source.train(0, k)
    feeds = jax.tree.map(lambda a: np.stack([a] * n), feed)
    values = {name: np.full(n, value, np.float32) for name, value in values.items()}
    feeds, values, seeds = jax.device_put((feeds, values, np.zeros(n, np.uint32)), programs.by_member)
    states = programs.init(seeds)

    def dispatch() -> float:
        nonlocal states
        began = time.monotonic()
        states, out = programs.steps(states, resident, feeds, values, np.int32(k))
        jax.block_until_ready(out)
        return n * k * t.batch_size * t.seq_len / (time.monotonic() - began)

    dispatch()  # compiles
    return dispatch


def measure(runs: dict[str, Runs], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Tokens per second of each, in rounds that go through all of them, forwards and backwards in turn."""
    timers = {name: timer(one) for name, one in runs.items()}
    speeds = {name: [] for name in timers}
    for i in range(rounds):
        for name in list(timers)[:: -1 if i % 2 else 1]:
            speeds[name].append(timers[name]())
    return speeds


def measure_variants(variants: dict[str, tuple[Config, Corpus]], baseline: str, together: int) -> dict:
    """speeds.json: medians of tokens per second by variant, all devices busy, and of the baseline one run at a time;
    and the quartiles of each variant's.

    together: how many runs fit on a device; here those of all variants are on it at once.
    """
    n, together = jax.device_count(), max(1, together // (len(variants) + 1))
    runs = {name: Runs(*variant, together, n) for name, variant in variants.items()}
    alone = "one run of the baseline at a time"
    rounds = measure(runs | {alone: Runs(*variants[baseline], 1, 1)})
    speeds = {name: statistics.median(values) for name, values in rounds.items()}
    quartiles = {name: statistics.quantiles(rounds[name], method="inclusive")[::2] for name in variants}
    return {"alone": speeds.pop(alone), "at_once": together * n, "variants": speeds, "quartiles": quartiles}
