"""A tiny resolved config for tests, and random parameters and a train state for it."""

import dataclasses

import jax

from lm import parameters, step
from lm.checking.subject import random_parameters
from lm.config import Config, ModelConfig
from lm.step import TrainState

MODEL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "vocab_size": 19}
TRAIN = {"steps": 20, "batch_size": 4, "seq_len": 8}

# Compiled once per process for each config: tests that use these with equal configs and shapes
# share the programs. A test that patches what they call makes its own.
jit_step = jax.jit(step.train_step, static_argnames="config")
jit_gradients = jax.jit(step.losses_and_gradients, static_argnames="config")
jit_eval = jax.jit(step.eval_step, static_argnames="config")


def tiny(**sections) -> Config:
    """Return the tiny config with changed keys, by section: tiny(model={"norm": "layer"},
    train={"seed": 3}).
    """
    sections = {"model": {}, "train": {}} | sections
    sections["model"] = MODEL | sections["model"]
    sections["train"] = TRAIN | sections["train"]
    config = Config()
    changed = {
        name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()
    }
    return parameters.resolve(dataclasses.replace(config, **changed), vocab_size=19)


def redrawn(c: ModelConfig, seed: int = 0) -> dict:
    """Return random nonzero parameters, gains and biases included."""
    return random_parameters(c, seed)


def unstack_layers(params: dict) -> dict:
    """Return parameters with layers_0, layers_1, ... in place of the stack of layers, which are all
    equal.

    The arrays are those of NumPy: JAX would compile a slice for each shape.
    """
    params = jax.device_get(params)
    n = len(jax.tree.leaves(params["layers"])[0])
    others = {name: value for name, value in params.items() if name != "layers"}
    return others | {
        f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(n)
    }


def state_of(config: Config, params: dict | None = None) -> TrainState:
    """Return the state of step 0 with these parameters (None: `redrawn`), without compiling the
    initialization.
    """
    params = redrawn(config.model) if params is None else params
    return step.state_of_step_0(config, params, config.train.seed)


def with_keys(config, **changes):
    """Return a config with keys of sections replaced: with_keys(config, train_steps=5)."""
    for name, value in changes.items():
        section, key = name.split("_", 1)
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{key: value})}
        )
    return config
