"""Statistics of attention that show whether it becomes unstable, computed for a few queries at a time."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm.layers.attention import Mask
from lm.layers.linear import softcap as apply_softcap

CHUNK_SCORES = 2**24  # about this many scores are in memory at once: 64 MiB


class AttentionStatistics(NamedTuple):
    """Statistics of each query, float32 or wider.

    Attributes:
        max_logit_BTH: its largest logit among the keys that it sees, before the softcap.
        entropy_BTH: the entropy of its attention weights in nats.
        max_entropy_BT: the logarithm of the number of keys that it sees: the entropy of equal weights.
    """

    max_logit_BTH: jax.Array
    entropy_BTH: jax.Array
    max_entropy_BT: jax.Array


def attention_statistics(q_BTHK, k_BSGK, mask: Mask, *, softcap=None, scale=None) -> AttentionStatistics:
    """Return the largest logit of each query and the entropy of its attention weights.

    Logits that grow during training come before a loss that diverges (Dehghani et al. 2023, arXiv:2302.05442,
    section 2; Wortsman et al. 2023, arXiv:2309.14322, section 3.1); so does an entropy that falls towards
    0 (Zhai et al. 2023, arXiv:2303.06296).

    Args:
        q_BTHK, k_BSGK: queries and keys, see `causal_attention`.
        mask: which keys each query sees, at least one.
        softcap: the cap of the logits, which the entropy includes and the largest logit does not; None: no cap.
        scale: factor of the logits; None: 1 / sqrt(K).

    >>> q, k = jnp.zeros((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4))  # zero queries weigh all keys equally
    >>> attention_statistics(q, k, Mask.causal(3)).entropy_BTH[0, :, 0]  # log 1, log 2, log 3
    Array([0.       , 0.6931472, 1.0986123], dtype=float32)
    """
    (B, T, H, K), S, G = q_BTHK.shape, k_BSGK.shape[-3], k_BSGK.shape[-2]
    scale = 1 / math.sqrt(K) if scale is None else scale
    wide = jnp.promote_types(q_BTHK.dtype, jnp.float32)

    def of_query(query):
        q_BHK, position, segment = query
        row = dataclasses.replace(
            mask,
            q_positions=position[..., None],
            q_segments=None if segment is None else segment[..., None],
            contiguous=False,
        )
        visible_BS = jnp.broadcast_to(row.visible()[..., 0, :], (B, S))
        q_BGRK = q_BHK.reshape(B, G, H // G, K)  # R heads share a key head
        logits_BGRS = jnp.einsum("BGRK,BSGK->BGRS", q_BGRK, k_BSGK, preferred_element_type=wide) * scale
        logits_BHS, visible_B1S = logits_BGRS.reshape(B, H, S), visible_BS[:, None, :]
        log_weights_BHS = jax.nn.log_softmax(apply_softcap(logits_BHS, softcap), where=visible_B1S)
        weighted_BHS = jnp.where(visible_B1S, jnp.exp(log_weights_BHS) * log_weights_BHS, 0)
        return AttentionStatistics(
            jnp.max(logits_BHS, axis=-1, where=visible_B1S, initial=-jnp.inf),
            jnp.abs(jnp.sum(weighted_BHS, axis=-1)),
            jnp.log(jnp.sum(visible_BS, axis=-1, dtype=wide)),
        )

    def by_query(x):  # (T,) or (B, T)
        return None if x is None else jnp.moveaxis(jnp.asarray(x), -1, 0)

    queries = jnp.moveaxis(q_BTHK, -3, 0), by_query(mask.q_positions), by_query(mask.q_segments)
    chunk = min(T, max(1, CHUNK_SCORES // (B * H * S)))
    found = jax.lax.map(of_query, queries, batch_size=chunk)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)
