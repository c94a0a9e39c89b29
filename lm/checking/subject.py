"""The tiny model that is checked: the config's own equations with few features, layers and tokens."""

import contextlib
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
from lm.layers.losses import head_logits

T = 16  # tokens of a text
B = 4  # texts of a batch
V = T * T  # so that each token of T texts has a row of its own in the table of embeddings
MAX_LAYERS = 12
WINDOW = 5
ROUNDING = 1e-4  # relative, of float32 results in another order
LARGE = 1000  # factor of weights
LONG = 96  # tokens of a text of several chunks


class Broken(Exception):
    """A property does not hold; the text says where.

    Attributes:
        where: the intermediate where it starts, or two dicts of intermediates, equal until there.
    """

    def __init__(self, text: str, where=None):
        super().__init__(text)
        self.where = where


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
        "max_positions": LONG,
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


def parameter_shapes(c: ModelConfig) -> dict:
    """Return the parameters of a model as shapes in float32, with which it is traced."""
    table = parameters.parameter_table(c)
    return parameters.nest(
        {path: jax.ShapeDtypeStruct(p.shape, jnp.float32) for path, p in table.items()}
    )


@dataclasses.dataclass
class Subject:
    """A tiny model with random parameters, and what several properties compare with."""

    original: Config  # which the user gave
    programs: dict = dataclasses.field(default_factory=dict)  # compiled, by the model section

    @functools.cached_property
    def config(self) -> Resolved:
        return shrunk(self.original)

    @property
    def c(self):
        return self.config.model

    @functools.cached_property
    def params(self) -> dict:
        return random_parameters(self.c)

    @functools.cached_property
    def large_params(self) -> dict:
        """The parameters with all weights that are not small times LARGE."""
        table = parameters.parameter_table(self.c)
        flat = parameters.flat(self.params)
        large = {path: x if table[path].small else LARGE * x for path, x in flat.items()}
        return parameters.nest(large)

    @functools.cached_property
    def tokens_BT(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)

    @functools.cached_property
    def segments_BT(self) -> np.ndarray:
        """Documents of 6, 1 and 7 tokens, and padding."""
        segments_T = np.repeat([1, 2, 3, 0], [6, 1, 7, 2])
        return np.tile(segments_T, (B, 1)).astype(np.int32)

    @property
    def packed(self) -> tuple:
        """Tokens of documents, the documents, and the positions in them."""
        return self.tokens_BT, self.segments_BT, positions_of(self.segments_BT)

    def observed(self, c, params, tap, **inputs):
        """Return the last hidden states of the packed texts, with the hook `tap`."""
        tokens_BT, segments_BT, positions_BT = self.packed
        inputs |= {"segments": segments_BT, "positions": positions_BT, "tap": tap}
        return model.hidden(params, c, tokens_BT, **inputs)

    @functools.cached_property
    def diagonal_grads(self) -> dict:
        """Derivatives by all parameters of the state of position i in row i.

        Each token of each row has its own row of the table of embeddings.
        """
        tokens_TT = np.arange(T * T).reshape(T, T)
        segments_TT = np.tile(self.segments_BT[:1], (T, 1))
        inputs = {"segments": segments_TT, "positions": positions_of(segments_TT)}

        def diagonal(params):
            h_TTD = model.hidden(params, self.c, tokens_TT, **inputs)
            rows = jnp.arange(T)
            return jnp.sum(jnp.sin(h_TTD[rows, rows]) @ (1.0 + jnp.arange(self.c.d_model)))

        return quickly(jax.grad(diagonal), self.params)

    def with_next(self) -> dict:
        """Return the packed texts as a batch, with one more token of padding."""
        pad = ((0, 0), (0, 1))
        return {"tokens": np.pad(self.tokens_BT, pad), "segments": np.pad(self.segments_BT, pad)}

    @functools.cached_property
    def batch(self) -> dict:
        """One text for each of eight devices: documents, padding, and tokens that are no targets."""
        draw = np.random.default_rng(1)
        shape = 8, T + 1
        segments = np.sort(draw.integers(1, 4, shape), axis=1)
        for row, n in zip(segments, (0, 3, 0, 8, 1, 0, 5, 2), strict=True):
            row[T + 1 - n :] = 0
        return {
            "tokens": draw.integers(0, V, shape).astype(np.int32),
            "segments": segments.astype(np.int32),
            "is_target": (draw.random(shape) < 0.8).astype(np.int32),
        }

    @functools.cached_property
    def hidden_BTD(self) -> np.ndarray:
        """Of texts without documents, as in generation."""
        return self.hidden(self.c, self.tokens_BT)

    @functools.cached_property
    def outputs(self) -> dict[str, np.ndarray]:
        """What `run` returns for the packed texts."""
        return self.run(self.c, self.params, *self.packed)

    def hidden(self, c, tokens_BT, **inputs) -> np.ndarray:
        """Return the last hidden states of a variant of the model, compiled."""
        compiled = jax.jit(lambda params, tokens, rest: model.hidden(params, c, tokens, **rest))
        return np.asarray(compiled(self.params, tokens_BT, inputs).astype(jnp.float32))

    def run(self, c, params, tokens_BT, segments_BT, positions_BT) -> dict[str, np.ndarray]:
        """Return all intermediates by name, in their order, and "hidden" and "logits"."""
        if c not in self.programs:
            names: list[str] = []
            self.programs[c] = jax.jit(functools.partial(_outputs, c, names)), names
        compiled, names = self.programs[c]
        outputs = compiled(params, tokens_BT, segments_BT, positions_BT)
        return {name: np.asarray(outputs[name], np.float32) for name in names}

    def changed(self, **keys):
        """Return the model section with other keys."""
        return dataclasses.replace(self.c, **keys)


def quickly(f, *arguments):
    """Compile a function without optimizations, and call it once."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(f).lower(*arguments).compile(options)(*arguments)


@contextlib.contextmanager
def replaced(table: dict, instead: dict):
    """Change entries of a dict for a while."""
    before = dict(table)
    table.update(instead)
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def _outputs(c, names: list[str], params, tokens_BT, segments_BT, positions_BT) -> dict:
    outputs = {}

    def tap(here, name, x):
        outputs[here.named(name)] = x
        return x

    inputs = {"segments": segments_BT, "positions": positions_BT, "tap": tap}
    outputs["hidden"] = model.hidden(params, c, tokens_BT, **inputs)
    outputs["logits"] = head_logits(outputs["hidden"], model.head(params, c))
    names[:] = outputs
    return outputs


def positions_of(segments_BT) -> np.ndarray:
    """Return positions that start at 0 in each document.

    >>> positions_of(np.array([[1, 1, 2, 2, 2, 0]]))
    array([[0, 1, 0, 1, 2, 0]], dtype=int32)
    """
    positions = np.zeros(segments_BT.shape, np.int32)
    for t in range(1, segments_BT.shape[1]):
        same = segments_BT[:, t] == segments_BT[:, t - 1]
        positions[:, t] = np.where(same, positions[:, t - 1] + 1, 0)
    return positions


def difference(a, b) -> float:
    """Return the largest difference of two trees, relative to the largest number of the first."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    arrays = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    size = max(float(np.abs(x).max(initial=0)) for x, _ in arrays)
    error = max(float(np.abs(x - y).max(initial=0)) for x, y in arrays)
    return error / max(size, 1e-30)


def equal(a, b, what: str, limit: float = ROUNDING) -> float:
    """Return the relative difference; raises Broken if it is more than the limit, or not a number."""
    error = difference(a, b)
    if not error <= limit:
        raise Broken(f"{what} differ by {error:.2g} of the largest number (limit {limit:.0e})")
    return error
