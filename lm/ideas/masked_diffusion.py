"""Masked diffusion: attention in both directions predicts tokens that are hidden at random.

    -ln p(x) <= E_l E_masks of (L / l) * sum over the hidden i of -ln p(x_i | the tokens not hidden)

l is uniform in 1 .. L, and l of the L targets of a text are hidden, each set of l with the same
probability (LLaDA, Nie et al. 2025, arXiv:2502.09992; it has the expectation of MDLM's integral
over times, Sahoo et al. 2024, arXiv:2406.07524, and less variance). Training minimizes the bound,
and evaluations report it as the loss. Tokens that are not targets, such as a question
before an answer, are never hidden. All tokens after the last target are hidden, because they would
show where the answer ends.

A position predicts its own token. A hidden token has the id V; the head has no logit for it. As in
MDLM, the texts of a batch divide the range of l / L among themselves. The masks of an evaluation
are a function of its tokens. lm/generation/diffusion.py draws texts.
"""

import jax
import jax.numpy as jnp

from lm.declarations import INITIALIZERS, Parameter
from lm.system.errors import UserError


def table(c):
    std = c.embed_std or INITIALIZERS[c.init][2]
    return {"hidden_D": Parameter((c.d_model,), "D", "embedding", init="normal", std=std)}


def token_embeddings(here, embedding_VD):
    """Return the table with a row for hidden tokens."""
    return jnp.concatenate([embedding_VD, here.p["hidden_D"][None]])


def hide(c, targets_BT, weights_BT, key):
    """Return what the model reads, and the weights of its predictions: 0 of tokens that it reads.

    `key` draws the masks; None: one that depends on the tokens only, for evaluations.
    """
    if key is None:
        place_BT = jnp.arange(targets_BT.size, dtype=jnp.uint32).reshape(targets_BT.shape)
        # a hash of each token and its place, by Knuth's multiplier
        mixed_BT = (targets_BT.astype(jnp.uint32) + 1) * (2 * place_BT + 1) * jnp.uint32(2654435761)
        key = jax.random.key(jnp.sum(mixed_BT ^ (mixed_BT >> 15), dtype=jnp.uint32))
    key_of_levels, key_of_order = jax.random.split(key)
    counted_BT = weights_BT > 0
    n_B1 = jnp.sum(counted_BT, axis=-1, keepdims=True)  # L
    B = len(targets_BT)
    level_B1 = (jax.random.uniform(key_of_levels) + jnp.arange(B)[:, None] / B) % 1
    l_B1 = jnp.clip(1 + jnp.floor(level_B1 * n_B1), 1, jnp.maximum(n_B1, 1))
    # 2 is above all draws, so tokens that do not count come last
    drawn_BT = jnp.where(counted_BT, jax.random.uniform(key_of_order, targets_BT.shape), 2.0)
    rank_BT = jnp.argsort(jnp.argsort(drawn_BT, axis=-1), axis=-1)
    hidden_BT = counted_BT & (rank_BT < l_B1)
    n_from_here_BT = jnp.cumsum(counted_BT[:, ::-1], axis=-1)[:, ::-1]
    is_after_BT = n_from_here_BT == 0
    inputs_BT = jnp.where(hidden_BT | is_after_BT, c.vocab_size, targets_BT)
    return inputs_BT, weights_BT * hidden_BT * (n_B1 / l_B1)


def refuse(c, what: str) -> None:
    """Raise UserError for what needs the next token's probability, if a model has none."""
    if c.masked_diffusion:
        raise UserError(
            f"config.model.masked_diffusion: {what} needs a model that predicts the next token "
            "from those before it, which this one does not; lm.evaluate gives the bound of its "
            "loss, and lm.generate samples"
        )
