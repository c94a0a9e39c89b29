"""The parameter table: shape, axes and initializer by path; initial values and counts.

This one declaration serves the model, the optimizer's masks, the printed table, the FLOP count and
the sharding rules.
"""

import dataclasses
import functools
import hashlib
import math

import jax
import jax.numpy as jnp

from lm import model
from lm.config import (
    Config,
    ModelConfig,
    Resolved,
    ResolvedModel,
    as_resolved,
    n_applied_layers,
    query_heads,
)
from lm.config import width_factor as width_factor
from lm.declarations import Parameter, Table, nest
from lm.declarations import flat as flat  # parameters.flat is the inverse of parameters.nest

# a parameter (or one layer of a stacked one) with at least this many elements is drawn sharded
LARGE = 2**20


def default_steps_per_dispatch(config: Config) -> int:
    """Return the default number of steps in a call of the training program.

    It takes about 20 GFLOPs, in 1 to 10 steps. Two calls may be under way when a signal comes, so
    that a CPU core answers it within about a second, or two steps. The number follows from the
    config alone, because all processes of a run must take the same calls. It does not change the
    result (tests/test_step.py).
    """
    t = config.train
    numbers = 0.0  # of the parameters, each as often as its layer is applied
    for p in parameter_table(config.model).values():
        layers = p.layers
        times = n_applied_layers(config.model, layers) / len(layers) if layers else 1
        numbers += p.size * times
    flops_per_step = round(6 * numbers) * t.batch_size * t.seq_len
    return 1 if t.debug else min(max(1, 20 * 10**9 // flops_per_step), 10)


def resolve(config: Config, vocab_size: int) -> Resolved:
    """Return the config with unset keys of its model and the steps per dispatch filled in.

    `vocab_size` is that of the tokenizer, used if config.model.vocab_size is not set.
    """
    resolved = resolve_model(config.model, vocab_size, config.train.seq_len)
    config = as_resolved(dataclasses.replace(config, model=resolved))
    steps_per_dispatch = config.train.steps_per_dispatch or default_steps_per_dispatch(config)
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps_per_dispatch=steps_per_dispatch)
    )


def resolve_model(
    c: ModelConfig, vocab_size: int | None = None, seq_len: int | None = None
) -> ModelConfig:
    """Return the model section with the unset keys filled in; keys that are set stay."""
    return dataclasses.replace(
        c,
        vocab_size=c.vocab_size or vocab_size,
        d_head=c.d_head or c.d_model // c.n_heads,
        n_kv_heads=c.n_kv_heads or c.n_heads,
        d_ff=c.d_ff or model.default_d_ff(c),
        max_positions=c.max_positions or seq_len,
    )


@functools.lru_cache(maxsize=64)
def parameter_table(c: ResolvedModel) -> Table:
    """Return every parameter of a resolved config, in the order of the computation.

    Nothing is allocated. Layers are always stacked, whether the model scans over them or not
    (lm/layer_stack.py takes them apart): a checkpoint fits both, and the optimizer's program does
    not grow with the depth. The result is shared: do not change it.
    """
    table = model.own_table(c, "model")
    for path, p in model.block_table(c).items():
        table[f"layers/{path}"] = p.stacked(range(c.n_layers) if p.layers is None else p.layers)
    if model.has_final_norm(c):
        table |= model.with_prefix("final_norm", model.norm_table(c))
    table |= model.head_table(c)
    _check_axes(table, c)
    return Table("the parameter table of the model", table)


def _check_axes(table: dict[str, Parameter], c: ResolvedModel) -> None:
    """Raise ValueError if a letter that sharding and muP read stands for another length."""
    lengths = {
        "D": {c.d_model},
        "V": {c.vocab_size},
        "F": {c.d_ff},
        "K": {c.d_head},
        "G": {c.n_kv_heads},
        "H": {c.n_heads, query_heads(c)},
    }
    for path, p in table.items():
        for letter, n in zip(p.axes, p.shape, strict=True):
            if n not in lengths.get(letter, {n}):
                known = " or ".join(map(str, sorted(lengths[letter])))
                raise ValueError(
                    f"{path}: an axis {letter} has {known} elements, but this one {n}; name it R "
                    "or C"
                )


def count(table: Table) -> int:
    """Return the number of parameters."""
    return sum(parameter.size for parameter in table.values())


DISTRIBUTIONS = {
    "normal": jax.random.normal,
    "truncated_normal": lambda key, shape: jax.random.truncated_normal(key, -3, 3, shape),
    "zeros": lambda key, shape: jnp.zeros(shape),
    "ones": lambda key, shape: jnp.ones(shape),
    # Mamba-2's: the logarithm of a rate in (1, 16), and x with softplus(x) log-uniform in (0.001,
    # 0.1).
    "log_of_uniform_1_16": lambda key, shape: jnp.log(
        jax.random.uniform(key, shape, minval=1.0, maxval=16.0)
    ),
    "inverse_softplus_of_step": lambda key, shape: jnp.log(
        jnp.expm1(
            jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(0.1)))
        )
    ),
}


def init_params(c: ResolvedModel, seed) -> dict:
    """Return initial values as nested dicts.

    Args:
        c: model section of a resolved config.
        seed: an integer or a traced uint32 scalar.
    """
    root = root_of_draw(c, jax.random.key(seed))
    return nest(
        {
            path: initial_value(root, path, p, c.param_dtype)
            for path, p in parameter_table(c).items()
        }
    )


def root_of_draw(c: ResolvedModel, key):
    """Return the key of all initial values: that of a seed, or one of its other draws."""
    return jax.random.fold_in(key, c.init_draw) if c.init_draw else key


def initial_value(root, path: str, p: Parameter, dtype):
    """Return the initial value of one parameter.

    Its key is fold_in(fold_in(root, hash of its path), layer), so its values depend neither on the
    other parameters nor on the depth.
    """
    key = jax.random.fold_in(
        root, int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little")
    )
    if p.layers is None:
        return _draw(jax.random.fold_in(key, 0), p).astype(dtype)
    # All layers of a parameter are drawn at once, and flat on one device: XLA's CPU compiler takes
    # about half a second for each draw, and three times that for one of three dimensions. The
    # values are the same.
    of_one_layer = p.of_one_layer()
    draw = jax.vmap(lambda layer: _draw(jax.random.fold_in(key, layer), of_one_layer))
    return draw(jnp.asarray(p.layers)).astype(dtype)


def _draw(key, p: Parameter):
    if p.init not in DISTRIBUTIONS:
        raise ValueError(
            f"Parameter: there is no init {p.init!r}; use one of {', '.join(DISTRIBUTIONS)}"
        )
    # A large parameter is drawn in its own shape if there are several devices: the partitioner
    # cannot shard a flat draw along a later axis, so each device would hold all of it.
    sharded = p.size >= LARGE and jax.sharding.get_abstract_mesh().auto_axes
    x = DISTRIBUTIONS[p.init](key, p.shape if sharded else (p.size,)).reshape(p.shape)
    return p.std * x if p.std else x
