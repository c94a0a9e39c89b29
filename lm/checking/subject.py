"""The tiny model that is checked: the config's own equations with few features, layers and tokens."""

import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm import model, parameters
from lm.config import Config, ModelConfig, Resolved

T = 16  # tokens of a text
B = 4  # texts of a batch
V = T * T  # so that each token of T texts has a row of its own in the table of embeddings
MAX_LAYERS = 12
WINDOW = 5


def shrunk(config: Config) -> Resolved:
    """Return the config with few features, layers and tokens, and all ideas as they are."""
    m = config.model
    n_kv_heads = 2 if (m.n_kv_heads or m.n_heads) < m.n_heads else 4
    small: dict[str, Any] = {
        "d_model": 32,
        "n_layers": _n_layers(m),
        "n_heads": 4,
        "n_kv_heads": n_kv_heads,
        "d_head": 8,
        "d_ff": 48,
        "vocab_size": V,
        "window_pattern": tuple(WINDOW if window else 0 for window in m.window_pattern),
        "max_positions": None,
        "rope_original_max_positions": T // 2,
        "mup_base_d_model": 16,
        "mup_base_d_head": 4,
        "n_experts": 4,
        "experts_per_token": min(2, m.experts_per_token),
        "moe_first_layer": min(1, m.moe_first_layer),
        # how it is computed is a property
        "param_dtype": "float32",
        "compute_dtype": "float32",
        "scan_layers": False,
        "remat": "none",
        "attention": "auto",
        "dropout": 0.0,
    }
    if m.rope_width is not None:
        small["rope_width"] = 4
    if m.latent_width is not None:
        small["latent_width"] = 16
    if m.loop_layers is not None:
        small["loop_layers"] = (1, small["n_layers"] - 1)
    train: dict[str, Any] = {
        "batch_size": 8,
        "seq_len": T,
        "loss_chunk": 0,
        "micro_batch_size": None,
    }
    shrunk_config = dataclasses.replace(
        config,
        model=dataclasses.replace(m, **small),
        train=dataclasses.replace(config.train, **train),
        data=dataclasses.replace(config.data, packing="none"),
    )
    return parameters.resolve(shrunk_config, V)


def _n_layers(m: ModelConfig) -> int:
    """Return a number of layers that has each pattern whole, at least 4."""
    period = math.lcm(len(m.mixers), len(m.window_pattern), len(m.rope_pattern), 2)
    return min(MAX_LAYERS, period * max(1, -(-4 // period)))


def random_parameters(c: ModelConfig, seed: int = 0) -> dict:
    """Return parameters that are all random: what starts at 0 or 1 would hide what it multiplies."""

    def draw(path, p):
        x = np.random.default_rng([zlib.crc32(path.encode()), seed]).standard_normal(p.shape)
        std = 0.3 if p.kind in ("norm", "bias") else p.fan_in**-0.5
        if p.kind == "embedding":
            std = 1.0
        values = ((p.kind == "norm") + std * x).astype(np.float32)
        return jnp.asarray(values.astype(jnp.dtype(c.param_dtype)))  # compiles nothing

    table = parameters.parameter_table(c)
    return parameters.nest({path: draw(path, p) for path, p in table.items()})


@dataclasses.dataclass
class Subject:
    """A tiny model with random parameters, and what several properties compare with."""

    config: Resolved

    @property
    def c(self):
        return self.config.model

    @functools.cached_property
    def params(self) -> dict:
        return random_parameters(self.c)

    @functools.cached_property
    def tokens_BT(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)

    @functools.cached_property
    def segments_BT(self) -> np.ndarray:
        """Documents of 6, 1 and 7 tokens, and padding."""
        return np.tile(np.repeat([1, 2, 3, 0], [6, 1, 7, 2]), (B, 1)).astype(np.int32)

    @functools.cached_property
    def batch(self) -> dict:
        """One text for each of eight devices."""
        tokens = np.random.default_rng(1).integers(0, V, (8, T + 1)).astype(np.int32)
        return {"tokens": tokens}

    @functools.cached_property
    def hidden_BTD(self) -> np.ndarray:
        return self.hidden(self.c, self.tokens_BT)

    def hidden(self, c, tokens_BT, **inputs) -> np.ndarray:
        """Return the last hidden states of a variant of the model, compiled."""
        compiled = jax.jit(lambda params, tokens, rest: model.hidden(params, c, tokens, **rest))
        return np.asarray(compiled(self.params, tokens_BT, inputs).astype(jnp.float32))

    def changed(self, **keys):
        """Return the model section with other keys."""
        return dataclasses.replace(self.c, **keys)


def difference(a, b) -> float:
    """Return the largest difference of two trees, relative to the largest number of the first."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    arrays = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    size = max(float(np.abs(x).max(initial=0)) for x, _ in arrays)
    return max(float(np.abs(x - y).max(initial=0)) for x, y in arrays) / max(size, 1e-30)
