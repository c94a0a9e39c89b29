"""Apply an update rule of matrices to the weights between hidden features, and Adam to all other parameters."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm import parameters
from lm.config import OptimizerConfig
from lm.declarations import Parameter, Table


class MatrixRule(NamedTuple):
    """An update rule of independent matrices w_NIO.

    Attributes:
        init: (w_NIO) -> state, a dict of arrays.
        update: (o, g_NIO, state, w_NIO, step) -> (update_NIO, state). o is the optimizer section of the config, g the
            gradient, and step a `Step`.
        from_zeros: whether it can update matrices that start at 0.
    """

    init: Callable
    update: Callable
    from_zeros: bool = True

    def takes(self, p: Parameter) -> bool:
        """Return whether the rule updates a parameter: a matrix between features. Adam updates all others."""
        return p.hidden and bool(p.contract) and (self.from_zeros or p.init != "zeros")


class Step(NamedTuple):
    """What a rule knows of a step: the learning rate, and how many updates were made before it."""

    rate: jax.Array
    count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name


class State(NamedTuple):
    """The state of a rule by its names and then the parameters' paths, and Adam's.

    An array with the size of its parameter is stored in the parameter's shape, and sharded like it; all others are
    replicated (lm/parallel/sharding.py).
    """

    count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
    matrices: dict
    adam: Any


def for_matrices(
    rule: MatrixRule, o: OptimizerConfig, schedule: optax.Schedule, table: Table
) -> optax.GradientTransformation:
    """Return a rule of hidden matrices together with AdamW for embeddings, head, gains, biases and scalars.

    A query projection (D, H, K) is one D x HK matrix, and stacked layers or experts are a batch of matrices.

    Args:
        rule: the rule of matrices.
        o: optimizer section of the config.
        schedule: learning rate of the matrices by step. Adam's is the same times adam_learning_rate / learning_rate.
        table: the parameter table.
    """
    ratio = 1.0 if o.adam_learning_rate is None else o.adam_learning_rate / o.learning_rate
    adam = optax.adam(lambda step: ratio * schedule(step), b1=o.b1, b2=o.b2, eps=o.eps)
    hidden = {path: p for path, p in table.items() if rule.takes(p)}

    def others(tree: dict) -> dict:
        return parameters.nest({path: x for path, x in parameters.flat(tree).items() if path not in hidden})

    def init(params):
        w = parameters.flat(params)
        states = {path: rule.init(as_matrices(p, w[path])) for path, p in hidden.items()}
        return State(jnp.int32(0), _by_name(states, hidden), adam.init(others(params)))

    def update(grads, state, params):
        g, w = parameters.flat(grads), parameters.flat(params)
        by_name = {name: parameters.flat(tree) for name, tree in state.matrices.items()}
        changes, adam_state = adam.update(others(grads), state.adam, others(params))
        changes, states, step = parameters.flat(changes), {}, Step(schedule(state.count), state.count)
        for path, p in hidden.items():
            own = {name: as_matrices(p, values[path]) for name, values in by_name.items()}
            change, states[path] = rule.update(o, as_matrices(p, g[path]), own, as_matrices(p, w[path]), step)
            changes[path] = from_matrices(p, change)
        return parameters.nest(changes), State(state.count + 1, _by_name(states, hidden), adam_state)

    return optax.GradientTransformation(init, update)


def _by_name(states: dict[str, dict], hidden: dict[str, Parameter]) -> dict:
    """Return {name: nested parameters} of the states by path, in the parameters' shapes."""
    names = next(iter(states.values()), ())
    return {
        name: parameters.nest({path: from_matrices(hidden[path], own[name]) for path, own in states.items()})
        for name in names
    }


def _axes(p: Parameter) -> tuple[int, ...]:
    others = {*p.rows, *p.columns}
    return (*(i for i in range(len(p.shape)) if i not in others), *p.rows, *p.columns)


def as_matrices(p: Parameter, x):
    """Return an array with the size of a parameter as matrices x_NIO; any other array as it is."""
    if x.size != p.size:
        return x
    n_in, n_out = (math.prod(p.shape[i] for i in axes) for axes in (p.rows, p.columns))
    return x.transpose(_axes(p)).reshape(-1, n_in, n_out)


def norm(x_NIO):
    """Return the Frobenius norm of each matrix, at least float32 (N, 1, 1)."""
    x = x_NIO.astype(jnp.promote_types(x_NIO.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True))


def from_matrices(p: Parameter, x):
    """Return matrices x_NIO in the shape of their parameter; the inverse of `as_matrices`."""
    if x.size != p.size:
        return x
    axes = _axes(p)
    return x.reshape([p.shape[i] for i in axes]).transpose(sorted(range(len(axes)), key=axes.__getitem__))
