"""How a position sees earlier ones: attention, the last vectors, running sums, and recurrences.

All mixing of positions in the model passes through a `Past`. This one sees whole sequences.
Generation replaces it by a cache (lm/generation/kv_cache.py); diagnostics and lm/interpret observe
attention.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from lm.layers.attention import Mask, causal_attention
from lm.parallel import collectives
from lm.system.errors import UserError


@flax.struct.dataclass
class Past:
    """The tokens of a sequence before each of them."""

    positions: Any = None  # integers (T,) or (B, T); None: 0 .. T-1
    # Integers (B, T), documents that must not see each other, in order, with positions that
    # increase by one; None: one document.
    segments: Any = None

    def attend(self, here, q_BTHK, k_BTGK, v_BTGK, window, *, bias_BSH=None, **options):
        """Return the attention of the queries over the keys up to their own, (B, T, H, K).

        `here` is the environment of the layer (lm/here.py), whose memory a cache uses. For `window`
        see `Mask`, for the rest `causal_attention`.
        """
        keys = self.keys(k_BTGK, v_BTGK, bias_BSH)
        return causal_attention(q_BTHK, mask=self.mask(q_BTHK.shape[-3], window), **keys, **options)

    def keys(self, k_BTGK, v_BTGK, bias_BTH) -> dict:
        """Return the keys, values and biases of all devices of a sequence, as arguments of
        `causal_attention`.
        """
        bias_BSH = None if bias_BTH is None else collectives.gather_sequence(bias_BTH, -2)
        k_BSGK, v_BSGK = collectives.gather_keys(k_BTGK), collectives.gather_keys(v_BTGK)
        return {"k_BSGK": k_BSGK, "v_BSGK": v_BSGK, "bias_BSH": bias_BSH}

    def mask(self, n_tokens: int, window) -> Mask:
        """Return which keys the n_tokens queries of this device see, among the keys of all devices
        of a sequence.
        """
        positions = (
            collectives.local_positions(n_tokens) if self.positions is None else self.positions
        )
        k_positions = collectives.gather_sequence(positions, -1)
        k_segments = (
            None if self.segments is None else collectives.gather_sequence(self.segments, -1)
        )
        # Positions are given with segments, and start again in each of them, or in decoding.
        in_order = self.positions is None or self.segments is not None
        contiguous = in_order and positions.shape == k_positions.shape
        return Mask(positions, k_positions, self.segments, k_segments, window, contiguous)

    def last(self, here, name: str, x_BTC, n: int):
        """Return the vectors of the last n positions up to each position, oldest first: (B, T, n,
        C).

        Vectors before the start of a document are 0. `here` as for `attend`; `name` is that of its
        cache, unique in the module.

        >>> Past().last(None, "x", jnp.array([[[1.0], [2.0], [3.0]]]), 2)[0, :, :, 0].tolist()
        [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
        """
        self._check_whole(name)
        T, batch = x_BTC.shape[-2], [(0, 0)] * (x_BTC.ndim - 2)

        def earlier(distance: int):
            x = jnp.pad(x_BTC, [*batch, (distance, 0), (0, 0)])[..., :T, :]
            if self.segments is None:
                return x
            same_BT = self.segments == jnp.pad(self.segments, [*batch, (distance, 0)])[..., :T]
            return jnp.where(same_BT[..., None], x, 0)

        return jnp.stack([earlier(distance) for distance in reversed(range(n))], axis=-2)

    def running_sum(self, here, name: str, x_BTC):
        """Return the sum over each position and all earlier ones of its document, (B, T, C).
        Arguments as for `last`.

        >>> Past(segments=jnp.array([[1, 1, 2]])).running_sum(None, "x", jnp.array([[[1.0], [2.0], [4.0]]]))[0, :, 0]
        Array([1., 3., 4.], dtype=float32)
        """
        self._check_whole(name)
        if self.segments is None:
            return jnp.cumsum(x_BTC, axis=-2)
        starts_BT = self._starts()

        def add(earlier, later):
            (a, a_starts), (b, b_starts) = earlier, later
            return jnp.where(b_starts, b, a + b), a_starts | b_starts

        starts_BT1 = jnp.broadcast_to(starts_BT[..., None], x_BTC.shape)
        return jax.lax.associative_scan(add, (x_BTC, starts_BT1), axis=x_BTC.ndim - 2)[0]

    def recurrence(self, here, name: str, chunk, state, inputs, size: int, *, n_batch: int = 1):
        """Return the outputs (B, T, ...) of a recurrence over the positions of each document.

        It runs over chunks of `size` positions, and in decoding of one.

        Args:
            here, name: as for `last`.
            chunk: (state, inputs of C positions of one text, document_C) -> (next state, outputs of
                C positions), for any C. Numbers in document_C ascend: positions with 0 continue the
                document of the state, those of another number see each other only, and the next
                state is that of the last position. Inputs of 0 must leave the state as it is,
                because they stand for padding.
            state: the state before the first token of a document, a tree of arrays without B.
            inputs: a tree of arrays (B, T, ...).
            size: positions of a chunk.
            n_batch: number of axes B.

        >>> def total(state, x_C, document_C):
        ...     same = jnp.tri(len(x_C), dtype=bool) & (document_C[:, None] == document_C)
        ...     sum_C = jnp.where(document_C == 0, state, 0) + same @ x_C
        ...     return sum_C[-1], sum_C
        >>> x_BT, segments_BT = jnp.array([[1.0, 2.0, 4.0, 8.0, 16.0]]), jnp.array([[1, 1, 1, 2, 2]])
        >>> Past(segments=segments_BT).recurrence(None, "x", total, jnp.float32(0), x_BT, size=2)
        Array([[ 1.,  3.,  7.,  8., 24.]], dtype=float32)
        """
        return self._recur(name, chunk, state, inputs, size, n_batch)[1]

    def _recur(self, name: str, chunk, state, inputs, size: int, n_batch: int):
        """Return the states (B, ...) after the last position, and the outputs."""
        self._check_whole(name)
        shape_BT = jax.tree.leaves(inputs)[0].shape[: n_batch + 1]
        starts_BT = jnp.zeros(shape_BT, bool) if self.segments is None else self._starts()
        T, size = shape_BT[-1], min(size, shape_BT[-1])

        def of_chunk(state, here):
            inputs, starts_C = here
            return chunk(state, inputs, jnp.cumsum(starts_C))

        def of_text(inputs_and_starts):
            def chunks(x):
                return jnp.pad(x, [(0, -T % size), *[(0, 0)] * (x.ndim - 1)]).reshape(
                    -1, size, *x.shape[1:]
                )

            last, outputs = jax.lax.scan(of_chunk, state, jax.tree.map(chunks, inputs_and_starts))
            return last, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:T], outputs)

        for _ in range(n_batch):
            of_text = jax.vmap(of_text)
        return of_text((inputs, starts_BT))

    def _starts(self):
        """Return which tokens are of another document than the token before, bool (B, T)."""
        return (
            self.segments
            != jnp.pad(self.segments, [(0, 0)] * (self.segments.ndim - 1) + [(1, 0)])[..., :-1]
        )

    def _check_whole(self, name: str):
        if collectives.global_seq_len(1) > 1:
            raise UserError(
                f"config.mesh.sequence: {name} needs whole sequences on a device; use sequence = 1"
            )


@flax.struct.dataclass
class OwnPosition(Past):
    """Each position sees itself only. Generation checks with it that a model mixes positions in no
    other way.
    """

    def attend(self, here, q_BTHK, k_BTGK, v_BTGK, window, **options):
        return jnp.repeat(v_BTGK, q_BTHK.shape[-2] // v_BTGK.shape[-2], axis=-2)

    def last(self, here, name: str, x_BTC, n: int):
        return jnp.pad(x_BTC[..., None, :], [(0, 0)] * (x_BTC.ndim - 1) + [(n - 1, 0), (0, 0)])

    def running_sum(self, here, name: str, x_BTC):
        return x_BTC

    def recurrence(self, here, name: str, chunk, state, inputs, size: int, *, n_batch: int = 1):
        shape_BT = jax.tree.leaves(inputs)[0].shape[: n_batch + 1]
        documents = Past(segments=jnp.broadcast_to(1 + jnp.arange(shape_BT[-1]), shape_BT))
        return documents.recurrence(here, name, chunk, state, inputs, size, n_batch=n_batch)
