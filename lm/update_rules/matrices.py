"""Apply a rule of matrices to the weights between features, and Adam to all other parameters."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from lm import parameters
from lm.config import OptimizerConfig
from lm.declarations import Parameter, Table
from lm.parallel.mesh import traced_mesh
from lm.parallel.sharding import parameter_spec


class MatrixRule(NamedTuple):
    """An update rule of independent matrices w_NIO.

    Attributes:
        init: (w_NIO) -> state, a dict of arrays.
        update: (o, g_NIO, state, w_NIO, step) -> (change_NIO, state). o is the optimizer section of
            the config, g the gradient, and step a `Step`. The change is added to w.
        from_zeros: whether it can update matrices that start at 0.
    """

    init: Callable
    update: Callable
    from_zeros: bool = True

    def takes(self, p: Parameter) -> bool:
        """Return whether the rule updates a parameter, a matrix between features; Adam the rest."""
        return p.between_features and bool(p.contract) and (self.from_zeros or p.init != "zeros")


class Step(NamedTuple):
    """What a rule knows of a step.

    Attributes:
        rate: the learning rate.
        count: how many updates were made before it.
        whole: (f) -> f for matrices that are sharded, see `on_whole_matrices`.
    """

    rate: jax.Array
    count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
    whole: Callable = lambda f: f


class State(NamedTuple):
    """The state of a rule by its names and then the parameters' paths, and Adam's.

    An array with the size of its parameter is stored in the parameter's shape, and sharded like it;
    all others are replicated (lm/parallel/sharding.py).
    """

    count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
    matrices: dict
    adam: Any


def for_matrices(
    rule: MatrixRule, o: OptimizerConfig, schedule: optax.Schedule, table: Table, steps: int
) -> optax.GradientTransformation:
    """Return a rule of hidden matrices together with AdamW for all other parameters.

    A query projection (D, H, K) is one D x HK matrix, and stacked layers or experts are a batch of
    matrices. `schedule` is for the matrices; Adam's is the same times adam_learning_rate /
    learning_rate.
    """
    ratio = 1.0 if o.adam_learning_rate is None else o.adam_learning_rate / o.learning_rate

    def adam_rate(step):
        return ratio * schedule(step)

    adam = optax.adam(adam_rate, b1=o.b1, b2=o.b2, eps=o.eps)
    taken = {path: p for path, p in table.items() if rule.takes(p)}

    def others(tree: dict) -> dict:
        flat = parameters.flat(tree)
        return parameters.nest({path: x for path, x in flat.items() if path not in taken})

    def init(params):
        w = parameters.flat(params)
        states = {path: rule.init(as_matrices(p, w[path])) for path, p in taken.items()}
        return State(jnp.int32(0), _by_name(states, taken), adam.init(others(params)))

    def update(grads, state, params):
        g = parameters.flat(grads)
        w = parameters.flat(params)
        by_name = {name: parameters.flat(tree) for name, tree in state.matrices.items()}
        changes, adam_state = adam.update(others(grads), state.adam, others(params))
        changes = parameters.flat(changes)
        rate = schedule(state.count)
        states = {}
        for path, p in taken.items():
            own = {name: as_matrices(p, values[path]) for name, values in by_name.items()}
            step = Step(rate, state.count, functools.partial(on_whole_matrices, p))
            change, states[path] = rule.update(
                o, as_matrices(p, g[path]), own, as_matrices(p, w[path]), step
            )
            changes[path] = from_matrices(p, change)
        state = State(state.count + 1, _by_name(states, taken), adam_state)
        return parameters.nest(changes), state

    return optax.GradientTransformation(init, update)


def _by_name(states: dict[str, dict], table: dict[str, Parameter]) -> dict:
    """Return {name: nested parameters} of the states by path, in the parameters' shapes."""
    trees = {}
    for name in next(iter(states.values()), ()):  # all have the same names
        flat = {path: from_matrices(table[path], own[name]) for path, own in states.items()}
        trees[name] = parameters.nest(flat)
    return trees


def _axes(p: Parameter) -> tuple[int, ...]:
    """Return the axes of a parameter in the order of N, I and O."""
    sides = (*p.rows, *p.columns)
    batch = [i for i in range(len(p.shape)) if i not in sides]
    return (*batch, *sides)


def _sides(p: Parameter) -> tuple[int, ...]:
    """Return (I, O)."""
    n_in = math.prod(p.shape[i] for i in p.rows)
    n_out = math.prod(p.shape[i] for i in p.columns)
    return n_in, n_out


def as_matrices(p: Parameter, x):
    """Return an array with the size of a parameter as matrices x_NIO; any other array as it is."""
    if x.size != p.size:
        return x
    return x.transpose(_axes(p)).reshape(-1, *_sides(p))


def split_sides(p: Parameter, sizes: dict[str, int]) -> dict[int, str]:
    """Return {dimension 1 or 2 of x_NIO: the mesh axis that splits it}, no axes of one device."""
    side = {i: 1 for i in p.rows} | {i: 2 for i in p.columns}
    split = {}
    for i, axis in enumerate(parameter_spec(p, sizes)):
        if i in side and axis and sizes[axis] > 1:
            split[side[i]] = axis
    return dict(sorted(split.items()))


def on_whole_matrices(p: Parameter, f: Callable) -> Callable:
    """Return f computed on whole matrices, each by one of the devices that hold a part of it.

    The devices exchange parts of all matrices for some whole ones, and the results for the parts.
    Without that XLA would gather all matrices for each product of f. Without a sharding of the
    parameter p, the result is f itself.

    f maps trees of arrays (N, ...) and scalars to a tree of arrays (N, ...). Those with the shape
    of the matrices are sharded like p, all others replicated.
    """
    mesh = traced_mesh()
    split = {} if mesh is None else split_sides(p, dict(mesh.shape))
    if not split:
        return f
    parts = PartitionSpec(None, split.get(1), split.get(2))  # of all matrices
    some = PartitionSpec(tuple(split.values()))  # of the matrices, whole
    n_devices = math.prod(mesh.shape[axis] for axis in split.values())

    def join(x):
        for dimension, axis in split.items():
            x = jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=dimension, tiled=True)
        return x

    def divide(x):
        for dimension, axis in reversed(split.items()):
            x = jax.lax.all_to_all(x, axis, split_axis=dimension, concat_axis=0, tiled=True)
        return x

    def exchanged(x, exchange, before, after):
        if x.shape[1:] != _sides(p):  # replicated, such as a norm of each matrix
            return x
        return jax.shard_map(exchange, in_specs=before, out_specs=after, check_vma=False)(x)

    def mapped(*arrays):
        n = next(len(x) for x in jax.tree.leaves(arrays) if x.ndim)

        def whole(x):
            if x.ndim:  # as many matrices for each device
                x = jnp.pad(x, [(0, -n % n_devices), *[(0, 0)] * (x.ndim - 1)])
            return exchanged(x, join, parts, some)

        arrays = jax.tree.map(whole, arrays)
        specs = jax.tree.map(lambda x: some if x.ndim else PartitionSpec(), arrays)
        results = jax.shard_map(f, in_specs=specs, out_specs=some, check_vma=False)(*arrays)
        return jax.tree.map(lambda x: exchanged(x, divide, some, parts)[:n], results)

    return mapped


def norm(x_NIO):
    """Return the Frobenius norm of each matrix, at least float32 (N, 1, 1)."""
    x = x_NIO.astype(jnp.promote_types(x_NIO.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True))


def from_matrices(p: Parameter, x):
    """Return matrices x_NIO in the shape of their parameter; the inverse of `as_matrices`."""
    if x.size != p.size:
        return x
    axes = _axes(p)
    inverse = sorted(range(len(axes)), key=axes.__getitem__)
    return x.reshape([p.shape[i] for i in axes]).transpose(inverse)
