"""The distribution of the next token: temperature, and filters that leave only likely tokens."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Sampling:
    """How to draw the next token. Each filter applies to the tokens that the previous one keeps.

    Attributes:
        temperature: draw from softmax(logits / temperature); 0: take the likeliest token.
        top_k: keep the k likeliest tokens, and all tokens as likely as the k-th; None: all.
        top_p: keep the likeliest tokens until their total probability reaches this (Holtzman et al.
            2019, arXiv:1904.09751); None: all.
        min_p: keep tokens with at least this fraction of the highest probability (Nguyen et al.
            2024, arXiv:2407.01082); None: all.
    """

    temperature: float = 1.0
    top_k: int | None = flax.struct.field(pytree_node=False, default=None)
    top_p: float | None = None
    min_p: float | None = None


def filter_logits(logits, sampling: Sampling):
    """Divide logits (..., V) by the temperature, and set those of filtered tokens to -inf.

    >>> filter_logits(jnp.array([2.0, 1.0, 0.0, -1.0]), Sampling(temperature=0.5, top_k=2))
    Array([  4.,   2., -inf, -inf], dtype=float32)
    """
    logits = logits / jnp.maximum(sampling.temperature, 1e-6)
    if sampling.top_k is not None:
        k = min(sampling.top_k, logits.shape[-1])
        logits = _keep(logits, logits >= jax.lax.top_k(logits, k)[0][..., -1:])
    if sampling.top_p is not None:
        descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        p = jax.nn.softmax(descending, axis=-1)
        # total probability of all likelier tokens; the first token is always kept
        before = jnp.cumsum(p, axis=-1) - p
        kept = jnp.where(before < sampling.top_p, descending, jnp.inf)
        logits = _keep(logits, logits >= jnp.min(kept, axis=-1, keepdims=True))
    if sampling.min_p is not None:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = _keep(logits, logits >= least)
    return logits


def _keep(logits, kept):
    return jnp.where(kept, logits, -jnp.inf)


def draw(keys_B, logits_BV, sampling: Sampling):
    """Draw one token per example, int32 (B,), each with its own key."""

    def likeliest():
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def random():
        drawn_B = jax.vmap(jax.random.categorical)(keys_B, filter_logits(logits_BV, sampling))
        return drawn_B.astype(jnp.int32)

    # Random numbers for a large vocabulary take as long as a small model, so they are not drawn for
    # nothing.
    return jax.lax.cond(sampling.temperature == 0, likeliest, random)
