"""Cross-entropy of the output head, computed from all logits at once or in chunks.

Losses are weighted sums, returned with the sum of the weights. Only the caller knows what both must
be summed over (micro-batches, devices) before one is divided by the other.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm.kernels import platform
from lm.layers.linear import project_to_float32, softcap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """The output head: logits = after(p, softcap(h w + b))."""

    # (D, V), or (V, D) if `transposed`, like the embedding table that a tied head shares
    w: jax.Array
    b_V: jax.Array | None = None
    # Bound of the absolute value of logits.
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    # Whether the product h w is rounded to the dtype of h.
    rounded: bool = dataclasses.field(default=False, metadata={"static": True})
    p: dict | None = None  # parameters of `after`
    # (parameters, logits) -> logits; None: nothing.
    after: Callable | None = dataclasses.field(default=None, metadata={"static": True})


def head_logits(h_BTD, head: Head):
    """Return the logits (..., V) of hidden states (..., D), float32 or wider.

    >>> head_logits(jnp.array([1.0, 2.0]), Head(jnp.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])))
    Array([1., 2., 3.], dtype=float32)
    """
    logits_BTV = project_to_float32(
        h_BTD, head.w, head.b_V, transposed=head.transposed, rounded=head.rounded
    )
    logits_BTV = softcap(logits_BTV, head.softcap)
    return logits_BTV if head.after is None else head.after(head.p, logits_BTV)


class Sums(NamedTuple):
    """Sums over targets, each times its weight, float32 scalars."""

    # of nll, or with label smoothing, + z_loss * log(Z)^2; only this one passes gradients
    objective: jax.Array
    nll: jax.Array  # of log(Z) minus the target's logit
    square_log_z: jax.Array  # of log(Z)^2
    weight: jax.Array  # of the weights


def softmax_cross_entropy(
    logits_BTV, targets_BT, weights_BT=None, *, z_loss=0.0, smoothing=0.0
) -> Sums:
    """Return the `Sums` over targets from all logits at once.

    Args:
        logits_BTV: (..., V), of any float dtype.
        targets_BT: integers (...) in [0, V).
        weights_BT: (...), or None for 1.
        z_loss: weight of log(Z)^2, which keeps log(Z), the logsumexp of the logits, near 0 (PaLM,
            arXiv:2204.02311, section 5).
        smoothing: s, with which the objective is the cross-entropy with (1 - s) times the target
            plus s times the uniform distribution (Szegedy et al. 2016, arXiv:1512.00567, section
            7).

    >>> sums = softmax_cross_entropy(jnp.zeros((3, 8)), jnp.array([0, 5, 7]), jnp.array([1.0, 1.0, 0.0]))
    >>> round(float(sums.nll / sums.weight), 4), float(sums.weight)  # log(8) for each token
    (2.0794, 2.0)
    """
    weights_BT = _weights(weights_BT, targets_BT)
    added = Added(z_loss, smoothing)
    objective, nll, square_log_z = _sums(logits_BTV, targets_BT, weights_BT, added)[0]
    return Sums(objective, nll, square_log_z, jnp.sum(weights_BT))


def chunked_softmax_cross_entropy(
    h_BTD, head: Head, targets_BT, weights_BT=None, *, chunk_size, z_loss=0.0, smoothing=0.0
) -> Sums:
    """Return softmax_cross_entropy(head_logits(h, head), ...), some tokens at a time.

    Value and gradients are the same. A chunk has the same positions of every example, so a batch
    that is sharded over devices is not moved. The gradients are computed in the forward pass, chunk
    by chunk: the loss is one number, so the backward pass only scales them. No logits are saved or
    computed twice. Supports first derivatives in reverse mode only.

    Args:
        h_BTD: hidden states (..., D).
        head: the output head.
        targets_BT, weights_BT, z_loss, smoothing: see `softmax_cross_entropy`.
        chunk_size: tokens per chunk: max(1, chunk_size // B) positions of each of the B examples.

    >>> head = Head(jnp.zeros((3, 8)))
    >>> sums = chunked_softmax_cross_entropy(jnp.ones((2, 4, 3)), head, jnp.zeros((2, 4), int), chunk_size=4)
    >>> round(float(sums.nll / sums.weight), 4), float(sums.weight)  # log(8) for each token
    (2.0794, 8.0)
    """
    weights_BT = _weights(weights_BT, targets_BT)
    chunks = _chunks(chunk_size, h_BTD, targets_BT, weights_BT)
    objective, nll, square_log_z = _chunked_loss(chunks, head, Added(z_loss, smoothing))
    return Sums(objective, *jax.lax.stop_gradient((nll, square_log_z)), jnp.sum(weights_BT))


def token_losses(logits, targets):
    """Return the nll and log(Z) of each target, float32 or wider; see `Sums`.

    Args:
        logits: (..., V).
        targets: integers (...).

    >>> losses, _ = token_losses(jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5]])), jnp.array([1, 0]))
    >>> [round(float(loss), 3) for loss in losses]  # -log(3/4) and -log(1/2)
    [0.288, 0.693]
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_z = _log_sum_exp(logits)
    # A comparison instead of a gather: its gradient needs no scatter, and logits may be sharded
    # over the vocabulary.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return log_z - jnp.sum(jnp.where(is_target, logits, 0), axis=-1), log_z


def _log_sum_exp(x):
    """Return log(sum(exp(x))) over the last axis."""
    # Of a vocabulary that is sharded, partial sums would be gathered instead of summed.
    sharded = jax.sharding.get_abstract_mesh().shape.get("tensor", 1) > 1
    if sharded or platform.target() != "gpu":
        return jax.nn.logsumexp(x, axis=-1)
    return _log_sum_exp_in_one_pass(x)


@jax.custom_jvp
def _log_sum_exp_in_one_pass(x):
    m, s = _max_and_sum(x)
    return m + jnp.log(s)


@_log_sum_exp_in_one_pass.defjvp
def _log_sum_exp_derivative(primals, tangents):
    (x,) = primals
    (d_x,) = tangents
    m, s = _max_and_sum(x)
    softmax = jnp.exp(x - m[..., None]) / s[..., None]
    return m + jnp.log(s), jnp.sum(softmax * d_x, axis=-1)


def _max_and_sum(x):
    """Return m = max(x) and s = sum(exp(x - m)) over the last axis in one reduction.

    XLA:GPU would read x twice for two. Pairs (m, s) stand for s exp(m).
    """

    def add(a, b):
        m_a, s_a = a
        m_b, s_b = b
        m = jnp.maximum(m_a, m_b)
        return m, s_a * jnp.exp(m_a - m) + s_b * jnp.exp(m_b - m)

    lowest = jnp.array(jnp.finfo(x.dtype).min, x.dtype)  # -inf - -inf would be NaN
    nothing = lowest, jnp.array(0, x.dtype)
    return jax.lax.reduce((x, jnp.ones_like(x)), nothing, add, (x.ndim - 1,))


def _weights(weights, targets):
    return jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)


class Added(NamedTuple):
    """What the objective has besides the cross-entropy, numbers; see `softmax_cross_entropy`."""

    z_loss: float
    smoothing: float


def _sums(logits, targets, weights, added: Added):
    """Return the first three of `Sums`, and the derivative of the objective by the weights."""
    nll, log_z = token_losses(logits, targets)
    losses = nll
    if added.smoothing:
        of_uniform = log_z - jnp.mean(logits.astype(log_z.dtype), axis=-1)
        losses = (1 - added.smoothing) * nll + added.smoothing * of_uniform
    if added.z_loss:
        losses = losses + added.z_loss * jnp.square(log_z)
    objective = jnp.sum(weights * losses)
    # these two are logged only
    sum_of_nll = jnp.sum(weights * jax.lax.stop_gradient(nll))
    square_log_z = jnp.sum(weights * jax.lax.stop_gradient(jnp.square(log_z)))
    return (objective, sum_of_nll, square_log_z), losses


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _chunked_loss(chunks, head, added):
    """chunks: hidden states (C, B, t, D), targets (C, B, t), weights (C, B, t)."""

    def step(totals, chunk):
        h, targets, weights = chunk
        sums, _ = _sums(head_logits(h, head), targets, weights, added)
        return jax.tree.map(jnp.add, totals, sums), None

    return jax.lax.scan(step, _zeros(chunks), chunks)[0]


def _chunked_loss_forward(chunks, head, added):
    def step(carry, chunk):
        totals, d_head = carry
        h, targets, weights = chunk

        def objective(h, head):
            sums, losses = _sums(head_logits(h, head), targets, weights, added)
            return sums[0], (sums, losses)

        (_, (sums, losses)), (d_h, d_head_chunk) = jax.value_and_grad(
            objective, (0, 1), has_aux=True
        )(h, head)
        d_head = jax.tree.map(lambda a, b: a + b.astype(a.dtype), d_head, d_head_chunk)
        totals = jax.tree.map(jnp.add, totals, sums)
        return (totals, d_head), (d_h, losses.astype(weights.dtype))

    # The gradient of the head is a sum over the chunks, hence float32 or wider.
    zeros = jax.tree.map(
        lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), head
    )
    (sums, d_head), (d_h, losses) = jax.lax.scan(step, (_zeros(chunks), zeros), chunks)
    d_head = jax.tree.map(lambda g, a: g.astype(a.dtype), d_head, head)
    return sums, (d_h, losses, d_head)


def _zeros(chunks):
    return (jnp.zeros((), jnp.promote_types(chunks[0].dtype, jnp.float32)),) * 3


def _chunked_loss_backward(added, saved, g):
    # g has the derivatives by three sums, of which the first alone passes gradients
    d_h, d_weights, d_head = jax.tree.map(lambda a: (a * g[0]).astype(a.dtype), saved)
    return (d_h, None, d_weights), d_head  # targets are integers


_chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)


def _chunks(chunk_size, h_BTD, *arrays_BT):
    """Split T into C chunks of t = chunk_size // B positions, padded with zeros: (C, B, t, ...)."""
    T, D = h_BTD.shape[-2:]
    h_BTD = h_BTD.reshape(-1, T, D)
    B = h_BTD.shape[0]
    t = min(T, max(1, chunk_size // B))

    def split(a):
        padded = jnp.pad(a, [(0, 0), (0, -T % t)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(padded.reshape(B, -1, t, *a.shape[2:]), 1, 0)

    return split(h_BTD), *(split(a.reshape(B, T)) for a in arrays_BT)
