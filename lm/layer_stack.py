"""Repeat a block over the depth, unrolled or scanned, with rematerialization.

Layers may differ in their parameters. Each parameter is stored as one stack over the layers that
have it. So the same checkpoint fits unrolled and scanned models, and models that differ in an idea
share all other parameters. A scan runs over layers with equal parameters, or over the periods of a
pattern, such as an idea in every second layer. With config.model.loops some layers are applied
several times: `apply_layers` is called for each turn.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lm import ideas
from lm.config import ResolvedModel, applied_layers, layer_windows, looped_layers
from lm.declarations import Table, flat, nest
from lm.here import Here
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

    Windows of at least the length of the sequence would change nothing, and are dropped. `n_tokens`
    are on this device, at positions 0 .. T-1; None: at any positions.
    """
    limit = float("inf") if n_tokens is None else collectives.global_seq_len(n_tokens)
    return tuple(window if 0 < window < limit else None for window in layer_windows(c))


def apply_layers(block: Callable, params: dict, here: Here, table: Table, layers: range) -> None:
    """Apply these layers to `here.stream` and `here.memory`.

    Args:
        block: (parameters of a layer, here) -> (stream, memory). It gets a `here` with the number
            of the layer, and returns the names, shapes and dtypes of the stream that it got.
        params: parameters of the model that are split by `split_layers`.
        here: the environment of the model.
        table: model.block_table.
        layers: one of config.turns.

    Raises:
        TypeError: a block returns other names, shapes or dtypes.
    """
    shared = here.replace(stream=None, memory=None)
    stream, memory = here.stream, here.memory
    for first, period, n in groups(here.c, table):
        if first not in layers:
            continue
        scanned = n > 1
        prototypes = range(first, first + period)
        steps = [
            _rematerialized(functools.partial(_layer, block, prototype), here.c, scanned)
            for prototype in prototypes
        ]
        names = tuple(f"{layer_path(here.turn, prototype)}/" for prototype in prototypes)
        own = {name: memory.pop(name) for name in list(memory) if name.startswith(names)}
        members = params[f"layers_{first}"]
        if not scanned:
            stream, kept = steps[0](members, shared, stream, own, first)
        else:

            def of_period(stream, inputs, steps=steps):
                members, memory, layer = inputs
                kept = {}
                for i, step in enumerate(steps):
                    stream, of_layer = step(members[str(i)], shared, stream, memory, layer + i)
                    kept |= of_layer
                return stream, kept

            numbers = first + period * jnp.arange(n)
            stream, kept = jax.lax.scan(of_period, stream, (members, own, numbers))
        memory |= kept
    here.stream.update(stream)


def _layer(
    block: Callable, prototype: int, params: dict, here: Here, stream: dict, memory: dict, layer
):
    path = layer_path(here.turn, prototype)
    own = {name: x for name, x in memory.items() if name.startswith(f"{path}/")}
    here = here.replace(layer=layer, prototype=prototype, path=path)
    here = here.replace(stream=dict(stream), memory=own)
    with jax.named_scope(path):
        after, kept = block(params, here)
    return _checked(stream, after), kept


def layer_path(turn: int, layer: int) -> str:
    """Return the name of a layer, another one for each turn of a loop."""
    return f"turns/{turn}/layers/{layer}" if turn else f"layers/{layer}"


def _checked(before: dict, after: dict) -> dict:
    """Return the stream after a block, whose arrays must be of the kinds of those before it."""

    def kinds(stream):
        return {name: f"{jnp.result_type(x)}{list(jnp.shape(x))}" for name, x in stream.items()}

    old, new = kinds(before), kinds(after)
    if differ := sorted(name for name in old | new if old.get(name) != new.get(name)):
        name = differ[0]
        raise TypeError(
            f"a block turned {name!r} of the stream from {old.get(name, 'nothing')} into "
            f"{new.get(name, 'nothing')}: ideas return arrays of the shape and dtype they get "
            "(x.astype(...)), and start what they add in `carry`"
        )
    return after


def _rematerialized(step: Callable, c: ResolvedModel, scanned: bool) -> Callable:
    """Return the step with the policy of config.model.remat, which saves no gathered parameters."""
    if c.remat == "none" and not collectives.gathers_parameters():
        return step
    policy = REMAT_POLICIES[c.remat]
    if scanned:
        return jax.checkpoint(step, policy=policy, prevent_cse=False)
    return jax.checkpoint(step, policy=policy, static_argnums=4)  # the number of the layer


def groups(c: ResolvedModel, table: Table) -> tuple[tuple[int, int, int], ...]:
    """Return (first layer, period, number of periods) of the layers that each scan runs over.

    They are consecutive. A group of one period is unrolled. Without config.model.scan_layers all
    are. `table` is model.block_table.
    """
    n = c.n_layers
    if not c.scan_layers:
        return tuple((layer, 1, 1) for layer in range(n))
    subsets = {p.layers for p in table.values() if p.layers is not None}
    subsets |= ideas.subsets(c)
    subsets |= {looped_layers(c)}  # a scan ends where a loop begins or ends
    subsets -= {range(n)}
    if not subsets:
        return ((0, 1, n),)
    kinds = [tuple(layer in layers for layers in subsets) for layer in range(n)]
    spans = []
    first = 0
    while first < n:
        period, times = _longest_repetition(kinds[first:])
        spans.append((first, period, times))
        first += period * times
    return tuple(spans)


def _longest_repetition(kinds: list) -> tuple[int, int]:
    """Return the period and number of periods that cover most of the first kinds; (1, 1): none.

    >>> _longest_repetition(["a", "b", "a", "b", "a"])
    (2, 2)
    """
    best = 1, 1
    for period in range(1, len(kinds) // 2 + 1):
        times = _n_periods(kinds, period)
        longest = best[0] * best[1] if best[1] > 1 else 0
        if times > 1 and period * times > longest:
            best = period, times
    return best


def _n_periods(kinds: list, period: int) -> int:
    """Return how often the first kinds repeat.

    >>> _n_periods(["a", "b", "a", "b", "a"], 2)
    2
    """
    starts = range(0, len(kinds) - period + 1, period)
    differs = (
        i for i, start in enumerate(starts) if kinds[start : start + period] != kinds[:period]
    )
    return next(differs, len(starts))


def split_layers(params: dict, c: ResolvedModel, table: Table) -> dict:
    """Replace the stacks in "layers" by the parameters of each of `groups`, for `apply_layers`.

    Parameters that are already split are returned as they are. `table` is model.block_table.
    """
    if "layers" not in params:
        return params
    stacks = flat(params["layers"])
    split = {name: value for name, value in params.items() if name != "layers"}
    spans = groups(c, table)
    single = (
        {path: _rows(x) for path, x in stacks.items()} if any(n == 1 for _, _, n in spans) else {}
    )

    def member(layer: int, period: int, n: int) -> dict:
        """Return the parameters of n layers, a period apart; n = 1: of one, without an axis."""
        own = {}
        for path, x in stacks.items():
            layers = range(c.n_layers) if table[path].layers is None else table[path].layers
            if layer not in layers:
                continue
            row = layers.index(layer)
            if n == 1:
                own[path] = single[path][row]
            elif n == len(layers):
                own[path] = x
            else:
                step = layers.index(layer + period) - row
                own[path] = x[row : row + n * step : step]
        return nest(own)

    for first, period, n in spans:
        members = [member(layer, period, n) for layer in range(first, first + period)]
        split[f"layers_{first}"] = (
            members[0] if n == 1 else {str(i): own for i, own in enumerate(members)}
        )
    return split


def by_layer(memory: dict, c: ResolvedModel, table: Table) -> dict:
    """Return what layers keep by name: the values of all layers that have the name, stacked.

    Those of a looped layer are of its last turn.
    """
    by_name: dict[str, dict[int, jax.Array]] = {}
    applied = applied_layers(c)
    for turn, (first, period, n) in itertools.product(range(c.loops), groups(c, table)):
        if (turn, first) not in applied:
            continue
        for prototype in range(first, first + period):
            prefix = f"{layer_path(turn, prototype)}/"
            for path, x in memory.items():
                if path.startswith(prefix):
                    rows = [x] if n == 1 else _rows(x)
                    of_name = by_name.setdefault(path.removeprefix(prefix), {})
                    of_name.update({prototype + k * period: row for k, row in enumerate(rows)})
    return {
        name: jnp.stack([rows[layer] for layer in sorted(rows)]) for name, rows in by_name.items()
    }


@jax.custom_vjp
def _rows(x):
    return tuple(x[i] for i in range(len(x)))


# JAX's own derivative would sum one padded array of the full stack's size per row.
_rows.defvjp(lambda x: (_rows(x), None), lambda _, rows: (jnp.stack(rows),))
