"""How a position sees earlier ones: by attention, or by a recurrence.

All mixing of positions in the model passes through a `Past`. This one sees whole sequences.
Generation replaces it by a cache (lm/generation/kv_cache.py); diagnostics and lm/interpret observe
attention.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from lm.layers.attention import Mask
from lm.parallel import collectives


@flax.struct.dataclass
class Past:
    """What each position of a sequence sees: itself and earlier ones of its document."""

    positions: Any = None  # integers (T,) or (B, T); None: 0 .. T-1
    # Integers (B, T): the document of each token, in order. Documents do not see each other, and
    # positions increase by one in each. None: one document.
    segments: Any = None

    def earlier(self, here, name: str, x_BT, window):
        """Return an array of all positions that these may see, and which of them; `Here.earlier`.

        `here` is the environment of the layer (lm/here.py), whose memory a cache uses.
        """
        return all_positions(here, x_BT), self.mask(here, window)

    def mask(self, here, window) -> Mask:
        """Return which positions those of this device see, among those of all devices."""
        positions = here.positions
        k_positions = collectives.gather_sequence(positions, -1)
        k_segments = None
        if self.segments is not None:
            k_segments = collectives.gather_sequence(self.segments, -1)
        # Positions are given with segments, and start again in each of them, or in decoding.
        in_order = self.positions is None or self.segments is not None
        ahead = here.c.masked_diffusion
        contiguous = in_order and positions.shape == k_positions.shape and not ahead
        return Mask(positions, k_positions, self.segments, k_segments, window, contiguous, ahead)

    def observed(self, here, q_BTHK, k_BSGK, mask: Mask, options: dict) -> dict:
        """Return the options of `causal_attention`; observers measure here, or add a tap."""
        return options

    def recurrence(self, here, name: str, run: Callable, state_B, inputs_BT):
        """Return the outputs of a recurrence; see `Here.recurrence`.

        `run` is `scan` of a batch; `state_B` holds for each text its state before the first token.
        """
        document_BT = self.documents(here.tokens_BT.shape)
        return collectives.along_sequence(run, state_B, inputs_BT, document_BT)

    def documents(self, shape_BT: tuple):
        """Return the document of each token, ascending numbers; 0 continues an earlier state."""
        if self.segments is None:
            return jnp.zeros(shape_BT, jnp.int32)
        before = collectives.from_neighbor(self.segments[..., -1:], -1)
        return jnp.cumsum(jnp.diff(self.segments, prepend=before, axis=-1) != 0, axis=-1)


@flax.struct.dataclass
class OwnPosition(Past):
    """Each position sees itself only.

    Generation checks with it that a model mixes positions in no other way.
    """

    def mask(self, here, window) -> Mask:
        own_T = jnp.arange(here.tokens_BT.shape[-1])
        return Mask(own_T, own_T, own_T, own_T)

    def documents(self, shape_BT: tuple):
        return jnp.broadcast_to(1 + jnp.arange(shape_BT[-1]), shape_BT)


def all_positions(here, x_BT):
    """Return an array of the positions of all devices of a sequence: (B, S, ...)."""
    n_batch = here.tokens_BT.ndim - 1
    if x_BT.ndim == n_batch + 3:
        return collectives.gather_keys(x_BT)
    return collectives.gather_sequence(x_BT, n_batch)


def scan(chunk: Callable, size: int, state, inputs_T, document_T):
    """Return the state of a recurrence after the last position of a text, and the outputs (T, ...).

    Training, prefill and decoding call chunks here only. No padding is added, which could change
    the state: the last chunk may be shorter.

    Args:
        chunk, size: as for `Here.recurrence`.
        state: the state before the first position.
        inputs_T: a tree of arrays (T, ...).
        document_T: numbers that ascend; 0: the document of the state.
    """

    def next_chunk(before, xs_C):
        state, document = before
        inputs_C, document_C = xs_C
        state, outputs_C = chunk(state, inputs_C, document_C - document)
        return (state, document_C[-1]), outputs_C

    before, xs_T = (state, jnp.zeros_like(document_T[0])), (inputs_T, document_T)
    T = len(document_T)
    if size >= T:  # without a loop, as in each step of decoding
        (state, _), outputs_T = next_chunk(before, xs_T)
        return state, outputs_T
    n = T - T % size
    chunks = jax.tree.map(lambda x: x[:n].reshape(-1, size, *x.shape[1:]), xs_T)
    before, outputs = jax.lax.scan(next_chunk, before, chunks)
    outputs_T = jax.tree.map(lambda y: y.reshape(n, *y.shape[2:]), outputs)
    if n < T:
        before, rest = next_chunk(before, jax.tree.map(lambda x: x[n:], xs_T))
        outputs_T = jax.tree.map(lambda *parts: jnp.concatenate(parts), outputs_T, rest)
    return before[0], outputs_T


def last_vectors(earlier_NC, x_TC, document_T):
    """Return the last N vectors, and those up to each position, (T, N + 1, C): a chunk of `scan`.

    >>> x_TC, document_T = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([0, 0, 1])
    >>> last_vectors(jnp.array([[9.0]]), x_TC, document_T)[1][:, :, 0].tolist()
    [[9.0, 1.0], [1.0, 2.0], [0.0, 3.0]]
    """
    T, N = len(x_TC), len(earlier_NC)

    def beginning_at(s: int):  # of N + T positions
        x = jnp.concatenate([earlier_NC[s:], x_TC])[:T]
        same_T = document_T == jnp.pad(document_T, (N - s, 0))[:T]  # the state is of document 0
        return jnp.where(same_T[:, None], x, 0)

    last_TnC = jnp.stack([beginning_at(s) for s in range(N + 1)], axis=1)
    return last_TnC[-1, 1:], last_TnC


def running_sums(sum_C, x_TC, document_T):
    """Return the last sum, and the sum up to each position, (T, C): a chunk of `scan`.

    >>> x_TC, document_T = jnp.array([[1.0], [2.0], [4.0]]), jnp.array([0, 0, 1])
    >>> running_sums(jnp.array([8.0]), x_TC, document_T)[1][:, 0]
    Array([ 9., 11.,  4.], dtype=float32)
    """

    def add(earlier, later):  # the sums of the last documents of two ranges of positions
        (a, a_document), (b, b_document) = earlier, later
        return jnp.where(a_document == b_document, a + b, b), b_document

    document_T1 = document_T[:, None]
    sum_TC, _ = jax.lax.associative_scan(add, (x_TC, document_T1))
    sum_TC += jnp.where(document_T1 == 0, sum_C, 0)
    return sum_TC[-1], sum_TC
