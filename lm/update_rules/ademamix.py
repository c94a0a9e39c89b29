"""AdEMAMix: Adam with a second, slow average of the gradients (arXiv:2409.03137).

Algorithm 1 of Pagliardini et al. 2024. m and v are Adam's moments without their bias:

    s_t = b_t s_{t-1} + (1 - b_t) g_t
    x_t = x_{t-1} - r_t (m_t + a_t s_t) / (sqrt(v_t) + eps)

In the first slow_warmup_steps, a grows linearly from 0 to slow_weight, and the half-life of the
slow average, ln(1/2) / ln b, linearly from that of b1 to that of b3.
"""

import math

import jax.numpy as jnp
import optax

from lm.config import OptimizerConfig


def ademamix(o: OptimizerConfig, schedule: optax.Schedule, table, steps: int):
    """Return the updates, without weight decay."""
    warmup = max(1, o.slow_warmup_steps or steps)

    def fraction(count):  # of the warm-up; the first step has count 0
        return jnp.minimum((count + 1) / warmup, 1.0)

    def weight(count):
        return fraction(count) * o.slow_weight

    def b3(count):
        before = 1 / math.log(max(o.b1, 1e-8))  # b1 may be 0
        after = 1 / math.log(o.b3)
        return jnp.exp(1 / (before + fraction(count) * (after - before)))

    moments = optax.contrib.scale_by_ademamix(o.b1, o.b2, b3, weight, o.eps)
    return optax.chain(moments, optax.scale_by_learning_rate(schedule))
