"""Sample from masked diffusion (lm/ideas/masked_diffusion.py): hidden tokens are drawn one by one.

Their order is random, and each token is drawn from the model's distribution given all that are not
hidden. This is the reverse process with as many steps as tokens, in which no two are drawn at once,
so that it has no error of discretization (Nie et al. 2025, arXiv:2502.09992, random remasking; Ou
et al. 2024, arXiv:2406.03736). A text that is longer than the context is drawn in blocks: its last
half is kept, and the rest of the context is hidden and drawn.

A token takes a forward pass over the context. There is no cache, since all positions see each
other.
"""

from collections.abc import Iterator, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from lm import model
from lm.generation.decoding import Decoder, check_finite, draw_tokens, generating, unstacked
from lm.generation.filters import Sampling

_ORDER = 2**32 - 1


@flax.struct.dataclass
class DiffusionSampler(Decoder):
    """A model of masked diffusion prepared for generation."""

    def stream(
        self,
        prompts: Sequence,
        n_tokens: int,
        sampling: Sampling,
        *,
        seed: int = 0,
        samples=None,
        every: int = 2**30,
    ) -> Iterator[np.ndarray]:
        """Yield n_tokens ids for each prompt, a block at a time; arguments as for `Decoder`.

        `every` is not read: a text is complete at the end of its block.
        """
        T = self.seq_len
        texts = [list(prompt) for prompt in prompts]
        if samples is None:
            samples = np.zeros(len(texts))
        draws = (sampling, np.uint32(seed), np.asarray(samples, np.uint32))
        n_drawn = 0
        while n_drawn < n_tokens:
            longest = T - (n_tokens - n_drawn)  # of a text that still fits whole
            kept = [
                text if len(text) <= longest else text[len(text) - min(len(text), T // 2) :]
                for text in texts
            ]
            n = min(n_tokens - n_drawn, T - max(map(len, kept)))
            ids_BT = np.full((len(texts), T), self.config.vocab_size, np.int32)
            for row, ids in zip(ids_BT, kept, strict=True):
                row[: len(ids)] = ids
            lengths_B = np.array([len(ids) for ids in kept], np.int32)
            drawn_BT = _reveal(self, ids_BT, lengths_B, np.int32(n), np.int32(n_drawn), draws)
            blocks = []
            for text, row, length in zip(texts, np.asarray(drawn_BT), lengths_B, strict=True):
                blocks.append(row[length : length + n])
                text.extend(blocks[-1].tolist())
            check_finite(np.stack(blocks))
            n_drawn += n
            yield np.stack(blocks)


def make_sampler(params: dict, c, *, seq_len: int, n_ids: int | None = None) -> DiffusionSampler:
    """Prepare a model for generation; arguments as for `make_decoder`."""
    c = generating(c)
    return DiffusionSampler(unstacked(params, c), c, seq_len, n_ids or c.vocab_size)


@jax.jit
def _reveal(sampler: DiffusionSampler, ids_BT, lengths_B, n, n_drawn, draws):
    """Draw the n (traced) hidden tokens after the first lengths_B of each text."""
    _, seed, samples_B = draws
    T = ids_BT.shape[1]

    def order(sample):
        # not a key of `draw_tokens`, with which the order and the tokens would depend on each other
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _ORDER), sample)
        key = jax.random.fold_in(key, n_drawn)
        return jnp.argsort(jnp.where(jnp.arange(T) < n, jax.random.uniform(key, (T,)), 2.0))

    order_BT = jax.vmap(order)(samples_B)  # places of a block

    def step(i, ids_BT):
        place_B = lengths_B + order_BT[:, i]
        h_BTD = model.hidden(sampler.params, sampler.config, ids_BT)
        h_BD = jnp.take_along_axis(h_BTD, place_B[:, None, None], axis=1)[:, 0]
        tokens_B = draw_tokens(sampler, h_BD, n_drawn + i, draws)
        return ids_BT.at[jnp.arange(len(ids_BT)), place_B].set(tokens_B)

    return jax.lax.fori_loop(0, n, step, ids_BT)
