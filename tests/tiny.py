"""A small resolved config, for tests that change one thing in it, and parameters for it."""

import dataclasses
import math
import zlib

import jax.numpy as jnp
import numpy as np

from lm import parameters
from lm.config import Config, ModelConfig
from lm.step import TrainState, optimizer

MODEL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "vocab_size": 19}
TRAIN = {"steps": 20, "batch_size": 4, "seq_len": 8}


def tiny(**sections) -> Config:
    """The tiny config with keys changed by section: tiny(model={"norm": "layer"}, train={"seed": 3})."""
    sections = {"model": {}, "train": {}} | sections
    sections["model"] = MODEL | sections["model"]
    sections["train"] = TRAIN | sections["train"]
    config = Config()
    changed = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return parameters.resolve(dataclasses.replace(config, **changed), vocab_size=19)


def redrawn(c: ModelConfig, seed: int = 0) -> dict:
    """Parameters that are all random and none zero, gains and biases too; a path's values depend on nothing else."""

    def draw(path, p):
        x = np.random.default_rng([zlib.crc32(path.encode()), seed]).standard_normal(p.shape)
        stacked = p.axes.startswith("N")
        fan_in = math.prod(p.shape[stacked : stacked + p.n_in])  # 1 where there is no product
        return jnp.asarray((p.kind == "norm") + x * (0.3 if p.kind in ("norm", "bias") else fan_in**-0.5), jnp.float32)

    table = parameters.parameter_table(c)
    return parameters.nest({path: draw(path, p).astype(c.param_dtype) for path, p in table.items()})


def state_of(config: Config, params: dict | None = None) -> TrainState:
    """The state of step 0 with these parameters (redrawn ones if none), without compiling the initialization."""
    params = redrawn(config.model) if params is None else params
    counters = {"step": jnp.int32(0), "skipped": jnp.int32(0), "halted": jnp.bool_(False)}
    opt_state = optimizer(config).init(params)
    return TrainState(params=params, opt_state=opt_state, seed=jnp.uint32(config.train.seed), **counters)
