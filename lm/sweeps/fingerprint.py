"""What makes one experiment another: the programs it runs, what they are given, and the data.

Two configs may differ in a key that does nothing (rope_theta without RoPE). Their programs are then equal to the
letter, and a sweep over that key would compare a thing with itself.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from lm.config import Config, flatten, to_dict
from lm.data import Corpus, batches
from lm.step import eval_step, init_state, train_steps
from lm.sweeps.stacked import split_config, with_values
from lm.training.batch_source import BatchSource
from lm.training.warm_start import WarmStart


def identity(config: Config, corpus: Corpus, carried: WarmStart | None = None) -> str:
    """sha256 of a resolved config's experiment; equal for two configs whose runs could not differ.

    Over the lowered StableHLO of init, train step and evaluation step (constants included, source locations not), the
    values they are given (seed, traced hyperparameters, parameters carried over), the corpus and its tokenizer, and the
    first and last thousand steps' windows.
    """
    t = config.train
    program, values = split_config(config)
    split = corpus.split("train")
    source = BatchSource(split, program)
    resident, feed, evaluation = source.resident, source.train(0, 1), next(source.evaluation())
    seed, traced = jnp.uint32(0), {name: jnp.float32(value) for name, value in values.items()}
    init = functools.partial(init_state, program)
    state = jax.eval_shape(init, seed)

    def steps(state, resident, feed, values, n):
        return train_steps(state, resident, feed, n, with_values(program, values))

    def evaluate(params, resident, feed):
        return eval_step(params, resident, feed, program)

    found = hashlib.sha256()
    training = jax.jit(steps).trace(state, resident, feed, traced, jnp.int32(1))
    evaluating = jax.jit(evaluate).trace(state.params, resident, evaluation)
    for traced_program in (jax.jit(init).trace(seed), training, evaluating):
        found.update(traced_program.lower().as_text().encode())
    some = np.unique(np.concatenate([np.arange(min(t.steps, 1000)), np.arange(max(0, t.steps - 1000), t.steps)]))
    found.update(np.ascontiguousarray(batches.window_starts(split, config, some), np.int64).tobytes())
    read = [(name, values[name]) for name in _read(training, traced, before=(state, resident, feed))]
    found.update(repr((t.seed, read, t.steps, corpus.fingerprint)).encode())
    if carried:
        found.update(carried.checksum().encode())
    return found.hexdigest()


def _read(traced_program, values: dict, *, before: tuple) -> list[str]:
    """Which of the values, arguments that come after those of `before`, the traced program reads anywhere."""
    jaxpr = traced_program.jaxpr.jaxpr
    read = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    inputs = jaxpr.invars[len(jax.tree.leaves(before)) :]
    return [name for name, variable in zip(sorted(values), inputs, strict=False) if id(variable) in read]


def differing_keys(a: Config, b: Config) -> list[str]:
    """The dotted names of the keys in which two configs differ."""
    flat_a, flat_b = flatten(to_dict(a)), flatten(to_dict(b))
    return [key for key in flat_a if flat_a[key] != flat_b[key]]
