"""A cache of keys and values, so that the model computes one position per new token instead of the
full context.

The cache is a pytree with the keys and the values (C, S, K) of each layer, where S is the slot and
C = B G combines the text and the key head. XLA's CPU compiler updates this layout in place. With
separate axes B and G it would copy the cache twice for every token.

The texts of a batch are aligned at their ends: the last tokens of all prompts have the same time t,
and a shorter text starts later. All keys of one step are therefore written to the same slot. Slot s
holds the newest time t with t % S == s. In a layer with a window, S is at most the size of the
window: the cache is a ring buffer, and a new token replaces one outside of the window. All other
layers have a slot for every time.

`Prefill` and `Decode` replace the `Past` of the model and keep the cache in `here.memory`: keys and
values, and the states of recurrences.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from lm.layers.attention import Mask
from lm.past import Past


def slot_times(last, n_slots: int):
    """Return the time (S,) that each slot holds when `last` is the newest time; negative: the slot
    is empty.

    >>> slot_times(5, 4), slot_times(1, 4)
    (Array([4, 5, 2, 3], dtype=int32), Array([ 0,  1, -2, -1], dtype=int32))
    """
    return last - (last - jnp.arange(n_slots)) % n_slots


def fill(x_BT, lengths_B, n_slots: int):
    """Copy an array of prompts of these lengths to the slots of a cache, see `_by_head`.

    The longest prompt starts at time 0. Slots before the first token of a text hold arbitrary
    values.
    """
    n_times = jnp.max(lengths_B)
    positions_BS = slot_times(n_times - 1, n_slots) - (n_times - lengths_B)[:, None]
    index_BS = jnp.maximum(positions_BS, 0).reshape(*positions_BS.shape, *[1] * (x_BT.ndim - 2))
    return _by_head(jnp.take_along_axis(x_BT, index_BS, axis=1))


def _by_head(x_BS):
    """Return keys or values (B, S, G, K) as (C, S, K), and vectors (B, S, C) as they are."""
    if x_BS.ndim == 3:
        return x_BS
    return jnp.swapaxes(x_BS, 1, 2).reshape(-1, x_BS.shape[1], x_BS.shape[3])


def _by_text(slots, like_BT):
    """Return the inverse of `_by_head`: (B, S, ...), with the other axes of like_BT."""
    if like_BT.ndim == 3:
        return slots
    B, _, G, K = like_BT.shape
    return jnp.swapaxes(slots.reshape(B, G, -1, K), 1, 2)


def _keep(here, name: str, x) -> None:
    """Put an array into the empty cache; raises ValueError if the module has put one of this name
    there.
    """
    if here.named(name) in here.memory:
        raise ValueError(f"{here.path} has two caches with the name {name!r}; rename one")
    here.keep(name, x)


@flax.struct.dataclass
class Prefill(Past):
    """See whole prompts, and fill the cache."""

    lengths_B: Any = None  # the number of tokens of each prompt; tokens after them are padding
    # tokens per text that the cache can hold
    n_slots: int = flax.struct.field(pytree_node=False, default=0)

    def earlier(self, here, name: str, x_BT, window):
        n_slots = self.n_slots if window is None else min(window, self.n_slots)
        _keep(here, name, fill(x_BT, self.lengths_B, n_slots))
        return super().earlier(here, name, x_BT, window)

    def recurrence(self, here, name: str, run: Callable, state_B, inputs_BT):
        # For the state, the texts are aligned at their ends: the last position is then the last
        # token, and the padding before the first token is another document. The outputs are those
        # of training: to move them back would cost more than to compute what they share twice.
        T = here.tokens_BT.shape[1]
        n_padding_B = T - self.lengths_B
        roll = jax.vmap(functools.partial(jnp.roll, axis=0))
        aligned_BT = jax.tree.map(lambda x: roll(x, n_padding_B), inputs_BT)
        document_BT = jnp.where(jnp.arange(T) < n_padding_B[:, None], 0, 1)
        _keep(here, name, run(state_B, aligned_BT, document_BT)[0])
        return super().recurrence(here, name, run, state_B, inputs_BT)


@flax.struct.dataclass
class Decode(Past):
    """See the cache and one new token per text, which is added to it."""

    time: Any = None  # of the new tokens
    starts_B: Any = None  # the time of the first token of each text

    def earlier(self, here, name: str, x_B1, window):
        slots = here.kept(name)
        n_slots = slots.shape[1]
        slot = self.time % n_slots
        slots = jax.lax.dynamic_update_slice_in_dim(slots, _by_head(x_B1), slot, axis=1)
        here.keep(name, slots)
        k_positions_BS = slot_times(self.time, n_slots) - self.starts_B[:, None]
        return _by_text(slots, x_B1), Mask(self.positions, k_positions_BS, window=window)

    def recurrence(self, here, name: str, run: Callable, state_B, inputs_B1):
        document_B1 = self.documents(here.tokens_BT.shape)
        state_B, outputs_B1 = run(here.kept(name), inputs_B1, document_B1)
        here.keep(name, state_B)
        return outputs_B1


def decode(time, starts_B) -> Decode:
    """Return how new tokens at a time see texts that start at starts_B."""
    return Decode(positions=(time - starts_B)[:, None], time=time, starts_B=starts_B)
