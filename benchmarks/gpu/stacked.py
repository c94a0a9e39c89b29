"""Runs that one program trains together, beside a single run: tokens/s and equal losses."""

import dataclasses
import time

import numpy as np

from benchmarks.gpu.kit import Kit, gpu_state
from benchmarks.shapes import config_of, named, write_tokens

SEEDS = 10
RATES = (3e-4, 6e-4, 1e-3, 2e-3, 4e-3)
# About a million parameters, most of them in the layers.
SIZES = {"model.d_model": 128, "model.n_layers": 5, "model.n_heads": 2, "model.d_ff": 512}
STEPS = 10  # per call
CALLS = 4
COMPARED = 3  # runs


def measure(kit: Kit) -> None:
    """Record single runs first, then the runs of all seeds and rates at once."""
    from lm.data import open_corpus
    from lm.system.runtime import start_jax

    shape = "tiny" if kit.tiny else "M"
    tokens = kit.folder("data") / "tokens"
    write_tokens(tokens, named(shape))
    overrides = {} if kit.tiny else SIZES | {"model.compute_dtype": "bfloat16"}
    overrides |= {"data.cache_dir": str(kit.folder("cache")), "train.steps_per_dispatch": STEPS}
    base = config_of(shape, str(tokens), overrides)
    start_jax(base.data.cache_dir)
    corpus = open_corpus(base.data, seq_len=base.train.seq_len, say=print)
    seeds = range(2 if kit.tiny else SEEDS)
    configs = [with_rate(base, seed, rate) for rate in RATES for seed in seeds]
    alone = [train([config], corpus) for config in configs[:COMPARED]]
    speed = max(found["tokens_per_second"] for found in alone)
    kit.record("stacked", "1 run", runs=1, tokens_per_second=speed, parameters=parameters(base))
    together = train(configs, corpus)
    expected = np.concatenate([found["losses"] for found in alone])
    differences = np.abs(together["losses"][:COMPARED] - expected)
    kit.record(
        "stacked",
        f"{len(configs)} runs",
        runs=len(configs),
        tokens_per_second=together["tokens_per_second"],
        largest_difference=float(differences.max()),
        equal_bits=bool((differences == 0).all()),
        losses_of_last_step=together["losses"][:, -1].tolist(),
        parameters=parameters(base),
        **gpu_state(),
    )


def parameters(config) -> int:
    from lm.parameters import count, parameter_table

    return count(parameter_table(config.model))


def with_rate(config, seed: int, rate: float):
    train = dataclasses.replace(config.train, seed=seed)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=rate)
    return dataclasses.replace(config, train=train, optimizer=optimizer)


def train(configs: list, corpus) -> dict:
    """Train runs of one program for a few calls; return the speed and the losses (R, steps)."""
    import jax

    from lm.sweeps.stacked import make_programs, split_config
    from lm.training.batch_source import BatchSource

    program, names = split_config(configs[0])
    programs = make_programs(program, -(-len(configs) // jax.device_count()))
    source = BatchSource(corpus.split("train"), program)
    sources = [source.with_seed(config.train.seed) for config in configs]
    splits = [split_config(config)[1] for config in configs]
    values = {name: np.array([own[name] for own in splits], np.float32) for name in names}
    states = programs.init(np.array([config.train.seed for config in configs], np.uint32))
    seconds = []
    losses = []
    for call in range(CALLS):
        own = [each.train(call * STEPS, STEPS) for each in sources]
        inputs = jax.tree.map(lambda *arrays: np.stack(arrays), *own)
        began = time.perf_counter()
        states, metrics = programs.steps(states, source.resident, inputs, values, np.int32(STEPS))
        losses.append(np.asarray(metrics["loss"]))
        seconds.append(time.perf_counter() - began)
    tokens = len(configs) * STEPS * program.train.batch_size * program.train.seq_len
    return {
        "tokens_per_second": tokens / min(seconds[1:]),  # the first call compiles
        "losses": np.concatenate(losses, axis=1),
    }
