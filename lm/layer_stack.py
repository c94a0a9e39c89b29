"""Repeat a block over the depth: unrolled or scanned, with rematerialization, over stacked parameters.

Layers may differ in their parameters. Each parameter is stored as one stack over the layers that have it, so the same
checkpoint fits unrolled and scanned models, and models that differ in an idea share all other parameters. A scan runs
over layers with equal parameters, or over the periods of a pattern, such as an idea in every second layer.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from lm import parameters
from lm.config import ResolvedModel, layer_windows
from lm.layers import variants
from lm.layers.linear import PRODUCT
from lm.parallel import collectives

# What jax.checkpoint saves for the backward pass, by config.model.remat; all else is recomputed.
REMAT_POLICIES = {
    "none": collectives.save_all_but_gathered,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(PRODUCT),
    ),
    "block": jax.checkpoint_policies.nothing_saveable,
}


def windows(c: ResolvedModel, n_tokens: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer, None without one.

    Windows of at least the length of the sequence would change nothing, and are dropped. `n_tokens` are on this device,
    at positions 0 .. T-1; None: at any positions.
    """
    limit = float("inf") if n_tokens is None else collectives.global_seq_len(n_tokens)
    return tuple(window if 0 < window < limit else None for window in layer_windows(c))


def apply_layers(block: type[nn.Module], c: ResolvedModel, stream: dict, context) -> dict:
    """Apply n_layers blocks to the stream, inside a compact method of a Linen module.

    The stream has arrays (B, T, ...) by name. A block is called as block(c, like)(stream, context, layer), and returns
    the same names, shapes and dtypes.

    Raises:
        TypeError: a block returns other names, shapes or dtypes.
    """
    for first, period, n in groups(c):
        if n == 1:
            module = _rematerialize(block, c, static_layer=True)(c, first, name=f"layers_{first}")
            stream = _like(stream, module(stream, context, first))
        else:
            scan = nn.scan(
                lambda module, stream, layer: (module(stream, context, layer), None),
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={},
                length=n,
            )
            repeated = _Period(block, c, first, period, name=f"layers_{first}")
            stream, _ = scan(repeated, stream, first + period * jnp.arange(n))
    return stream


class _Period(nn.Module):
    """The consecutive layers of one period of a pattern."""

    block: type[nn.Module]
    config: ResolvedModel
    first: int
    period: int

    @nn.compact
    def __call__(self, stream, context, layer):
        block = _rematerialize(self.block, self.config, static_layer=False)
        for i in range(self.period):
            module = block(self.config, self.first + i, name=str(i))
            stream = _like(stream, module(stream, context, layer + i))
        return stream


def _like(before: dict, after: dict) -> dict:
    """Return the stream after a block, whose arrays must be like those before it."""

    def kinds(stream):
        return {name: f"{jnp.result_type(x)}{list(jnp.shape(x))}" for name, x in stream.items()}

    old, new = kinds(before), kinds(after)
    if differ := sorted(name for name in old | new if old.get(name) != new.get(name)):
        name = differ[0]
        raise TypeError(
            f"a block turned {name!r} of the stream from {old.get(name, 'nothing')} into {new.get(name, 'nothing')}: "
            "ideas return arrays of the shape and dtype they get (x.astype(...)), and start what they add in `carry`"
        )
    return after


def _rematerialize(block, c, static_layer):
    """Return the block with the checkpoint policy of config.model.remat. Gathered parameters are never saved."""
    if c.remat == "none" and not collectives.gathers_parameters():
        return block
    static = (3,) if static_layer else ()  # the layer's place among the arguments of block.__call__, self included
    return nn.remat(block, policy=REMAT_POLICIES[c.remat], prevent_cse=static_layer, static_argnums=static)


@functools.lru_cache(maxsize=64)
def groups(c: ResolvedModel) -> tuple[tuple[int, int, int], ...]:
    """Return (first layer, period, number of periods) of each group of consecutive layers that one scan runs over.

    A group of one period is unrolled. Without config.model.scan_layers all are.
    """
    n, found, first = c.n_layers, [], 0
    if not c.scan_layers:
        return tuple((layer, 1, 1) for layer in range(n))
    subsets = {p.layers for p in parameters.block_table(c).values() if p.layers is not None}
    subsets |= {variants.layers_of(idea, c) for module in ("block", "attention") for idea in variants.active(c, module)}
    subsets -= {range(n)}
    if not subsets:
        return ((0, 1, n),)
    kinds = [tuple(layer in layers for layers in subsets) for layer in range(n)]
    while first < n:
        lengths = {period: _n_periods(kinds[first:], period) for period in range(1, (n - first) // 2 + 1)}
        period = max(lengths, key=lambda period: (lengths[period] > 1) * lengths[period] * period, default=1)
        times = lengths.get(period, 1)
        found.append((first, period, times) if times > 1 else (first, 1, 1))
        first += period * times if times > 1 else 1
    return tuple(found)


def _n_periods(kinds: list, period: int) -> int:
    """Return how often the first kinds repeat.

    >>> _n_periods(["a", "b", "a", "b", "a"], 2)
    2
    """
    starts = range(0, len(kinds) - period + 1, period)
    differs = (i for i, start in enumerate(starts) if kinds[start : start + period] != kinds[:period])
    return next(differs, len(starts))


def split_layers(params: dict, c: ResolvedModel) -> dict:
    """Replace the stacks in "layers" by the parameters of each group of layers, which the model reads.

    Parameters that are already split are returned as they are.
    """
    if "layers" not in params:
        return params
    table, stacks = parameters.block_table(c), parameters.flat(params["layers"])
    split = {name: value for name, value in params.items() if name != "layers"}
    single = {path: _rows(x) for path, x in stacks.items()} if any(n == 1 for _, _, n in groups(c)) else {}
    for first, period, n in groups(c):
        members = []
        for layer in range(first, first + period):
            member = {}
            for path, x in stacks.items():
                layers = range(c.n_layers) if table[path].layers is None else table[path].layers
                if layer in layers:
                    row = layers.index(layer)
                    step = layers.index(layer + period) - row if n > 1 else 1
                    whole = n == len(layers)
                    member[path] = single[path][row] if n == 1 else x if whole else x[row : row + n * step : step]
            members.append(parameters.nest(member))
        split[f"layers_{first}"] = members[0] if n == 1 else {str(i): member for i, member in enumerate(members)}
    return split


def merge_layers(tree: dict, c: ResolvedModel) -> dict:
    """Stack arrays of the model's modules by layer. The inverse of `split_layers`, also for what modules sow."""
    merged = {name: value for name, value in tree.items() if not name.startswith("layers_")}
    found: dict[tuple, dict[int, Any]] = {}  # by path, the array of each layer
    for first, period, n in groups(c):
        for i in range(period):
            member = tree[f"layers_{first}"] if n == 1 else tree[f"layers_{first}"][str(i)]
            for path, x in traverse_util.flatten_dict(member).items():
                arrays = [x] if n == 1 else _rows(x)
                found.setdefault(path, {}).update({first + i + k * period: arrays[k] for k in range(n)})
    stacks = {path: jnp.stack([by_layer[i] for i in sorted(by_layer)]) for path, by_layer in found.items()}
    return merged | {"layers": traverse_util.unflatten_dict(stacks)}


@jax.custom_vjp
def _rows(x):
    return tuple(x[i] for i in range(len(x)))


# JAX's own derivative would sum one padded array of the full stack's size per row.
_rows.defvjp(lambda x: (_rows(x), None), lambda _, rows: (jnp.stack(rows),))
