"""The parameter table: shape, logical axes and initializer of each parameter by path; initial values and counts.

This one declaration serves the model, the optimizer's masks, the printed table, the FLOP count and the sharding rules.
"""

import dataclasses
import functools
import hashlib
import math

import jax
import jax.numpy as jnp

from lm.config import Config, Resolved, ResolvedModel, as_resolved
from lm.declarations import INITIALIZERS, Parameter, Table, bias, gain, nest, query_heads, weight, width_factor
from lm.declarations import flat as flat  # parameters.flat is the inverse of parameters.nest
from lm.layers import variants

LARGE = 2**20  # a parameter (or one layer of a stacked one) with at least this many elements is drawn sharded


def default_steps_per_dispatch(config: Config) -> int:
    """Return how many steps a call of the training program takes if the config does not say: about 20 GFLOPs, 1 to 10.

    Two calls may be under way when a signal comes, so that a CPU core answers it within about a second, or two steps.
    The number follows from the config alone, because all processes of a run must take the same calls. It does not
    change the result (tests/test_step.py).
    """
    t = config.train
    flops_per_step = 6 * count(parameter_table(config.model)) * t.batch_size * t.seq_len
    return 1 if t.debug else min(max(1, 20 * 10**9 // flops_per_step), 10)


def resolve(config: Config, vocab_size: int) -> Resolved:
    """Return the config with the unset keys of its model section, and the steps per dispatch, filled in.

    `vocab_size` is that of the tokenizer, used if config.model.vocab_size is not set.
    """
    c = config.model
    model = dataclasses.replace(
        c,
        vocab_size=c.vocab_size or vocab_size,
        d_head=c.d_head or c.d_model // c.n_heads,
        n_kv_heads=c.n_kv_heads or c.n_heads,
        d_ff=c.d_ff or variants.FEED_FORWARDS[c.ffn].default_d_ff(c.d_model),
        max_positions=c.max_positions or config.train.seq_len,
    )
    config = as_resolved(dataclasses.replace(config, model=model))
    steps_per_dispatch = config.train.steps_per_dispatch or default_steps_per_dispatch(config)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps_per_dispatch=steps_per_dispatch))


# The axes of the gains of queries and keys, by config.model.qk_norm_over. The mean of the norm is over the same axes.
QK_NORM_AXES = {"head": ("K", "K"), "all_heads": ("HK", "GK")}

# (where a block has norms, whether a final norm follows the last block), by config.model.norm_placement. Both branches
# of a block, attention and feed-forward, have the same norms:
NORM_PLACEMENTS = {
    "pre": (("input",), True),  # x + f(norm x) (Radford et al. 2019)
    "post": (("sum",), False),  # norm(x + f(x)) (Vaswani et al. 2017)
    "sandwich": (("input", "output"), True),  # x + norm(f(norm x)) (Ding et al. 2021)
    "output": (("output",), True),  # x + norm(f(x)) (OLMo et al. 2025, arXiv:2501.00656)
    "parallel": (("both inputs",), True),  # x + attention(norm x) + ffn(norm x) (Wang and Komatsuzaki 2021)
    "none": ((), False),  # x + f(x)
}
# The names of a branch's norm, by its place.
_NORM_NAMES = {"input": "{}_norm", "sum": "{}_norm", "output": "{}_post_norm", "both inputs": "norm"}


@functools.lru_cache(maxsize=64)
def parameter_table(c: ResolvedModel) -> Table:
    """Return every parameter of a resolved config, in the order of the computation. Allocates nothing.

    Layers are always stacked, whether the model scans over them or not (lm/layer_stack.py takes them apart): a
    checkpoint fits both, and the optimizer's program does not grow with the depth. The result is shared: do not change
    it.
    """
    D, V = c.d_model, c.vocab_size
    table = own_table(c, "model")
    for path, p in block_table(c).items():
        table[f"layers/{path}"] = p.stacked(range(c.n_layers) if p.layers is None else p.layers)
    if has_final_norm(c):
        table |= _with_prefix("final_norm", norm_table(c))
    if not c.tie_embeddings:
        # Under muP the variance is that of a head of the base width under the standard parametrization.
        base = dataclasses.replace(c, parametrization="standard")
        w = weight(base, (round(D / width_factor(c)), V), "DV")
        table["head/w_DV"] = dataclasses.replace(w, shape=(D, V))
        if c.head_bias:
            table["head/b_V"] = bias((V,), "V")
    heads = {c.n_heads, query_heads(c)}
    lengths = {"D": {D}, "V": {V}, "F": {c.d_ff}, "K": {c.d_head}, "G": {c.n_kv_heads}, "H": heads}
    for path, p in table.items():
        for letter, n in zip(p.axes, p.shape, strict=True):
            if n not in lengths.get(letter, {n}):
                known = " or ".join(map(str, sorted(lengths[letter])))
                raise ValueError(f"{path}: an axis {letter} has {known} elements, but this one {n}; name it R or C")
    return Table("the parameter table of the model", table)


def has_final_norm(c: ResolvedModel) -> bool:
    """Return whether a norm follows the last block."""
    return NORM_PLACEMENTS[c.norm_placement][1]


def block_table(c: ResolvedModel) -> Table:
    """Return the parameters of a block, without the axis of layers. `layers` of a parameter: only these have it."""
    places, _ = NORM_PLACEMENTS[c.norm_placement]
    table: dict[str, Parameter] = {}
    for branch in ("attention", "ffn"):
        for place in places:
            table |= _with_prefix(_NORM_NAMES[place].format(branch), norm_table(c))
    table |= own_table(c, "block")
    table |= _with_prefix("attention", attention_table(c)) | _with_prefix("ffn", ffn_table(c))
    return Table("the parameter table of a block", table)


def of_layer(table: dict, layer: int | None) -> dict:
    """Return the parameters that a layer has; None: those of all layers."""
    return {name: p for name, p in table.items() if None in (layer, p.layers) or layer in p.layers}


def norm_table(c: ResolvedModel) -> Table:
    """Return the parameters of a norm."""
    table = {"scale_D": gain((c.d_model,), "D")}
    if c.norm == "dyt":
        table["alpha"] = Parameter((), "", "scalar", init="ones", std=0.5)
    if c.norm == "dyt" or (c.norm == "layer" and c.norm_bias):
        table["bias_D"] = bias((c.d_model,), "D")
    return Table("the parameter table of a norm", table)


def attention_table(c: ResolvedModel, layer: int | None = None) -> Table:
    """Return the parameters of attention in a layer; None: in any layer."""
    D, H, G, K = c.d_model, query_heads(c), c.n_kv_heads, c.d_head
    table = {
        "w_q_DHK": weight(c, (D, H, K), "DHK"),
        "w_k_DGK": weight(c, (D, G, K), "DGK"),
        "w_v_DGK": weight(c, (D, G, K), "DGK"),
        "w_o_HKD": weight(c, (c.n_heads, K, D), "HKD", contract="HK", residual=True),
    }
    if c.attn_bias:
        table["b_q_HK"] = bias((H, K), "HK")
        table["b_k_GK"] = table["b_v_GK"] = bias((G, K), "GK")
    if c.attn_bias if c.attn_out_bias is None else c.attn_out_bias:
        table["b_o_D"] = bias((D,), "D")
    if c.qk_norm:
        for name, axes in zip("qk", QK_NORM_AXES[c.qk_norm_over], strict=True):
            table[f"{name}_scale_{axes}"] = gain({"K": (K,), "HK": (H, K), "GK": (G, K)}[axes], axes)
    table = _joined(table, variants.declared(c, "attention"))
    return Table("the parameter table of attention", of_layer(table, layer))


def ffn_table(c: ResolvedModel, layer: int | None = None) -> Table:
    """Return the parameters of the feed-forward layer in a layer; None: in any layer."""
    table: dict[str, Parameter] = {}
    for kind, layers in variants.feed_forwards(c):
        table = _joined(table, {name: dataclasses.replace(p, layers=layers) for name, p in kind.table(c).items()})
    return Table("the parameter table of the feed-forward layer", of_layer(table, layer))


def own_table(c: ResolvedModel, module: str, layer: int | None = None) -> Table:
    """Return the parameters that "model" or "block" has itself, not in a module within it."""
    table = {}
    if module == "model":
        embed_std = c.embed_std or INITIALIZERS[c.init][2]
        table["embedding"] = Parameter((c.vocab_size, c.d_model), "VD", "embedding", init="normal", std=embed_std)
        if c.tie_embeddings:  # the head multiplies with it
            table["embedding"] = dataclasses.replace(table["embedding"], contract="D")
        if c.positions == "learned":
            shape = c.max_positions, c.d_model
            table["positions"] = Parameter(shape, "TD", "embedding", init="normal", std=embed_std)
    table = _joined(table, variants.declared(c, module))
    return Table(f"the parameter table of the {module}", of_layer(table, layer))


def _joined(table: dict, more: dict) -> dict:
    """Return both, which belong to one module. Raises ValueError if they have a name in common."""
    if both := sorted(table.keys() & more.keys()):
        raise ValueError(f"{both[0]} is declared twice in one module of lm/model.py; rename one")
    return table | more


def _with_prefix(prefix: str, table: Table) -> dict[str, Parameter]:
    return {f"{prefix}/{path}": parameter for path, parameter in table.items()}


def count(table: Table) -> int:
    """Return the number of parameters."""
    return sum(parameter.size for parameter in table.values())


DISTRIBUTIONS = {
    "normal": jax.random.normal,
    "truncated_normal": lambda key, shape: jax.random.truncated_normal(key, -3, 3, shape),
    "zeros": lambda key, shape: jnp.zeros(shape),
    "ones": lambda key, shape: jnp.ones(shape),
    # Mamba-2's: the logarithm of a rate in (1, 16), and x with softplus(x) log-uniform in (0.001, 0.1).
    "log_of_uniform_1_16": lambda key, shape: jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0)),
    "inverse_softplus_of_step": lambda key, shape: jnp.log(
        jnp.expm1(jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(0.1))))
    ),
}


def init_params(c: ResolvedModel, seed) -> dict:
    """Return initial values as nested dicts.

    The key of a parameter is fold_in(fold_in(seed, hash of its path), layer), so its values depend neither on the other
    parameters nor on the depth.

    Args:
        c: model section of a resolved config.
        seed: an integer or a traced uint32 scalar.
    """
    # All layers of a parameter are drawn at once, and flat on one device: XLA's CPU compiler takes about half a second
    # for each draw, and three times that for one of three dimensions. The values are the same.
    root, dtype = jax.random.key(seed), jnp.dtype(c.param_dtype)
    values = {}
    for path, p in parameter_table(c).items():
        key = jax.random.fold_in(root, int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little"))
        if p.layers is not None:
            layer, layers_N = p.of_one_layer(), jnp.asarray(p.layers)
            values[path] = jax.vmap(lambda i, key=key, p=layer: _draw(jax.random.fold_in(key, i), p))(layers_N)
        else:
            values[path] = _draw(jax.random.fold_in(key, 0), p)
        values[path] = values[path].astype(dtype)
    return nest(values)


def _draw(key, p: Parameter):
    if p.init not in DISTRIBUTIONS:
        raise ValueError(f"Parameter: there is no init {p.init!r}; use one of {', '.join(DISTRIBUTIONS)}")
    # A large parameter is drawn in its own shape if there are several devices: the partitioner cannot shard a flat draw
    # along a later axis, so each device would hold all of it.
    sharded = p.size >= LARGE and jax.sharding.get_abstract_mesh().auto_axes
    x = DISTRIBUTIONS[p.init](key, p.shape if sharded else (p.size,)).reshape(p.shape)
    return p.std * x if p.std else x
