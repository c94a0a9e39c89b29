"""A cache of keys and values: each new token is computed for one position instead of the full context.

The cache is a pytree with the keys and the values (B, S, G, K) of each layer, for key and value heads only. Slot s holds
the newest position p with p % S == s. A layer with a window has as many slots as its window, so the cache is a ring
buffer: a new token replaces one that the layer no longer sees. All other layers have a slot for every position.

`Prefill` and `Decode` replace the attention of lm/model.py, and keep the cache in its variables.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lm.layers.attention import Mask, causal_attention

COLLECTION = "cache"  # the Linen collection that holds the cache


def slot_positions(last_B, n_slots: int):
    """Return the position in each slot (B, S) when `last_B` are the last positions; negative: the slot is empty.

    >>> slot_positions(jnp.array([5, 1]), 4)  # the first example has overwritten positions 0 and 1
    Array([[ 4,  5,  2,  3],
           [ 0,  1, -2, -1]], dtype=int32)
    """
    last_B1 = jnp.asarray(last_B)[:, None]
    return last_B1 - (last_B1 - jnp.arange(n_slots)) % n_slots


def fill(x_BTGK, lengths_B, n_slots: int):
    """Return slots (B, S, G, K) with the keys or values of the first lengths_B positions; empty slots repeat one."""
    positions_BS = jnp.maximum(slot_positions(lengths_B - 1, n_slots), 0)
    return jnp.take_along_axis(x_BTGK, positions_BS[:, :, None, None], axis=1)


def write(slots_BSGK, new_B1GK, positions_B):
    """Return the slots with the keys or values of one new position per example."""

    def write_one(slots_SGK, new_1GK, slot):
        return jax.lax.dynamic_update_slice_in_dim(slots_SGK, new_1GK, slot, axis=0)

    return jax.vmap(write_one)(slots_BSGK, new_B1GK, positions_B % slots_BSGK.shape[1])


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Attention over prompts, which fills the cache.

    Attributes:
        lengths_B: the number of tokens of each prompt; tokens after them are padding.
        n_slots: the number of positions that the cache can hold.
    """

    lengths_B: jax.Array
    n_slots: int

    def __call__(self, module, q_BTHK, k_BTGK, v_BTGK, window, **options):
        n_slots = self.n_slots if window is None else min(window, self.n_slots)
        for name, x in (("k", k_BTGK), ("v", v_BTGK)):
            module.put_variable(COLLECTION, name, fill(x, self.lengths_B, n_slots))
        return causal_attention(q_BTHK, k_BTGK, v_BTGK, Mask.causal(q_BTHK.shape[1], window), **options)


@dataclasses.dataclass(frozen=True)
class Decode:
    """Attention of one new token per example over the cache, to which its key and value are added.

    Attributes:
        positions_B: the position of each new token.
    """

    positions_B: jax.Array

    def __call__(self, module, q_B1HK, k_B1GK, v_B1GK, window, **options):
        slots = {}
        for name, new in (("k", k_B1GK), ("v", v_B1GK)):
            slots[name] = write(module.get_variable(COLLECTION, name), new, self.positions_B)
            module.put_variable(COLLECTION, name, slots[name])
        k_positions_BS = slot_positions(self.positions_B, slots["k"].shape[1])
        mask = Mask(self.positions_B[:, None], k_positions_BS, window=window)
        return causal_attention(q_B1HK, slots["k"], slots["v"], mask, **options | {"implementation": "einsum"})
