"""Statistics of attention that show whether it becomes unstable, for a few queries at a time."""

import dataclasses

import jax
import jax.numpy as jnp

from lm.config.values import divisors
from lm.layers.attention import Mask, causal_attention

CHUNK_SCORES = 2**24  # about this many scores are in memory at once: 64 MiB


def attention_statistics(q_BTHK, k_BSGK, mask: Mask, *, softcap=None, bias_BSH=None, **options):
    """Return the largest logit of each query and the entropies of its attention weights.

    Logits that grow during training come before a loss that diverges (Dehghani et al. 2023,
    arXiv:2302.05442, section 2; Wortsman et al. 2023, arXiv:2309.14322, section 3.1); so does an
    entropy that falls towards 0 (Zhai et al. 2023, arXiv:2303.06296).

    Args:
        q_BTHK, k_BSGK, softcap, bias_BSH: see `causal_attention`; only the entropy includes the
            last two.
        mask: which keys each query sees, at least one.
        **options: scale and sink_H, see `causal_attention`. The weight of a sink is no part of the
            entropy.

    Returns:
        The largest logit (B, T, H) among the keys that the query sees, before the softcap; the
        entropy (B, T, H) in nats; and the logarithm (B, T) of the number of keys that it sees, the
        entropy of equal weights. All are float32 or wider.

    >>> q, k = jnp.zeros((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4))  # zero queries weigh all keys equally
    >>> attention_statistics(q, k, Mask.causal(3))[1][0, :, 0]  # log 1, log 2, log 3
    Array([0.       , 0.6931472, 1.0986123], dtype=float32)
    """
    T = q_BTHK.shape[-3]
    n_scores = q_BTHK.size // q_BTHK.shape[-1] * k_BSGK.shape[-3]
    n_chunks = next(n for n in divisors(T) if n == T or n_scores // n <= CHUNK_SCORES)

    def of_queries(queries):
        q_BTHK, positions, segments = queries
        rows = dataclasses.replace(
            mask, q_positions=positions, q_segments=segments, contiguous=False
        )
        visible = rows.visible()[..., None, :, :]

        def observed(name: str, **more):
            seen: dict = {}
            more |= {"implementation": "einsum", "tap": seen.setdefault}
            causal_attention(q_BTHK, k_BSGK, k_BSGK, rows, **options, **more)
            return seen[name]

        logits_BHTS = observed("scores")
        weights_BHTS = observed("weights", softcap=softcap, bias_BSH=bias_BSH)
        n_keys_BHT = jnp.broadcast_to(
            jnp.sum(visible, axis=-1, dtype=logits_BHTS.dtype), logits_BHTS.shape[:-1]
        )
        max_logit_BHT = jnp.max(jnp.where(visible, logits_BHTS, -jnp.inf), axis=-1)
        entropy_BHT = jnp.sum(jax.scipy.special.entr(weights_BHTS), axis=-1)
        return (
            jnp.swapaxes(max_logit_BHT, -1, -2),
            jnp.swapaxes(entropy_BHT, -1, -2),
            jnp.log(n_keys_BHT[..., 0, :]),
        )

    def chunks(x, axis):
        return None if x is None else jnp.stack(jnp.split(jnp.asarray(x), n_chunks, axis))

    def joined(x):
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], T, *x.shape[3:])

    queries = chunks(q_BTHK, -3), chunks(mask.q_positions, -1), chunks(mask.q_segments, -1)
    return jax.tree.map(joined, jax.lax.map(of_queries, queries))
