"""The table of parameters: the shape, logical axes and initializer of each path; from it initial values and counts.

One declaration serves the model, the optimizer's masks, the printed table, the FLOP count and later the sharding.
Axes are named as in lm/layers/__init__.py: D, V, T, H, G, K, F, and N for stacked layers.
"""

import dataclasses
import hashlib
import math

import jax
import jax.numpy as jnp
from flax import traverse_util

from lm.config import Config, ModelConfig
from lm.layers.feed_forward import default_d_ff

LARGE = 2**20  # values of a parameter (of one layer) that are too many to be whole on each of several devices


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One declared parameter.

    shape and axes: lengths and one-letter names of its dimensions; for a stacked layer both begin with N.
    kind: "weight", "embedding", "norm" or "bias": what weight decay and Muon tell apart.
    n_in: how many of its dimensions a product with it contracts (they come first); 0 where there is no product.
    init: "normal", "truncated_normal" (cut at 3 std), "zeros" or "ones", with its std.
    """

    shape: tuple[int, ...]
    axes: str
    kind: str
    n_in: int = 0
    init: str = "zeros"
    std: float = 0.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def initializer(self) -> str:
        return f"{self.init}({self.std:.4g})" if self.std else self.init


Table = dict[str, Parameter]  # path -> Parameter


def resolve(config: Config, vocab_size: int) -> Config:
    """The config with everything in its model section filled in that may be left open (none)."""
    c = config.model
    model = dataclasses.replace(
        c,
        vocab_size=c.vocab_size or vocab_size,
        d_head=c.d_head or c.d_model // c.n_heads,
        n_kv_heads=c.n_kv_heads or c.n_heads,
        d_ff=c.d_ff or default_d_ff(c.d_model, c.ffn),
        max_positions=c.max_positions or config.train.seq_len,
    )
    return dataclasses.replace(config, model=model)


def width_factor(c: ModelConfig) -> float:
    """How many times as wide as its base a model under muP is; 1 under the standard parametrization.

    muP (Yang et al. 2022, arXiv:2203.03466, table 8) takes it that the widths of heads and of the feed-forward layer
    grow with d_model. Weights between hidden features keep a variance of 1/d_in; the head's does not follow the width,
    and its input is divided by this factor; lm/optimizers.py has the learning rates.
    """
    return c.d_model / c.mup_base_d_model if c.parametrization == "mup" else 1.0


def parameter_table(c: ModelConfig) -> Table:
    """Every parameter of a resolved config, in the order of the computation; allocates nothing.

    The layers of a model are always stacked, whether it scans over them or not (lm/model.py takes them apart): a state
    does not depend on how it is carried out, and an optimizer's program does not grow with the depth.
    """
    D, V = c.d_model, c.vocab_size
    embed_std = c.embed_std or (0.02 if c.init == "gpt2" else 1.0)
    table = {"embedding": Parameter((V, D), "VD", "embedding", init="normal", std=embed_std)}
    if c.positions == "learned":
        table["positions"] = Parameter((c.max_positions, D), "TD", "embedding", init="normal", std=embed_std)
    for path, p in block_table(c).items():
        table[f"layers/{path}"] = dataclasses.replace(p, shape=(c.n_layers, *p.shape), axes="N" + p.axes)
    if c.norm_placement in ("pre", "sandwich", "parallel"):
        table |= _under("final_norm", norm_table(c))
    if not c.tie_embeddings:
        base = dataclasses.replace(c, parametrization="standard")
        of_base = _weight(base, (round(D / width_factor(c)), V), "DV", 1)  # its variance does not follow the width
        table["head/w_DV"] = dataclasses.replace(of_base, shape=(D, V))
        if c.head_bias:
            table["head/b_V"] = Parameter((V,), "V", "bias")
    return table


def block_table(c: ModelConfig) -> Table:
    """The parameters of one block, without the layer's number."""
    norms = {
        "pre": ("attention_norm", "ffn_norm"),
        "post": ("attention_norm", "ffn_norm"),
        "sandwich": ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"),
        "parallel": ("norm",),
        "none": (),
    }[c.norm_placement]
    table = {}
    for name in norms:
        table |= _under(name, norm_table(c))
    return table | _under("attention", attention_table(c)) | _under("ffn", ffn_table(c))


def norm_table(c: ModelConfig) -> Table:
    table = {"scale_D": Parameter((c.d_model,), "D", "norm", init="ones")}
    if c.norm == "layer" and c.norm_bias:
        table["bias_D"] = Parameter((c.d_model,), "D", "bias")
    return table


def attention_table(c: ModelConfig) -> Table:
    D, H, G, K = c.d_model, c.n_heads, c.n_kv_heads, c.d_head
    table = {
        "w_q_DHK": _weight(c, (D, H, K), "DHK", 1),
        "w_k_DGK": _weight(c, (D, G, K), "DGK", 1),
        "w_v_DGK": _weight(c, (D, G, K), "DGK", 1),
        "w_o_HKD": _weight(c, (H, K, D), "HKD", 2, residual=True),
    }
    if c.attn_bias:
        table["b_q_HK"] = Parameter((H, K), "HK", "bias")
        table["b_k_GK"] = Parameter((G, K), "GK", "bias")
        table["b_v_GK"] = Parameter((G, K), "GK", "bias")
        table["b_o_D"] = Parameter((D,), "D", "bias")
    if c.qk_norm:
        table["q_scale_K"] = Parameter((K,), "K", "norm", init="ones")
        table["k_scale_K"] = Parameter((K,), "K", "norm", init="ones")
    return table


def ffn_table(c: ModelConfig) -> Table:
    D, F = c.d_model, c.d_ff
    inputs, output = {"mlp": (("in",), "out"), "glu": (("gate", "up"), "down")}[c.ffn]
    table = {f"w_{name}_DF": _weight(c, (D, F), "DF", 1) for name in inputs}
    table[f"w_{output}_FD"] = _weight(c, (F, D), "FD", 1, residual=True)
    if c.ffn_bias:
        table |= {f"b_{name}_F": Parameter((F,), "F", "bias") for name in inputs}
        table[f"b_{output}_D"] = Parameter((D,), "D", "bias")
    return table


def _weight(c: ModelConfig, shape, axes: str, n_in: int, residual: bool = False) -> Parameter:
    """A weight under the config's initialization; residual: it projects back into the residual stream.

    "glorot": N(0, 2/(d_in + d_out)) cut at 3 sigma (Glorot and Bengio 2010, cut as in Stanford's CS336).
    "he": N(0, 2/d_in) (He et al. 2015). "gpt2": N(0, 0.02^2), residual ones divided by sqrt(2N) (Radford et al. 2019).
    """
    d_in, d_out = math.prod(shape[:n_in]), math.prod(shape[n_in:])
    if residual and c.zero_init_residual:
        return Parameter(shape, axes, "weight", n_in)
    if c.init == "glorot":
        return Parameter(shape, axes, "weight", n_in, "truncated_normal", math.sqrt(2 / (d_in + d_out)))
    if c.init == "he":
        return Parameter(shape, axes, "weight", n_in, "normal", math.sqrt(2 / d_in))
    std = 0.02 / math.sqrt(2 * c.n_layers) if residual else 0.02
    std /= math.sqrt(width_factor(c))
    return Parameter(shape, axes, "weight", n_in, "normal", std)


def _under(prefix: str, table: Table) -> Table:
    return {f"{prefix}/{path}": parameter for path, parameter in table.items()}


def count(table: Table) -> int:
    """The number of parameters."""
    return sum(parameter.size for parameter in table.values())


def init_params(c: ModelConfig, seed) -> dict:
    """Initial values as nested dicts. seed: an integer or a traced uint32 scalar.

    The key of a parameter is fold_in(fold_in(seed, hash of its path), layer): its values do not depend on which other
    parameters exist, or on the depth.
    """
    # All layers of a parameter are drawn at once, and flat on one device: XLA's CPU compiler takes about half a second
    # for each draw, and three times that for one of three dimensions. The values are the same.
    root, layers_N, dtype = jax.random.key(seed), jnp.arange(c.n_layers), jnp.dtype(c.param_dtype)
    values = {}
    for path, p in parameter_table(c).items():
        key = jax.random.fold_in(root, _hash32(path))
        if p.axes.startswith("N"):
            each = dataclasses.replace(p, shape=p.shape[1:])
            values[path] = jax.vmap(lambda i, key=key, p=each: _draw(jax.random.fold_in(key, i), p))(layers_N)
        else:
            values[path] = _draw(jax.random.fold_in(key, 0), p)
        values[path] = values[path].astype(dtype)
    return nest(values)


def _draw(key, p: Parameter):
    # Over several devices a flat draw would be whole on each: the partitioner cannot cut it along a later axis.
    spread = p.size >= LARGE and jax.sharding.get_abstract_mesh().auto_axes
    shape = p.shape if spread else (p.size,)
    if p.init == "normal":
        return p.std * jax.random.normal(key, shape).reshape(p.shape)
    if p.init == "truncated_normal":
        return p.std * jax.random.truncated_normal(key, -3, 3, shape).reshape(p.shape)
    return jnp.full(p.shape, {"zeros": 0.0, "ones": 1.0}[p.init])


def _hash32(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def nest(flat: dict) -> dict:
    """{"a/b": x} as {"a": {"b": x}}."""
    return traverse_util.unflatten_dict(flat, sep="/")


def flat(nested: dict) -> dict:
    """{"a": {"b": x}} as {"a/b": x}."""
    return traverse_util.flatten_dict(nested, sep="/")


def stack_layers(params: dict) -> dict:
    """The inverse of unstack_layers: layers_0, layers_1, ... become one stack."""
    layers = sorted((name for name in params if name.startswith("layers_")), key=lambda name: int(name[7:]))
    others = {name: value for name, value in params.items() if name not in layers}
    return others | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in layers))}


def unstack_layers(params: dict) -> dict:
    """Parameters with the stack of layers taken apart into layers_0, layers_1, ..., as an unrolled model reads them."""
    others = {name: value for name, value in params.items() if name != "layers"}
    leaves, structure = jax.tree.flatten(params["layers"])
    layers = zip(*map(_rows, leaves), strict=True)
    return others | {f"layers_{i}": jax.tree.unflatten(structure, layer) for i, layer in enumerate(layers)}


@jax.custom_vjp
def _rows(x):
    return tuple(x[i] for i in range(len(x)))


# JAX's own derivative would add up as many padded arrays of the whole stack's size as it has rows.
_rows.defvjp(lambda x: (_rows(x), None), lambda _, rows: (jnp.stack(rows),))
