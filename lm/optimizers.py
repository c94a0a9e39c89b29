"""Learning-rate schedules and Optax chains from the config."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lm import parameters
from lm.config import OptimizerConfig
from lm.system.errors import UserError
from lm.update_rules.ademamix import ademamix
from lm.update_rules.matrices import for_matrices
from lm.update_rules.muon import MUON
from lm.update_rules.muon_hyperball import MUON_HYPERBALL
from lm.update_rules.normuon import NORMUON
from lm.update_rules.schedule_free import adam_without_momentum, average, schedule_free
from lm.update_rules.soap import SOAP


def _wsd(o: OptimizerConfig, peak, end: int, length: int):
    decay = min(length, max(1, round(o.decay_fraction * end)))
    return optax.linear_schedule(
        peak, o.final_fraction * peak, decay, transition_begin=length - decay
    )


# After the warm-up: (config, peak, last step of the decay, steps between the warm-up and that step)
# -> schedule.
SCHEDULES = {
    "constant": lambda o, peak, end, length: optax.constant_schedule(peak),
    "linear": lambda o, peak, end, length: optax.linear_schedule(
        peak, o.final_fraction * peak, length
    ),
    "cosine": lambda o, peak, end, length: optax.cosine_decay_schedule(
        peak, length, o.final_fraction
    ),
    "wsd": _wsd,
}


def learning_rate_schedule(o: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by step: a linear warm-up to the peak, then the config's schedule.

    The warm-up ends at step `warmup_steps`, at the peak. The decay ends at step `decay_steps`
    (None: `steps`), at final_fraction of the peak, and the rate stays there. "wsd" (warm-up,
    stable, decay; Hu et al. 2024, MiniCPM) stays at the peak before the last decay_fraction of
    decay_steps, where it decays linearly.

    >>> schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=1), 11)
    >>> [round(float(schedule(step)), 4) for step in (0, 1, 6, 11, 20)]
    [0.5, 1.0, 0.55, 0.1, 0.1]
    """
    peak = jnp.asarray(o.learning_rate, jnp.result_type(float))  # the same precision, traced or not
    end = o.decay_steps or steps
    after_warmup = SCHEDULES[o.schedule](o, peak, end, max(1, end - o.warmup_steps))
    if o.warmup_steps == 0:
        return after_warmup
    # The first rate is not 0, which would waste a step.
    warmup = optax.linear_schedule(peak / (o.warmup_steps + 1), peak, o.warmup_steps)
    return optax.join_schedules([warmup, after_warmup], [o.warmup_steps])


def decay_mask(o: OptimizerConfig, table: parameters.Table) -> dict:
    """Return which parameters have weight decay, as nested dicts of bools."""
    decays = {
        "weight": True,
        "norm": o.decay_norms,
        "bias": o.decay_biases,
        "embedding": o.decay_embeddings,
    }
    on_sphere = MUON_HYPERBALL.takes if o.name == "muonh" else lambda p: False
    return parameters.nest(
        {path: decays[p.kind] and p.decay and not on_sphere(p) for path, p in table.items()}
    )


def cautious(decay: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a weight decay that applies only where the update does not increase |x|.

    x <- x - rate (u + weight_decay 1[u x >= 0] x) (Chen et al. 2025, arXiv:2510.12402); updates are
    -rate u.
    """

    def update(updates, state, params):
        decays, state = decay.update(jax.tree.map(jnp.zeros_like, updates), state, params)
        add = lambda u, d, x: u + jnp.where(u * x <= 0, d, 0)  # noqa: E731
        return jax.tree.map(add, updates, decays, params), state

    return optax.GradientTransformation(decay.init, update)


def _adam(o: OptimizerConfig, schedule: optax.Schedule, table: parameters.Table, steps: int):
    return optax.adam(schedule, b1=o.b1, b2=o.b2, eps=o.eps)


def _lion(o: OptimizerConfig, schedule: optax.Schedule, table: parameters.Table, steps: int):
    return optax.lion(schedule, b1=o.b1, b2=o.b2, weight_decay=0.0)


def _sgd(o: OptimizerConfig, schedule: optax.Schedule, table: parameters.Table, steps: int):
    return optax.sgd(schedule, momentum=o.momentum or None, nesterov=o.nesterov and o.momentum > 0)


MATRIX_RULES = {"muon": MUON, "normuon": NORMUON, "muonh": MUON_HYPERBALL, "soap": SOAP}

# (config, schedule, parameter table, steps of the training) -> updates without clipping and weight
# decay, scaled by minus the learning rate. They receive the loss as `value`.
UPDATE_RULES: dict[str, Callable] = {
    "adamw": _adam,
    "sgd": _sgd,
    "lion": _lion,
    "ademamix": ademamix,
    "schedule_free": adam_without_momentum,  # make_optimizer averages its steps
} | {name: functools.partial(for_matrices, rule) for name, rule in MATRIX_RULES.items()}


# muP's learning rates over those of the base model, by the factor of the width: (hidden weights,
# all others). Rules whose updates do not scale with the gradient follow Adam's column of the table.
# An orthogonalized update has the spectral norm that muP requires at any width (Yang et al. 2023,
# arXiv:2310.17813, condition 1).
WIDTH_SCALES = {
    "adamw": lambda factor: (1 / factor, 1.0),
    "lion": lambda factor: (1 / factor, 1.0),
    "ademamix": lambda factor: (1 / factor, 1.0),
    "muon": lambda factor: (1.0, 1.0),
    "normuon": lambda factor: (factor**-0.5, 1.0),  # the root mean square of an update is fixed
    "muonh": lambda factor: (1.0, 1.0),
    "sgd": lambda factor: (1.0, factor),
    "schedule_free": lambda factor: (1 / factor, 1.0),
}
WIDTHS = set("DHGKF")  # axes that grow with the width
FEATURES = set("DKF")  # those of them that count features, not heads


def width_scales(o: OptimizerConfig, table: parameters.Table, factor: float) -> dict:
    """Return muP's factor of each parameter's learning rate (Yang et al. 2022, table 8).

    The result is nested dicts. Parameters without an axis that grows, such as the bias of the head
    and scalars, keep their rate. Weights that sum over none, such as the second factor of a
    low-rank product, have that of embeddings. Matrices that a rule leaves to Adam have Adam's
    factor. `factor` is config.width_factor of the model.

    Raises:
        UserError: the rule has no rates, or none for a weight with few outputs, such as one for
            each head or expert. Only Adam's rate is the same for these and for other hidden
            weights.
    """
    advice = "use adamw, or --config.model.parametrization=standard"
    if o.name not in WIDTH_SCALES:
        raise UserError(
            f"config.optimizer.name: {o.name}, but muP here has no rates for it; {advice}"
        )
    rule, adam = MATRIX_RULES.get(o.name), WIDTH_SCALES["adamw"](factor)

    def scale(path, p) -> float:
        hidden, others = adam if rule and not rule.takes(p) else WIDTH_SCALES[o.name](factor)
        sums_width = p.between_features and WIDTHS & {p.axes[i] for i in p.rows}
        if sums_width and hidden != adam[0] and not FEATURES & {p.axes[i] for i in p.columns}:
            raise UserError(
                f"config.optimizer.name: {o.name}, but muP here has no rate of {o.name} for "
                f"{path}, which has few outputs; {advice}"
            )
        return hidden if sums_width else others if WIDTHS & {*p.axes} else 1.0

    return parameters.nest({path: scale(path, p) for path, p in table.items()})


def make_optimizer(
    o: OptimizerConfig, steps: int, table: parameters.Table, factor: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer: clipping by the global norm, update rule, decoupled weight decay.

    All rules share one decay, by learning rate times weight_decay (Loshchilov and Hutter 2019, eq.
    12). It is masked by the kind of each parameter. So rules are compared with nothing else
    changed.

    Args:
        o, steps: the section config.optimizer, and config.train.steps.
        table: the parameter table.
        factor: config.width_factor of the model; 1 except under muP.
    """
    schedule = learning_rate_schedule(o, steps)
    clip = [] if o.clip_norm is None else [optax.clip_by_global_norm(o.clip_norm)]
    chain = [UPDATE_RULES[o.name](o, schedule, table, steps)]
    if factor != 1:
        scales = width_scales(o, table, factor)
        chain.append(
            optax.stateless(lambda updates, _: jax.tree.map(lambda u, s: s * u, updates, scales))
        )
    if not (
        isinstance(o.weight_decay, float) and o.weight_decay == 0
    ):  # traced in lm/sweeps/stacked.py
        decay = optax.add_decayed_weights(
            lambda step: -o.weight_decay * schedule(step), mask=decay_mask(o, table)
        )
        chain.append(cautious(decay) if o.cautious_decay else decay)
    if o.name == "schedule_free":
        chain = [schedule_free(optax.chain(*chain), schedule, o.b1)]
    return optax.chain(*clip, *chain)


def averaged(params: dict, opt_state, o: OptimizerConfig) -> dict:
    """Return the parameters to evaluate, keep and sample: the trained ones, or a rule's average."""
    if o.name != "schedule_free":
        return params
    return jax.tree.map(lambda y, z: average(y, z, o.b1), params, optax.tree.get(opt_state, "z"))
