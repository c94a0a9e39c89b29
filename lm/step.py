"""One optimizer step as a pure function, (state, batch) -> (state, metrics); evaluation likewise.

The config is a static argument: `jax.jit(train_step, static_argnames="config")`. It must be
resolved (see parameters.resolve). A batch is a dict of arrays:

    tokens    (B, T+1) integers: inputs are [:, :-1], targets [:, 1:]
    segments  (B, T+1), optional: document numbers of packed rows, 0 for padding
    is_target (B, T+1), optional: 1 for tokens that count as targets, 0 for others
    weights   (B, T), optional: weights of the targets, 1 if absent
"""

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from lm import ideas, model, parameters, spikes
from lm.config import Resolved, ResolvedModel, width_factor
from lm.config.values import divisors
from lm.data.batches import gather
from lm.ideas import masked_diffusion
from lm.layers import losses
from lm.optimizers import averaged, learning_rate_schedule, make_optimizer
from lm.parallel import collectives

# These separate the keys of dropout and of masked diffusion from those of the initial values, which
# use the same seed.
_DROPOUT = 0x64726F70
_NOISE = 0x6E6F6973


class TrainState(flax.struct.PyTreeNode):
    """Everything that changes during training; all else is a function of it and the config."""

    step: jax.Array  # int32: number of steps taken, and the index of the next batch
    params: dict
    opt_state: Any
    seed: jax.Array  # uint32
    skipped: jax.Array  # int32: updates rejected by on_nonfinite = "skip" or on_spike = "skip"
    # bool: an update was not finite (on_nonfinite = "stop"), so no later update is applied
    halted: jax.Array
    # with config.train.ema: the average of the parameters, at least float32
    ema: dict | None = None
    # with config.train.on_spike: losses and gradient norms of the last steps
    recent: jax.Array | None = None


def optimizer(config: Resolved) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a resolved config."""
    c = config.model
    return make_optimizer(
        config.optimizer, config.train.steps, parameters.parameter_table(c), width_factor(c)
    )


def init_state(config: Resolved, seed) -> TrainState:
    """Return the state of step 0. seed: an integer or a traced uint32 scalar."""
    return state_of_step_0(config, parameters.init_params(config.model, seed), seed)


def state_of_step_0(config: Resolved, params: dict, seed) -> TrainState:
    """Return the state of step 0 with these parameters."""
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=optimizer(config).init(params),
        seed=jnp.uint32(seed),
        skipped=jnp.int32(0),
        halted=jnp.bool_(False),
    )
    if config.train.ema is not None:
        ema = jax.tree.map(lambda p: p.astype(jnp.promote_types(p.dtype, jnp.float32)), params)
        state = state.replace(ema=ema)
    if config.train.on_spike != "none":
        state = state.replace(recent=spikes.empty_window())
    return state


def evaluated_params(state: TrainState, config: Resolved) -> dict:
    """Return the parameters to evaluate and to sample from; some update rules average."""
    return averaged(state.params, state.opt_state, config.optimizer)


def ema_params(state: TrainState) -> dict:
    """Return the average of config.train.ema in the dtype of the parameters."""
    return jax.tree.map(lambda a, p: a.astype(p.dtype), state.ema, state.params)


def _next_ema(ema: dict, params: dict, n, decay: float) -> dict:
    """Return the mean of the parameters after updates i = 1 ... n, with weights decay^(n - i).

    This is the exponential moving average with Adam's bias correction: the initial values have no
    weight.
    """
    weight = (1 - decay) / -jnp.expm1(n * math.log(decay))  # (1 - d) / (1 - d^n)
    return jax.tree.map(lambda a, p: a + weight * (p - a), ema, params)


def target_weights(batch: dict):
    """Return the weight of each target, float32 (B, T).

    It is 0 in padding, across the border of two documents, and where the batch says so.

    >>> target_weights({"tokens": jnp.zeros((1, 5), int), "segments": jnp.array([[1, 1, 2, 2, 0]])})
    Array([[1., 0., 1., 0.]], dtype=float32)
    """
    tokens = batch["tokens"]
    weights = batch.get("weights", jnp.ones((tokens.shape[0], tokens.shape[1] - 1), jnp.float32))
    if "segments" in batch:
        segments = batch["segments"]
        weights = weights * ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0))
    if "is_target" in batch:
        weights = weights * batch["is_target"][:, 1:]
    return weights


def _document_positions(segments_BT):
    """Return positions that start at 0 in each document of a packed row."""
    index = jnp.arange(segments_BT.shape[1])
    starts = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def batch_fields(batch: dict) -> dict:
    """Return the arrays (B, T) of a batch, which are sharded over examples and positions."""
    fields = {
        "inputs": batch["tokens"][:, :-1],
        "targets": batch["tokens"][:, 1:],
        "weights": target_weights(batch),
    }
    if "segments" in batch:
        segments = batch["segments"][:, :-1]
        fields |= {"segments": segments, "positions": _document_positions(segments)}
    return fields


def fields_read(batch: dict, c: ResolvedModel, key=None) -> dict:
    """Return `batch_fields` as the model reads them.

    Masked diffusion reads its targets but the hidden ones, which `key` draws (None: in an
    evaluation). "weights" are then those of the loss, and "counts" the weights of all targets.
    """
    fields = batch_fields(batch)
    if not c.masked_diffusion:
        return fields
    if "segments" in batch:
        segments = batch["segments"][:, 1:]
        fields |= {"segments": segments, "positions": _document_positions(segments)}
    counts = fields["weights"]
    inputs, weights = masked_diffusion.hide(c, fields["targets"], counts, key)
    return fields | {"inputs": inputs, "weights": weights, "counts": counts}


def _sums(params: dict, fields: dict, config: Resolved, fraction=None) -> tuple[losses.Sums, dict]:
    """Return the sums of the cross-entropy over this device's targets, and the terms of the loss.

    `fraction`: how much of the training is done, from 0 to 1; None: in an evaluation, which has
    no terms.

    Returns:
        The sums, whose objective includes the z-loss, and the other terms {name: (sum over the
        targets of this device, its weight in the loss)}.
    """
    inputs = {
        name: fields[name] for name in ("segments", "positions", "dropout_keys_B") if name in fields
    }
    stream = model.forward(params, config.model, fields["inputs"], **inputs)
    head = model.head(params, config.model)
    chunk = config.train.loss_chunk

    def hidden(of):
        return stream["x"] if of == "x" else model.for_head(config.model, stream[of])

    @functools.cache  # several terms may read the same logits
    def logits(of):
        return losses.head_logits(hidden(of), head)

    def cross_entropy(targets, weights, *, of="x", **added):
        """Return the sums of the model's logits, or of those of another array of the stream."""
        if not chunk:
            return losses.softmax_cross_entropy(logits(of), targets, weights, **added)
        return losses.chunked_softmax_cross_entropy(
            hidden(of), head, targets, weights, chunk_size=chunk, **added
        )

    added = {}
    if fraction is not None:
        added = {"z_loss": config.train.z_loss, "smoothing": config.train.label_smoothing}
    sums = cross_entropy(fields["targets"], fields["weights"], **added)
    if "counts" in fields:
        sums = sums._replace(weight=jnp.sum(fields["counts"]))
    if fraction is None:
        return sums, {}
    terms = ideas.loss_terms(config.model, stream, fields, cross_entropy, fraction)
    if "z_loss" in terms:
        raise ValueError(
            "an idea's term of the loss has the name z_loss of config.train; rename it"
        )
    return sums, terms


def loss_sum(params: dict, batch: dict, config: Resolved):
    """Return the weighted sum of a batch's cross-entropy in nats, and the sum of the weights."""

    def local(params, fields):
        sums, _ = _sums(params, fields, config)
        return collectives.sum_over_batch((sums.nll, sums.weight))

    table = parameters.parameter_table(config.model)
    return collectives.map_over_batch(local, table)(params, fields_read(batch, config.model))


def n_micro_batches(n_sequences: int, micro_batch_size: int | None) -> int:
    """Return the least number of equal micro-batches of at most micro_batch_size sequences.

    None: no limit.

    >>> n_micro_batches(15, 12), n_micro_batches(15, None)  # 3 times 5
    (3, 1)
    """
    size = micro_batch_size or n_sequences
    return next(n for n in divisors(n_sequences) if n_sequences // n <= size)


def _sum_over_micro_batches(f, params, fields: dict, n: int):
    """Return the sum of f(params, micro-batch) over n micro-batches, in float32 if n > 1."""
    if n == 1:
        return f(params, fields)

    def add(total, micro_batch):
        whole_params, micro_batch = collectives.gather_per_micro_batch(params, micro_batch)
        more = f(whole_params, micro_batch)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, more), None

    micro_batches = jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), fields)
    sums = jax.eval_shape(f, params, jax.tree.map(lambda a: a[0], micro_batches))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), sums)
    return jax.lax.scan(add, zeros, micro_batches)[0]


def objective(params: dict, fields: dict, config: Resolved, n_targets, fraction):
    """Return what training minimizes, and the means of {"loss": cross-entropy, "loss/NAME": term}.

    `fields` are those of the examples of a micro-batch on this device; `n_targets` is the sum of
    the weights in the whole batch; for `fraction` see `_sums`.
    """
    sums, terms = _sums(params, fields, config, fraction)
    total = sums.objective
    means = {"loss": sums.nll}
    if config.train.z_loss:
        means["loss/z_loss"] = sums.square_log_z
    for name, (term, weight) in terms.items():
        total = total + weight * term
        means[f"loss/{name}"] = term
    return total / n_targets, jax.tree.map(lambda x: x / n_targets, means)


def losses_and_gradients(state: TrainState, batch: dict, config: Resolved) -> tuple[dict, dict]:
    """Return the losses of the global batch, and the gradients of their weighted sum.

    A device computes micro-batches of at most config.train.micro_batch_size sequences. The sum of
    each is divided by the number of targets of the *whole* batch, so targets weigh the same in any
    micro-batch. The dropout key of an example depends on its number in the whole batch.

    Returns:
        {"loss": mean cross-entropy per target, "loss/NAME": mean of each term, before its weight},
        and the gradients.
    """
    t = config.train
    table = parameters.parameter_table(config.model)
    noise = None
    if config.model.masked_diffusion:
        noise = jax.random.fold_in(jax.random.key(state.seed), _NOISE)
        noise = jax.random.fold_in(noise, state.step)
    fields = fields_read(batch, config.model, noise)
    n_targets = jnp.maximum(jnp.sum(fields.get("counts", fields["weights"])), 1)
    fraction = state.step / max(t.steps, 1)
    if config.model.dropout:
        key = jax.random.fold_in(jax.random.key(state.seed), _DROPOUT)
        key = jax.random.fold_in(key, state.step)
        examples = jnp.arange(len(fields["inputs"]))
        fields["dropout_keys_B"] = jax.vmap(lambda i: jax.random.fold_in(key, i))(examples)

    def local(params, fields, n_targets, fraction):
        """Return losses and gradients, summed over the devices once, after all micro-batches.

        Only over fsdp, gradients of sharded parameters are summed and scattered in each
        micro-batch: the gradients of full parameters might not fit.
        """

        def of_micro_batch(params, fields):
            of_params = functools.partial(
                objective, fields=fields, config=config, n_targets=n_targets, fraction=fraction
            )
            (_, means), grads = jax.value_and_grad(of_params, has_aux=True)(params)
            return means, grads

        n = n_micro_batches(len(fields["inputs"]), t.micro_batch_size)
        means, grads = _sum_over_micro_batches(of_micro_batch, params, fields, n)
        grads = collectives.sum_gradients(grads, table)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        return collectives.sum_over_batch(means), grads

    mapped = collectives.map_over_batch(local, table, params_out=True)
    return mapped(state.params, fields, n_targets, fraction)


def _all_finite(tree):
    """Return whether all numbers are finite."""

    def finite(x):
        # 0 times infinity or NaN is NaN; on a CPU a sum is faster than `all`.
        return jnp.sum(x * jnp.zeros((), x.dtype)) == 0

    return jnp.all(jnp.stack([finite(x) for x in jax.tree.leaves(tree)]))


def train_step(state: TrainState, batch: dict, config: Resolved) -> tuple[TrainState, dict]:
    """Take one optimizer step.

    An update is rejected if the loss, the gradients or the updated state are not finite. With
    on_nonfinite = "skip" the rejection is counted and training continues. With "stop" the state,
    step number included, stays the same in this and all later calls. With on_spike = "skip" an
    update is rejected and counted, too, if the step is a spike. For `batch` see the top of this
    file.

    Returns:
        The new state, and the metrics, all scalars: loss (nats per token), loss/NAME (the mean of
        each term of the loss), grad_norm (before clipping), learning_rate and finite. With
        on_spike also loss_z and grad_norm_z (lm/spikes.py).
    """
    t = config.train
    learning_rate = learning_rate_schedule(config.optimizer, t.steps)
    means, grads = losses_and_gradients(state, batch, config)
    grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
    updates, opt_state = optimizer(config).update(
        grads, state.opt_state, state.params, value=means["loss"]
    )
    n_updates = state.step - state.skipped
    params = optax.apply_updates(state.params, updates)
    ema = None
    if t.ema is not None and state.ema is not None:
        ema = _next_ema(state.ema, params, n_updates + 1, t.ema)
    new = params, opt_state, ema
    # Finite gradients can still overflow a moment or a parameter.
    finite = jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm) & _all_finite(new)
    rate = jnp.float32(learning_rate(n_updates))  # the optimizer counts its updates
    metrics = means | {"grad_norm": grad_norm, "learning_rate": rate, "finite": finite}
    halted = state.halted
    if t.on_nonfinite == "stop":
        halted |= ~finite
    rejected = ~finite
    recent = state.recent
    if recent is not None:
        values = jnp.stack([means["loss"], grad_norm])
        z = spikes.z_scores(recent, values)
        metrics |= {"loss_z": z[0], "grad_norm_z": z[1]}
        if t.on_spike == "skip":
            rejected |= jnp.max(z) > spikes.LIMIT
        # A skipped step counts as well: where the loss stays at a new level, updates are skipped
        # for a while only.
        with_this_step = recent.at[:, state.step % spikes.WINDOW].set(values)
        recent = jnp.where(finite & ~halted, with_this_step, recent)
    accepted = ~rejected & ~halted
    old = state.params, state.opt_state, state.ema
    params, opt_state, ema = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, old)
    return state.replace(
        step=state.step + ~halted,
        params=params,
        opt_state=opt_state,
        skipped=state.skipped + (rejected & ~halted),
        halted=halted,
        ema=ema,
        recent=recent,
    ), metrics


def take_batch(resident: dict | None, inputs: dict, seq_len: int) -> dict:
    """Return the batch that one step's inputs from `BatchSource` describe.

    Args:
        resident: the split's arrays on the device (see `batches.gather`), None if the inputs are
            the gathered tokens.
        inputs: {"starts": (B,)} of the windows in `resident`, or the batch itself; the rest
            (weights) is passed on.
        seq_len: T.
    """
    if resident is None:
        return inputs
    rest = {name: value for name, value in inputs.items() if name != "starts"}
    return gather(resident, inputs["starts"], seq_len) | rest


def train_steps(state: TrainState, resident: dict | None, inputs: dict, n_steps, config: Resolved):
    """Take the first n_steps of the k steps whose inputs are given.

    Args:
        resident: see `take_batch`.
        inputs: of `BatchSource.train`, arrays (k, B, ...).
        n_steps: a traced number, at most k. One compiled program runs any number of steps, each in
            the same way.

    Returns:
        The state after the steps, and the metrics of `train_step` stacked to (k,), 0 beyond
        n_steps.
    """
    k = len(jax.tree.leaves(inputs)[0])

    @functools.partial(jax.jit, inline=True)  # so that the two uses below trace it once
    def step(state, resident, inputs, i):
        own = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), inputs)
        return train_step(state, take_batch(resident, own, config.train.seq_len), config)

    def body(i, carry):
        state, metrics = step(carry[0], resident, inputs, i)
        return state, jax.tree.map(lambda all_, one: all_.at[i].set(one), carry[1], metrics)

    one = jax.eval_shape(step, state, resident, inputs, 0)[1]
    metrics = jax.tree.map(lambda m: jnp.zeros((k, *m.shape), m.dtype), one)
    return jax.lax.fori_loop(0, n_steps, body, (state, metrics))


def eval_step(params: dict, resident: dict | None, inputs: dict, config: Resolved):
    """Return the sum of the cross-entropy in nats over a batch's targets, and their number.

    For `resident` and `inputs` see `take_batch`.
    """
    return loss_sum(params, take_batch(resident, inputs, config.train.seq_len), config)
