"""Schedule-free AdamW: an average in place of a decay of the rate (arXiv:2405.15682).

Algorithm 1 of Defazio et al. 2024:

    y_t     = (1 - b1) z_t + b1 x_t                          gradients are taken at y
    z_{t+1} = z_t - r_t (g_t / (sqrt(v_t) + eps) + weight_decay y_t)
    x_{t+1} = (1 - c_t) x_t + c_t z_{t+1},                   c_t = r_t^2 / (r_1^2 + ... + r_t^2)

r_t is the rate of step t, which grows during the warm-up and is constant after it, and v_t Adam's
mean square without its bias. The parameters that are trained are y, and z is in the state. The
model is evaluated at x. In terms of the change u_t = z_{t+1} - z_t,

    y_{t+1} - y_t = c_t (z_t - y_t) + (1 - b1 (1 - c_t)) u_t.

optax.contrib.schedule_free weighs z_{t+1} by the rate of the next step instead.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm.config import OptimizerConfig


class State(NamedTuple):
    count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
    sum_of_weights: jax.Array
    z: dict
    steps: Any


def adam_without_momentum(
    o: OptimizerConfig, schedule: optax.Schedule, table, steps: int
) -> optax.GradientTransformation:
    """Return the changes of z, without weight decay."""
    rms = optax.scale_by_rms(decay=o.b2, eps=o.eps, eps_in_sqrt=False, bias_correction=True)
    return optax.chain(rms, optax.scale_by_learning_rate(schedule))


def schedule_free(
    steps: optax.GradientTransformationExtraArgs, schedule: optax.Schedule, b1: float
):
    """Return the changes of y, from those of z: `steps`, which include weight decay."""

    def init(y):
        z = jax.tree.map(jnp.copy, y)  # both are donated
        return State(jnp.int32(0), jnp.zeros_like(schedule(0)), z, steps.init(y))

    def update(grads, state, y, **extra):
        u, inner = steps.update(grads, state.steps, y, **extra)
        weight = schedule(state.count) ** 2
        total = state.sum_of_weights + weight
        c = weight / total

        def change(y, z, u):
            return c * (z - y) + (1 - b1 * (1 - c)) * u

        changes = jax.tree.map(change, y, state.z, u)
        z = jax.tree.map(jnp.add, state.z, u)
        return changes, State(state.count + 1, total, z, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def average(y, z, b1: float):
    """Return x of one parameter."""
    return (y - (1 - b1) * z) / b1
