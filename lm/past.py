"""How a position sees earlier ones: attention, the last vectors, and running sums.

All mixing of positions in the model passes through a `Past`. This one sees whole sequences. Generation replaces it by a
cache (lm/generation/kv_cache.py); diagnostics and lm/interpret observe attention.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from lm.errors import UserError
from lm.layers.attention import Mask, causal_attention
from lm.parallel import collectives


@flax.struct.dataclass
class Past:
    """The tokens of a sequence before each of them.

    Attributes:
        positions: integers (T,) or (B, T); None: 0 .. T-1.
        segments: integers (B, T), documents that must not see each other, in order, with positions that increase
            by one; None: one document.
    """

    positions: Any = None
    segments: Any = None

    def attend(self, module, q_BTHK, k_BTGK, v_BTGK, window, *, bias_BSH=None, **options):
        """Return the attention of the queries over the keys up to their own, (B, T, H, K).

        `module` is the module of lm/model.py that asks, which can keep variables. For `window` see `Mask`, for the rest
        `causal_attention`.
        """
        keys = self.keys(k_BTGK, v_BTGK, bias_BSH)
        return causal_attention(q_BTHK, mask=self.mask(q_BTHK.shape[-3], window), **keys, **options)

    def keys(self, k_BTGK, v_BTGK, bias_BTH) -> dict:
        """Return the keys, values and biases of all devices of a sequence, as arguments of `causal_attention`."""
        bias_BSH = None if bias_BTH is None else collectives.gather_sequence(bias_BTH, -2)
        k_BSGK, v_BSGK = collectives.gather_keys(k_BTGK), collectives.gather_keys(v_BTGK)
        return {"k_BSGK": k_BSGK, "v_BSGK": v_BSGK, "bias_BSH": bias_BSH}

    def mask(self, n_tokens: int, window) -> Mask:
        """Return which keys the n_tokens queries of this device see, among the keys of all devices of a sequence."""
        positions = collectives.local_positions(n_tokens) if self.positions is None else self.positions
        k_positions = collectives.gather_sequence(positions, -1)
        k_segments = None if self.segments is None else collectives.gather_sequence(self.segments, -1)
        # Positions are given with segments, and start again in each of them, or in decoding.
        in_order = self.positions is None or self.segments is not None
        contiguous = in_order and positions.shape == k_positions.shape
        return Mask(positions, k_positions, self.segments, k_segments, window, contiguous)

    def last(self, module, name: str, x_BTC, n: int):
        """Return the vectors of the last n positions up to each position, oldest first: (B, T, n, C).

        Vectors before the start of a document are 0. `module` as for `attend`; `name` is that of its cache, unique in
        the module.

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

    def running_sum(self, module, name: str, x_BTC):
        """Return the sum over each position and all earlier ones of its document, (B, T, C). Arguments as for `last`.

        >>> Past(segments=jnp.array([[1, 1, 2]])).running_sum(None, "x", jnp.array([[[1.0], [2.0], [4.0]]]))[0, :, 0]
        Array([1., 3., 4.], dtype=float32)
        """
        self._check_whole(name)
        if self.segments is None:
            return jnp.cumsum(x_BTC, axis=-2)
        starts_BT = self.segments != jnp.pad(self.segments, [(0, 0)] * (self.segments.ndim - 1) + [(1, 0)])[..., :-1]

        def add(earlier, later):
            (a, a_starts), (b, b_starts) = earlier, later
            return jnp.where(b_starts, b, a + b), a_starts | b_starts

        starts_BT1 = jnp.broadcast_to(starts_BT[..., None], x_BTC.shape)
        return jax.lax.associative_scan(add, (x_BTC, starts_BT1), axis=x_BTC.ndim - 2)[0]

    def _check_whole(self, name: str):
        if collectives.global_seq_len(1) > 1:
            raise UserError(f"config.mesh.sequence: {name} needs whole sequences on a device; use sequence = 1")


@flax.struct.dataclass
class OwnPosition(Past):
    """Each position sees itself only. Generation checks with it that a model mixes positions in no other way."""

    def attend(self, module, q_BTHK, k_BTGK, v_BTGK, window, **options):
        return jnp.repeat(v_BTGK, q_BTHK.shape[-2] // v_BTGK.shape[-2], axis=-2)

    def last(self, module, name: str, x_BTC, n: int):
        return jnp.pad(x_BTC[..., None, :], [(0, 0)] * (x_BTC.ndim - 1) + [(n - 1, 0), (0, 0)])

    def running_sum(self, module, name: str, x_BTC):
        return x_BTC
