"""Cross-entropy from logits, and the same chunked over tokens so that the logits never exist as a whole.

Losses are weighted sums, returned with the sum of the weights: only the caller knows over what (microbatches,
devices) both must be added up before one is divided by the other.
"""

import functools

import jax
import jax.numpy as jnp

from lm.layers.linear import einsum
from lm.layers.linear import softcap as apply_softcap


def softmax_cross_entropy(logits_BTV, targets_BT, weights_BT=None, *, z_loss=0.0):
    """Sums of weight * (nll + z_loss * log(Z)^2) and of weight, with nll = log(Z) - the target's logit.

    Returns two float32 scalars, (loss_sum, weight_sum).
    logits_BTV: (..., V), of any float dtype; targets_BT: integers (...) in [0, V); weights_BT: (...), 1 where None.
    z_loss: keeps log(Z), the logsumexp of the logits, near 0 (PaLM, arXiv:2204.02311, section 5).
    """
    weights_BT = _weights(weights_BT, targets_BT)
    losses_BT = _token_losses(logits_BTV, targets_BT, z_loss)
    return jnp.sum(weights_BT * losses_BT), jnp.sum(weights_BT)


def head_logits(h_BTD, w_DV, bias_V=None, *, softcap=None, transposed=False):
    """float32 logits h w + bias, capped to (-softcap, softcap) where a cap is given.

    h_BTD: (..., D); w_DV: (D, V), or with `transposed` (V, D), as an embedding table lies; bias_V: (V,) or None.
    """
    equation = "...D,VD->...V" if transposed else "...D,DV->...V"
    logits = einsum(equation, h_BTD, w_DV, bias_V, dtype=jnp.promote_types(h_BTD.dtype, jnp.float32))
    return apply_softcap(logits, softcap)


def chunked_softmax_cross_entropy(
    h_BTD, w_DV, bias_V, targets_BT, weights_BT=None, *, chunk_size, softcap=None, z_loss=0.0, transposed=False
):
    """softmax_cross_entropy(head_logits(...), ...) without ever holding more than about `chunk_size` tokens' logits.

    Arguments as for those two; same value, same gradients. A chunk takes the same positions of every example, so that
    a batch sharded over devices stays where it is: chunk_size // B positions, at least 1, B being the number of
    examples given.
    The gradients are made in the forward pass, chunk by chunk: the loss is one number, so the backward pass only
    scales them, and no logits are kept or computed twice. Reverse-mode differentiation, once.
    """
    weights_BT = _weights(weights_BT, targets_BT)
    arrays = _chunks(chunk_size, h_BTD, targets_BT, weights_BT)
    loss = _chunked_loss(*arrays, w_DV, bias_V, softcap, z_loss, transposed)
    return loss, jnp.sum(weights_BT)


def _token_losses(logits, targets, z_loss):
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of a gather: its gradient is no scatter, and logits may be sharded over the vocabulary.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    nll = log_z - jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return nll + z_loss * jnp.square(log_z) if z_loss else nll


def _weights(weights, targets):
    return jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _chunked_loss(h_CBtD, targets_CBt, weights_CBt, w, bias, softcap, z_loss, transposed):
    def step(total, chunk):
        return total + _chunk_loss(*chunk, w, bias, softcap, z_loss, transposed)[0], None

    return jax.lax.scan(step, _zero(h_CBtD), (h_CBtD, targets_CBt, weights_CBt))[0]


def _chunk_loss(h, targets, weights, w, bias, softcap, z_loss, transposed):
    losses = _token_losses(head_logits(h, w, bias, softcap=softcap, transposed=transposed), targets, z_loss)
    return jnp.sum(weights * losses), losses


def _chunked_loss_forward(h_CBtD, targets_CBt, weights_CBt, w, bias, softcap, z_loss, transposed):
    def step(carry, chunk):
        total, d_w, d_bias = carry
        h, targets, weights = chunk

        def loss_of(h, w, bias):
            return _chunk_loss(h, targets, weights, w, bias, softcap, z_loss, transposed)

        (loss, losses), (d_h, d_w_chunk, d_bias_chunk) = jax.value_and_grad(loss_of, (0, 1, 2), has_aux=True)(
            h, w, bias
        )
        d_w, d_bias = jax.tree.map(lambda a, b: a + b.astype(a.dtype), (d_w, d_bias), (d_w_chunk, d_bias_chunk))
        return (total + loss, d_w, d_bias), (d_h, losses.astype(weights.dtype))

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), (w, bias))
    carry, outs = jax.lax.scan(step, (_zero(h_CBtD), *zeros), (h_CBtD, targets_CBt, weights_CBt))
    loss, d_w, d_bias = carry
    d_h, losses = outs
    return loss, (d_h, losses, jax.tree.map(lambda g, a: g.astype(a.dtype), (d_w, d_bias), (w, bias)))


def _zero(h):
    return jnp.zeros((), jnp.promote_types(h.dtype, jnp.float32))


def _chunked_loss_backward(softcap, z_loss, transposed, saved, g):
    d_h, d_weights, (d_w, d_bias) = jax.tree.map(lambda a: (a * g).astype(a.dtype), saved)
    return d_h, None, d_weights, d_w, d_bias


_chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)


def _chunks(chunk_size, h_BTD, *arrays_BT):
    """Splits T into C chunks of t = chunk_size // B positions, padded with zeros: arrays of shape (C, B, t, ...)."""
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
