"""Optax chains and learning-rate schedules from the config."""

import jax
import jax.numpy as jnp
import optax

from lm import parameters
from lm.config import OptimizerConfig


def learning_rate_schedule(o: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of step 0, 1, ...: a linear warm-up to the peak, then the configured course.

    The warm-up ends, at the peak, at step `warmup_steps`; the decay ends, at final_fraction of the peak, at step
    `decay_steps` (`steps` if none), and the rate stays there. "wsd" (warm-up, stable, decay) holds the peak and decays
    linearly over the last decay_fraction of decay_steps (Hu et al. 2024, MiniCPM, with a linear decay).
    """
    peak = jnp.asarray(o.learning_rate, jnp.result_type(float))  # one precision, whether it is traced or not
    end = o.decay_steps or steps
    length = max(1, end - o.warmup_steps)
    if o.schedule == "constant":
        course = optax.constant_schedule(peak)
    elif o.schedule == "linear":
        course = optax.linear_schedule(peak, o.final_fraction * peak, length)
    elif o.schedule == "cosine":
        course = optax.cosine_decay_schedule(peak, length, o.final_fraction)
    else:
        decay = min(length, max(1, round(o.decay_fraction * end)))
        course = optax.linear_schedule(peak, o.final_fraction * peak, decay, transition_begin=length - decay)
    if o.warmup_steps == 0:
        return course
    # A rate of exactly 0 would waste the first step.
    warmup = optax.linear_schedule(peak / (o.warmup_steps + 1), peak, o.warmup_steps)
    return optax.join_schedules([warmup, course], [o.warmup_steps])


def decay_mask(o: OptimizerConfig, table: parameters.Table) -> dict:
    """Which parameters weight decay acts on, as nested dicts of bools."""
    decays = {
        "weight": True,
        "norm": o.decay_norms,
        "bias": o.decay_biases,
        "embedding": o.decay_embeddings,
    }
    return parameters.nest({path: decays[p.kind] for path, p in table.items()})


def muon_dimensions(table: parameters.Table) -> dict:
    """For each weight of a block the axes Muon treats as rows and columns; None for what is left to AdamW.

    A query projection (D, H, K) is one D x HK matrix; stacked layers are a batch of matrices, not one tensor. The head
    is left to AdamW, as are embeddings, gains and biases (Jordan et al. 2024).
    """
    dimensions = {}
    for path, p in table.items():
        if p.kind != "weight" or path.startswith("head/"):
            dimensions[path] = None
            continue
        first = int(p.axes.startswith("N"))
        rows = tuple(range(first, first + p.n_in))
        columns = tuple(range(first + p.n_in, len(p.shape)))
        dimensions[path] = optax.contrib.MuonDimensionNumbers(rows, columns)
    return parameters.nest(dimensions)


def _update_rule(o: OptimizerConfig, schedule: optax.Schedule, table: parameters.Table):
    """The update without clipping and weight decay, scaled by minus the learning rate."""
    if o.name == "adamw":
        return optax.adam(schedule, b1=o.b1, b2=o.b2, eps=o.eps)
    if o.name == "lion":
        return optax.lion(schedule, b1=o.b1, b2=o.b2, weight_decay=0.0)
    if o.name == "sgd":
        return optax.sgd(schedule, momentum=o.momentum or None, nesterov=o.nesterov and o.momentum > 0)
    ratio = 1.0 if o.adam_learning_rate is None else o.adam_learning_rate / o.learning_rate
    return optax.contrib.muon(
        schedule,
        beta=o.muon_beta,
        nesterov=o.nesterov,
        eps=o.eps,
        adam_b1=o.b1,
        adam_b2=o.b2,
        adam_learning_rate=lambda step: ratio * schedule(step),
        muon_weight_dimension_numbers=muon_dimensions(table),
    )


def width_scales(o: OptimizerConfig, table: parameters.Table, factor: float) -> dict:
    """muP's learning rate of each parameter over that of its base model (Yang et al. 2022, table 8), as nested dicts.

    Adam (and Lion, whose update has a size of its own as well): hidden weights 1/factor, all others 1. SGD: hidden
    weights 1, all others factor.
    """
    hidden = {path: p.kind == "weight" and not path.startswith("head/") for path, p in table.items()}
    if o.name == "sgd":
        return parameters.nest({path: 1.0 if h else factor for path, h in hidden.items()})
    return parameters.nest({path: 1 / factor if h else 1.0 for path, h in hidden.items()})


def make_optimizer(
    o: OptimizerConfig, steps: int, table: parameters.Table, factor: float = 1.0
) -> optax.GradientTransformation:
    """Clipping by the global norm, the update rule, and decoupled weight decay of learning rate times weight_decay.

    factor: parameters.width_factor of the model, which is not 1 under muP alone.

    One decay for all rules (Loshchilov and Hutter 2019, eq. 12 with the schedule's rate), masked by the kind of each
    parameter, so that rules can be compared with nothing else changed.
    """
    schedule = learning_rate_schedule(o, steps)
    chain = [] if o.clip_norm is None else [optax.clip_by_global_norm(o.clip_norm)]
    chain.append(_update_rule(o, schedule, table))
    if factor != 1:
        scales = width_scales(o, table, factor)
        chain.append(optax.stateless(lambda updates, _: jax.tree.map(lambda u, s: s * u, updates, scales)))
    if not (isinstance(o.weight_decay, float) and o.weight_decay == 0):  # it may be traced: see lm/sweeps/stacked.py
        chain.append(
            optax.add_decayed_weights(lambda step: -o.weight_decay * schedule(step), mask=decay_mask(o, table))
        )
    return optax.chain(*chain)
