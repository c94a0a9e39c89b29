"""One optimizer step, pure: (state, batch) -> (state, metrics); and its evaluation and inspection.

The config is a static argument: `jax.jit(train_step, static_argnames="config")`. It must be resolved (see
parameters.resolve). A batch is a dict of arrays:

    tokens    (B, T+1) integers: inputs are [:, :-1], targets [:, 1:]
    segments  (B, T+1), optional: document numbers of packed rows, 0 for padding
    weights   (B, T), optional: weights of the targets, 1 if absent
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from lm import model, parameters
from lm.config import Config
from lm.data.batches import gather
from lm.layers import losses
from lm.optimizers import learning_rate_schedule, make_optimizer
from lm.parallel import collectives

_DROPOUT = 0x64726F70  # sets dropout's keys apart from the initial values', which follow from the same seed


@flax.struct.dataclass
class TrainState:
    """Everything that changes in training; the rest is a function of it and the config."""

    step: jax.Array  # int32: steps made; the next batch is that of step number `step`
    params: dict
    opt_state: Any
    seed: jax.Array  # uint32
    skipped: jax.Array  # int32: updates withheld because they were not finite (on_nonfinite = "skip")
    halted: jax.Array  # bool: an update was not finite (on_nonfinite = "stop"); no later one is made


def optimizer(config: Config) -> optax.GradientTransformation:
    c = config.model
    table, factor = parameters.parameter_table(c), parameters.width_factor(c)
    return make_optimizer(config.optimizer, config.train.steps, table, factor)


def init_state(config: Config, seed) -> TrainState:
    """The state of step 0. seed: an integer or a traced uint32 scalar."""
    params = parameters.init_params(config.model, seed)
    counters = {"step": jnp.int32(0), "skipped": jnp.int32(0), "halted": jnp.bool_(False)}
    return TrainState(params=params, opt_state=optimizer(config).init(params), seed=jnp.uint32(seed), **counters)


def target_weights(batch: dict):
    """The weight of each target, float32 (B, T): none in padding, none across the border of two documents."""
    tokens = batch["tokens"]
    weights = batch.get("weights", jnp.ones((tokens.shape[0], tokens.shape[1] - 1), jnp.float32))
    if "segments" in batch:
        segments = batch["segments"]
        weights = weights * ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0))
    return weights


def _positions(segments_BT):
    """Positions that begin at 0 in each document of a packed row."""
    index = jnp.arange(segments_BT.shape[1])
    begins = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def _fields(batch: dict) -> dict:
    """What a batch has for each position, (B, T): devices that share its examples and positions take it apart."""
    fields = {"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:], "weights": target_weights(batch)}
    if "segments" in batch:
        segments = batch["segments"][:, :-1]
        fields |= {"segments": segments, "positions": _positions(segments)}
    return fields


def _hidden(params: dict, fields: dict, config: Config, **options):
    given = {name: fields[name] for name in ("segments", "positions", "dropout_keys_B") if name in fields}
    return model.hidden(params, config.model, fields["inputs"], **given, **options)


def _loss_sum(params: dict, fields: dict, config: Config, z_loss: float):
    """loss_sum of the examples and positions that this device has."""
    c, chunk = config.model, config.train.loss_chunk
    h_BTD, (w, b) = _hidden(params, fields, config), model.head(params, c)
    options = {"softcap": c.logit_softcap, "transposed": c.tie_embeddings}
    targets, weights = fields["targets"], fields["weights"]
    if chunk:
        chunk = max(1, chunk // collectives.n_batch_shards())
        return losses.chunked_softmax_cross_entropy(
            h_BTD, w, b, targets, weights, chunk_size=chunk, z_loss=z_loss, **options
        )
    return losses.softmax_cross_entropy(losses.head_logits(h_BTD, w, b, **options), targets, weights, z_loss=z_loss)


def loss_sum(params: dict, batch: dict, config: Config, *, z_loss: float = 0.0):
    """Weighted sum of the cross-entropy of a batch in nats, and the sum of the weights; both float32 scalars."""

    def local(params, fields):
        return collectives.sum_over_batch(_loss_sum(params, fields, config, z_loss))

    return collectives.map_over_batch(local, parameters.parameter_table(config.model))(params, _fields(batch))


def gradients(state: TrainState, batch: dict, config: Config):
    """The mean loss of the global batch and its gradients, over `train.accumulation` micro-batches.

    Each micro-batch's sum is divided by the number of targets of the *whole* batch, so that unequal micro-batches weigh
    as they would in one. Dropout's keys follow the example's number in the whole batch.
    """
    t, table, fields = config.train, parameters.parameter_table(config.model), _fields(batch)
    n_targets = jnp.maximum(jnp.sum(fields["weights"]), 1)
    if config.model.dropout:
        step_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(state.seed), _DROPOUT), state.step)
        fields["dropout_keys_B"] = jax.vmap(lambda i: jax.random.fold_in(step_key, i))(
            jnp.arange(len(fields["inputs"]))
        )

    def mean_loss(params, fields):
        return _loss_sum(params, fields, config, t.z_loss)[0] / n_targets

    def local(params, fields):
        """Of this device's examples; over devices, loss and gradients are added up once, after all micro-batches.

        But for parameters that fsdp shares, whose gradients are scattered as they come: whole they would not fit.
        """
        if t.accumulation == 1:
            loss, grads = jax.value_and_grad(mean_loss)(params, fields)
            return collectives.sum_over_batch(loss), collectives.sum_gradients(grads, table)

        def add(carry, micro):
            loss, grads = jax.value_and_grad(mean_loss)(params, micro)
            return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), carry, (loss, grads)), None

        micro = jax.tree.map(lambda a: a.reshape(t.accumulation, -1, *a.shape[1:]), fields)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), (jnp.float32(0), params))
        loss, grads = jax.lax.scan(add, zeros, micro)[0]
        grads = collectives.sum_gradients(grads, table)
        return collectives.sum_over_batch(loss), jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    return collectives.map_over_batch(local, table, params_out=True)(state.params, fields)


def _all_finite(tree):
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def train_step(state: TrainState, batch: dict, config: Config) -> tuple[TrainState, dict]:
    """One step. Metrics: loss (nats a token), grad_norm (before clipping), learning_rate, finite.

    An update whose loss, gradients or outcome are not finite is not made. With on_nonfinite = "skip" it is counted and
    training goes on; with "stop" the state stays what it was, step number included, through this and all later calls.
    """
    stop = config.train.on_nonfinite == "stop"
    learning_rate = learning_rate_schedule(config.optimizer, config.train.steps)
    loss, grads = gradients(state, batch, config)
    grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
    updates, opt_state = optimizer(config).update(grads, state.opt_state, state.params)
    new = (optax.apply_updates(state.params, updates), opt_state)
    # Finite gradients can still overflow a moment or a parameter.
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & _all_finite(new)
    accepted = finite & ~state.halted
    params, opt_state = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, (state.params, state.opt_state))
    metrics = {
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": jnp.float32(learning_rate(state.step - state.skipped)),  # the optimizer counts its updates
        "finite": finite,
    }
    return state.replace(
        step=state.step + (accepted | (not stop)),
        params=params,
        opt_state=opt_state,
        skipped=state.skipped + (~finite & (not stop)),
        halted=state.halted | (~finite & stop),
    ), metrics


def take_batch(resident: dict | None, feed: dict, seq_len: int) -> dict:
    """Return the batch that a feed of `BatchSource` describes.

    Args:
        resident: the split's arrays on the device (see `batches.gather`), None if the feed has the gathered tokens.
        feed: {"starts": (B,)} of the windows in `resident`, or the batch itself; the rest (weights) is passed on.
        seq_len: T.
    """
    if resident is None:
        return feed
    rest = {name: value for name, value in feed.items() if name != "starts"}
    return gather(resident, feed["starts"], seq_len) | rest


def train_steps(state: TrainState, corpus: dict | None, feeds: dict, n_steps, config: Config):
    """The first n_steps of the k steps whose feeds are stacked in `feeds` (k, B, ...); metrics come stacked too (k,).

    n_steps is traced: one compiled program makes any number of steps up to k, and each step the same way.
    """

    # One entry more than needed, so that there are at least two: with one, XLA knows the batch before the loop, moves
    # work out of it, and the loss rounds differently.
    feeds = jax.tree.map(lambda a: jnp.concatenate([a, a[:1]]), feeds)
    n = len(jax.tree.leaves(feeds)[0])

    def body(i, carry):
        state, stacked = carry
        feed = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), feeds)
        state, metrics = train_step(state, take_batch(corpus, feed, config.train.seq_len), config)
        return state, jax.tree.map(lambda all_, one: all_.at[i].set(one.astype(all_.dtype)), stacked, metrics)

    names = {"loss": jnp.float32, "grad_norm": jnp.float32, "learning_rate": jnp.float32, "finite": jnp.bool_}
    stacked = {name: jnp.zeros(n, dtype) for name, dtype in names.items()}
    state, stacked = jax.lax.fori_loop(0, n_steps, body, (state, stacked))
    return state, jax.tree.map(lambda all_: all_[:-1], stacked)


def eval_step(params: dict, corpus: dict | None, feed: dict, config: Config):
    """(sum of the cross-entropy in nats over the batch's targets, number of targets), without dropout."""
    return loss_sum(params, take_batch(corpus, feed, config.train.seq_len), config)


def inspect(state: TrainState, batch: dict, config: Config) -> dict:
    """Root mean squares by path: of gradients, parameters and updates of the next step, and of each layer's output."""

    def rms(x, axes=None):
        return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axes))

    def by_path(tree):  # a stack of layers gives one number a layer
        leaves = parameters.flat(tree).items()
        return {path: rms(x, tuple(range(1, x.ndim)) if path.startswith("layers/") else None) for path, x in leaves}

    _, grads = gradients(state, batch, config)
    updates, _ = optimizer(config).update(grads, state.opt_state, state.params)

    def mean_squares(params, fields):
        """Of each layer's output, (N,)."""
        _, sown = _hidden(params, fields, config, mutable=["intermediates"])
        outputs = sown["intermediates"]
        if not config.model.scan_layers:
            outputs = parameters.stack_layers(outputs)
        x_NBTD = outputs["layers"]["x_BTD"][0].astype(jnp.float32)
        return collectives.sum_over_batch(jnp.mean(jnp.square(x_NBTD), (1, 2, 3))) / collectives.n_batch_shards()

    table = parameters.parameter_table(config.model)
    return {
        "gradients": by_path(grads),
        "parameters": by_path(state.params),
        "updates": by_path(updates),
        "activations": {
            "layers/output": jnp.sqrt(collectives.map_over_batch(mean_squares, table)(state.params, _fields(batch)))
        },
    }
