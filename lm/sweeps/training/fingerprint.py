"""Fingerprints of experiments: equal for two configs whose runs, at one learning rate, cannot differ beyond rounding.

Two configs may differ in a key that has no effect (rope_theta without RoPE). They then compile to the same program, and
a sweep over that key would compare an experiment with itself.
"""

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from lm import parameters
from lm.config import Config, flatten, to_dict
from lm.data import Corpus, batches
from lm.step import eval_step, init_state, train_steps
from lm.sweeps.training.stacked import split_config, with_values
from lm.training.batch_source import BatchSource
from lm.training.warm_start import WarmStart


def fingerprint(config: Config, corpus: Corpus, warm: WarmStart | None = None) -> str:
    """Return a hash (sha256) of everything that determines the results of a run, except its learning rate.

    The hash covers the lowered StableHLO of initialization, train step and evaluation step (without source locations),
    the seed, the number of steps, the corpus and its tokenizer, the starts of the windows of the first and the last
    thousand steps, and the parameters of a warm start. Keys that only decide how a run is carried out, such as `remat`,
    have no effect: they have their defaults in these programs.

    Args:
        config: a resolved config.
        corpus: its data.
        warm: the parameters of another run that the run starts from, if any.
    """
    t = config.train
    plain = parameters.resolve(with_default_execution(config), config.model.vocab_size)
    program, values = split_config(plain)  # the config with seed 0
    program = with_values(program, values | {"learning_rate": 1.0})  # other hyperparameters become constants
    split = corpus.split("train")
    source = BatchSource(split, program)
    inputs, evaluation = source.train(0, 1), next(source.evaluation())
    init = jax.jit(functools.partial(init_state, program))
    state = jax.eval_shape(init, jnp.uint32(0))
    # Constants, because an unused one does not appear in the program's text.
    training = jax.jit(lambda state, resident, inputs, n: train_steps(state, resident, inputs, n, program))
    evaluating = jax.jit(lambda params, resident, inputs: eval_step(params, resident, inputs, program))
    found = hashlib.sha256()
    for lowered in (
        init.lower(jnp.uint32(0)),
        training.lower(state, source.resident, inputs, jnp.int32(1)),
        evaluating.lower(state.params, source.resident, evaluation),
    ):
        found.update(lowered.as_text().encode())
    some = np.unique(np.concatenate([np.arange(min(t.steps, 1000)), np.arange(max(0, t.steps - 1000), t.steps)]))
    found.update(np.ascontiguousarray(batches.window_starts(split, config, some), np.int64).tobytes())
    found.update(repr((t.seed, t.steps, corpus.fingerprint)).encode())
    if warm:
        found.update(warm.checksum().encode())
    return found.hexdigest()


def with_default_execution(config):
    """Return a config, or a section of one, in which every key marked `execution` in the schema has its default.

    >>> from lm.config import Config, ModelConfig
    >>> with_default_execution(Config(model=ModelConfig(d_model=8, scan_layers=True))).model == ModelConfig(d_model=8)
    True
    """
    changed = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changed[field.name] = with_default_execution(value)
        elif field.metadata["execution"]:
            changed[field.name] = field.default
    return dataclasses.replace(config, **changed)


def differing_keys(a: Config, b: Config) -> list[str]:
    """Return the dotted names of the keys in which two configs differ."""
    flat_a, flat_b = flatten(to_dict(a)), flatten(to_dict(b))
    return [key for key in flat_a if flat_a[key] != flat_b[key]]
