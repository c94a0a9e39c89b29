"""Cross-entropy of the output head, computed from all logits at once or in chunks.

Losses are weighted sums, returned with the sum of the weights. Only the caller knows what both must be summed over
(micro-batches, devices) before one is divided by the other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lm.layers.linear import project_to_float32, softcap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """The output head: logits = softcap(h w + b).

    Attributes:
        w: (D, V), or (V, D) if `transposed`.
        b_V: bias (V,), or None.
        softcap: bound of the absolute value of logits, or None.
        transposed: whether `w` is stored as (V, D), like the embedding table that a tied head shares.
    """

    w: jax.Array
    b_V: jax.Array | None = None
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})


def head_logits(h_BTD, head: Head):
    """Return the logits (..., V) of hidden states (..., D), float32 or wider.

    >>> head_logits(jnp.array([1.0, 2.0]), Head(jnp.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])))
    Array([1., 2., 3.], dtype=float32)
    """
    return softcap(project_to_float32(h_BTD, head.w, head.b_V, transposed=head.transposed), head.softcap)


def softmax_cross_entropy(logits_BTV, targets_BT, weights_BT=None, *, z_loss=0.0):
    """Return the sums of weight * (nll + z_loss * log(Z)^2) and of weight, with nll = log(Z) - the target's logit.

    Args:
        logits_BTV: (..., V), of any float dtype.
        targets_BT: integers (...) in [0, V).
        weights_BT: (...), or None for 1.
        z_loss: weight of log(Z)^2, which keeps log(Z), the logsumexp of the logits, near 0 (PaLM, arXiv:2204.02311,
            section 5).

    Returns:
        Two float32 scalars (loss_sum, weight_sum).

    >>> loss, count = softmax_cross_entropy(jnp.zeros((3, 8)), jnp.array([0, 5, 7]), jnp.array([1.0, 1.0, 0.0]))
    >>> round(float(loss / count), 4), float(count)  # log(8) for each token
    (2.0794, 2.0)
    """
    weights_BT = _weights(weights_BT, targets_BT)
    losses_BT = token_losses(logits_BTV, targets_BT, z_loss)
    return jnp.sum(weights_BT * losses_BT), jnp.sum(weights_BT)


def chunked_softmax_cross_entropy(h_BTD, head: Head, targets_BT, weights_BT=None, *, chunk_size, z_loss=0.0):
    """Return softmax_cross_entropy(head_logits(h, head), ...) with the logits of about `chunk_size` tokens at a time.

    Value and gradients are the same. A chunk has the same positions of every example, so a batch that is sharded over
    devices is not moved. The gradients are computed in the forward pass, chunk by chunk: the loss is one number, so the
    backward pass only scales them, and no logits are saved or computed twice. Supports first derivatives in reverse
    mode only.

    Args:
        h_BTD: hidden states (..., D).
        head: the output head.
        targets_BT, weights_BT, z_loss: see `softmax_cross_entropy`.
        chunk_size: tokens per chunk: max(1, chunk_size // B) positions of each of the B examples.

    Returns:
        Two float32 scalars (loss_sum, weight_sum).

    Raises:
        ValueError: `chunk_size` is less than 1.

    >>> head = Head(jnp.zeros((3, 8)))
    >>> loss, count = chunked_softmax_cross_entropy(jnp.ones((2, 4, 3)), head, jnp.zeros((2, 4), int), chunk_size=4)
    >>> round(float(loss / count), 4), float(count)  # log(8) for each token
    (2.0794, 8.0)
    """
    weights_BT = _weights(weights_BT, targets_BT)
    chunks = _chunks(chunk_size, h_BTD, targets_BT, weights_BT)
    return _chunked_loss(chunks, head, z_loss), jnp.sum(weights_BT)


def token_losses(logits, targets, z_loss=0.0):
    """Return nll + z_loss * log(Z)^2 of each target, float32 or wider; see `softmax_cross_entropy`.

    Args:
        logits: (..., V).
        targets: integers (...).
        z_loss: weight of log(Z)^2.

    >>> losses = token_losses(jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5]])), jnp.array([1, 0]))
    >>> [round(float(loss), 3) for loss in losses]  # -log(3/4) and -log(1/2)
    [0.288, 0.693]
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of a gather: its gradient needs no scatter, and logits may be sharded over the vocabulary.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    nll = log_z - jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return nll + z_loss * jnp.square(log_z) if z_loss else nll


def _weights(weights, targets):
    return jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _chunked_loss(chunks, head, z_loss):
    """chunks: hidden states (C, B, t, D), targets (C, B, t), weights (C, B, t)."""

    def step(total, chunk):
        return total + _chunk_loss(*chunk, head, z_loss)[0], None

    return jax.lax.scan(step, _zero(chunks), chunks)[0]


def _chunk_loss(h, targets, weights, head, z_loss):
    losses = token_losses(head_logits(h, head), targets, z_loss)
    return jnp.sum(weights * losses), losses


def _chunked_loss_forward(chunks, head, z_loss):
    def step(carry, chunk):
        total, d_head = carry
        h, targets, weights = chunk
        grad = jax.value_and_grad(lambda h, head: _chunk_loss(h, targets, weights, head, z_loss), (0, 1), has_aux=True)
        (loss, losses), (d_h, d_head_chunk) = grad(h, head)
        d_head = jax.tree.map(lambda a, b: a + b.astype(a.dtype), d_head, d_head_chunk)
        return (total + loss, d_head), (d_h, losses.astype(weights.dtype))

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), head)
    (loss, d_head), (d_h, losses) = jax.lax.scan(step, (_zero(chunks), zeros), chunks)
    return loss, (d_h, losses, jax.tree.map(lambda g, a: g.astype(a.dtype), d_head, head))


def _zero(chunks):
    return jnp.zeros((), jnp.promote_types(chunks[0].dtype, jnp.float32))


def _chunked_loss_backward(z_loss, saved, g):
    d_h, d_weights, d_head = jax.tree.map(lambda a: (a * g).astype(a.dtype), saved)
    return (d_h, None, d_weights), d_head


_chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)


def _chunks(chunk_size, h_BTD, *arrays_BT):
    """Split T into C chunks of t = chunk_size // B positions, padded with zeros: arrays of shape (C, B, t, ...)."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
    T, D = h_BTD.shape[-2:]
    h_BTD = h_BTD.reshape(-1, T, D)
    B = h_BTD.shape[0]
    t = min(T, max(1, chunk_size // B))

    def split(a):
        padded = jnp.pad(a, [(0, 0), (0, -T % t)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(padded.reshape(B, -1, t, *a.shape[2:]), 1, 0)

    return split(h_BTD), *(split(a.reshape(B, T)) for a in arrays_BT)
