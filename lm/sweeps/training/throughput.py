"""Measure how fast configs train. Their dispatches alternate, so that other load slows all of them alike."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from lm.config import Config
from lm.data import Corpus
from lm.sweeps.training.stacked import make_programs, split_config
from lm.training.batch_source import BatchSource

ROUNDS = 9


class Workload(NamedTuple):
    """One thing to time: runs_per_device x n_devices runs of one config at once."""

    config: Config
    corpus: Corpus
    runs_per_device: int
    n_devices: int


def make_timer(workload: Workload) -> Callable[[], float]:
    """Compile the runs; return a function that trains them for one dispatch and returns their total tokens/s."""
    program, values = split_config(workload.config)
    programs = make_programs(program, workload.runs_per_device, workload.n_devices)
    n, t = workload.runs_per_device * workload.n_devices, program.train
    source = BatchSource(workload.corpus.split("train"), program)
    resident = jax.device_put(source.resident, programs.replicated)
    k = t.steps_per_dispatch
    inputs = jax.tree.map(lambda a: np.stack([a] * n), source.train(0, k))
    values = {name: np.full(n, value, np.float32) for name, value in values.items()}
    inputs, values, seeds = jax.device_put((inputs, values, np.zeros(n, np.uint32)), programs.by_run)
    states = programs.init(seeds)

    def dispatch() -> float:
        nonlocal states
        began = time.monotonic()
        states, metrics = programs.steps(states, resident, inputs, values, np.int32(k))
        jax.block_until_ready(metrics)
        return n * k * t.batch_size * t.seq_len / (time.monotonic() - began)

    dispatch()  # compiles
    return dispatch


def measure(workloads: dict[str, Workload], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return tokens per second of each workload in each round; every other round is in reverse order."""
    timers = {name: make_timer(workload) for name, workload in workloads.items()}
    speeds = {name: [] for name in timers}
    for i in range(rounds):
        for name in list(timers)[:: -1 if i % 2 else 1]:
            speeds[name].append(timers[name]())
    return speeds


def _in_whole_batches(config: Config) -> Config:
    """Return the config with one micro-batch, unless it sets their size. A run that has several cores needs no more."""
    size = config.train.micro_batch_size or config.train.batch_size
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=size))


def measure_variants(variants: dict[str, tuple[Config, Corpus]], baseline: str, runs_per_device: int) -> dict:
    """Measure the variants of a sweep beside each other, with all devices busy.

    Args:
        variants: resolved config and data by name.
        baseline: the variant that is also measured one run at a time.
        runs_per_device: how many runs a device vectorizes; the runs of all variants share its memory.

    Returns:
        speeds.json: medians and quartiles of tokens per second by variant, and the baseline's alone.
    """
    n, runs_per_device = jax.device_count(), max(1, runs_per_device // (len(variants) + 1))
    workloads = {name: Workload(*variant, runs_per_device, n) for name, variant in variants.items()}
    alone, (config, corpus) = "one run of the baseline at a time", variants[baseline]
    workload_alone = Workload(_in_whole_batches(config) if n > 1 else config, corpus, 1, 1)
    rounds = measure(workloads | {alone: workload_alone})
    speeds = {name: statistics.median(values) for name, values in rounds.items()}
    quartiles = {name: statistics.quantiles(rounds[name], method="inclusive")[::2] for name in variants}
    return {"alone": speeds.pop(alone), "at_once": runs_per_device * n, "variants": speeds, "quartiles": quartiles}
