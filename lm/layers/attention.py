"""Causal attention for training and cached decoding: several implementations of one function."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.kernels import fused_attention, platform, softmax_means
from lm.kernels.fused_attention import choose_implementation
from lm.layers.linear import scores, weighted_sums
from lm.layers.linear import softcap as apply_softcap

UNLIMITED = 2**30  # a traced window of this size limits nothing


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees: at its own and earlier positions of its segment, in the window.

    Attributes:
        q_positions, k_positions: integers (B, T) and (B, S), or (T,) and (S,) for all examples.
            Keys at negative positions are never seen: empty slots of a cache, which may hold any
            finite numbers.
        q_segments, k_segments: integers shaped like the positions, or both None: documents that
            must not see each other.
        window: only keys at positions in (p - window, p] are seen from position p. None, an int, or
            a traced int32 scalar (so that a scan over layers may vary it), for which UNLIMITED
            means no window.
        contiguous: promises, unchecked, that queries and keys are the same tokens, and that the
            positions of tokens of one segment differ by as much as their indices. This allows
            "chunked" attention, which skips keys that no query of a chunk sees, and "cudnn" and
            "splash", which build their own causal mask.
        ahead: keys at later positions are seen, too (and in the window from p on, after p).

    Raises:
        ValueError: only one of the segments is given, or `window` is less than 1.
    """

    q_positions: Any
    k_positions: Any
    q_segments: Any = None
    k_segments: Any = None
    window: Any = None
    contiguous: bool = False
    ahead: bool = False

    def __post_init__(self):
        if (self.q_segments is None) != (self.k_segments is None):
            raise ValueError("Mask: give q_segments and k_segments, or neither")
        if isinstance(self.window, int) and self.window < 1:
            raise ValueError(
                f"Mask: window is {self.window}; it counts the query's own key, so it is at least 1"
            )

    @classmethod
    def causal(cls, n: int, window=None) -> "Mask":
        """Return the mask of n tokens at positions 0..n-1."""
        return cls(jnp.arange(n), jnp.arange(n), window=window, contiguous=True)

    def visible(self):
        """Return the mask as an array, bool (..., T, S).

        >>> Mask.causal(3, window=2).visible().astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]], dtype=int32)
        """
        q_positions = jnp.asarray(self.q_positions)
        k_positions = jnp.asarray(self.k_positions)
        distance = q_positions[..., :, None] - k_positions[..., None, :]
        if self.ahead:
            distance = jnp.abs(distance)
        mask = (distance >= 0) & (k_positions >= 0)[..., None, :]
        if self.window is not None:
            mask &= distance < self.window
        if self.q_segments is not None:
            mask &= self.q_segments[..., :, None] == self.k_segments[..., None, :]
        return mask


def causal_attention(
    q_BTHK,
    k_BSGK,
    v_BSGK,
    mask: Mask,
    *,
    softcap=None,
    scale=None,
    bias_BSH=None,
    sink_H=None,
    implementation="auto",
    tap=None,
):
    """Return softmax(scale q k) v over the keys that each query sees (arXiv:1706.03762, eq. 1).

    Scores and softmax are float32. A query that sees no key returns zeros and passes no gradient.

    Args:
        q_BTHK: queries, with any leading dimensions for B.
        k_BSGK, v_BSGK: keys and values with the same leading dimensions. Query head h uses key and
            value head h // (H / G).
        mask: which keys each query sees.
        softcap: scores are capped to (-softcap, softcap) before the mask; None: no cap.
        scale: factor of the scores, a number; None: 1 / sqrt(K).
        bias_BSH: added to the scores of each key after the cap, or None. It may be the part of the
            key in a difference a_t - a_s. The part of query t is the same for all keys, so it does
            not change the softmax without a sink.
        sink_H: logits of one more key for each head, whose value is 0, or None.
        implementation: see `choose_implementation` of lm/kernels/fused_attention.py.
        tap: called with "scores" and "weights" and the arrays (B, H, T, S), after the cap and after
            the softmax; its results take their places. All scores then exist at once.

    Returns:
        (B, T, H, K) in the dtype of q.

    Raises:
        ValueError: shapes do not fit each other, or the implementation does not support the
            arguments, or none an array as scale.

    >>> q, k, v = (jnp.ones((5, 2, 4)) for _ in range(3))  # 5 positions, 2 heads of width 4
    >>> causal_attention(q, k, v, Mask.causal(5)).shape
    (5, 2, 4)
    """
    _check_shapes(q_BTHK, k_BSGK, v_BSGK, mask, bias_BSH)
    if not isinstance(scale, int | float | None):
        raise ValueError(
            "causal_attention: scale is not a number; multiply the queries by what is learned or "
            "varies"
        )
    d_head = q_BTHK.shape[-1]
    chosen, _ = choose_implementation(
        implementation,
        platform=platform.target(),
        dtype=q_BTHK.dtype,
        d_head=d_head,
        softcap=softcap,
        window=mask.window,
        segments=mask.q_segments is not None,
        contiguous=mask.contiguous,
        n_queries=q_BTHK.shape[-3],
        more_scores=bias_BSH is not None or sink_H is not None,
    )
    if scale is None:
        scale = 1 / math.sqrt(d_head)
    bias_BHTS = None if bias_BSH is None else jnp.swapaxes(bias_BSH, -1, -2)[..., None, :]
    sink_HT = None if sink_H is None else sink_H[:, None]
    scoring = Scoring(scale, softcap, bias_BHTS, sink_HT)
    if tap is not None:
        return _einsum(q_BTHK, k_BSGK, v_BSGK, mask, scoring, tap)
    return IMPLEMENTATIONS[chosen](q_BTHK, k_BSGK, v_BSGK, mask, scoring)


class Scoring(NamedTuple):
    """How scores (B, H, T, S) follow from products of queries and keys, see `causal_attention`.

    The bias and the sink may have length 1 along T and B.
    """

    scale: float
    softcap: float | None = None
    bias_BHTS: jax.Array | None = None
    sink_HT: jax.Array | None = None


def attend(q_BTHK, k_BSGK, v_BSGK, visible_BTS, scoring: Scoring, tap=None):
    """Return softmax(scores) v, (B, T, H, K): the equation of training, prefill and decoding.

    JAX's own kernels compute the same. A query that sees nothing returns the mean of all values.
    `tap`: see `causal_attention`.
    """
    decoding = q_BTHK.shape[-3] == 1  # one query of each text
    q_BHTK, k_BGSK, v_BGSK = (jnp.swapaxes(x, -2, -3) for x in (q_BTHK, k_BSGK, v_BSGK))
    n_shared = q_BHTK.shape[-3] // k_BGSK.shape[-3]
    if n_shared > 1 and not decoding:
        # An einsum with separate axes of groups and queries needs no copies of keys, but is not a
        # plain batched product, which takes 1.6 times as long on a CPU.
        k_BGSK, v_BGSK = (jnp.repeat(x, n_shared, axis=-3) for x in (k_BGSK, v_BGSK))

    def by_key_head(x_BHTX):
        """Return the rows of all queries that share a key head, (B, G, R, X) with R = H / G * T."""
        *batch, _, _, width = x_BHTX.shape
        return x_BHTX.reshape(*batch, k_BGSK.shape[-3], -1, width)

    scores_BGRS = scores(by_key_head(q_BHTK), k_BGSK, decoding=decoding)
    scores_BHTS = scores_BGRS.reshape(*q_BHTK.shape[:-1], -1) * scoring.scale
    if scoring.softcap is not None:
        scores_BHTS = apply_softcap(scores_BHTS, scoring.softcap)
    if scoring.bias_BHTS is not None:
        scores_BHTS += scoring.bias_BHTS
    if tap is not None:
        scores_BHTS = tap("scores", scores_BHTS)
    # Not -inf: a query that sees no key would be NaN.
    lowest = jnp.finfo(scores_BHTS.dtype).min
    scores_BHTS = jnp.where(visible_BTS[..., None, :, :], scores_BHTS, lowest)
    n_keys = scores_BHTS.shape[-1]
    if scoring.sink_HT is not None:  # one more key, whose value is 0
        sink_BHT1 = jnp.broadcast_to(scoring.sink_HT[..., None], (*scores_BHTS.shape[:-1], 1))
        scores_BHTS = jnp.concatenate([scores_BHTS, sink_BHT1.astype(scores_BHTS.dtype)], axis=-1)
        v_BGSK = jnp.pad(v_BGSK, [(0, 0)] * (v_BGSK.ndim - 2) + [(0, 1), (0, 0)])
    if tap is not None:  # which does not see the sink
        weights_BHTS = tap("weights", jax.nn.softmax(scores_BHTS)[..., :n_keys])
        out_BGRK = weighted_sums(by_key_head(weights_BHTS), v_BGSK[..., :n_keys, :])
    elif softmax_means.enabled(v_BGSK) and not decoding:
        out_BGRK = softmax_means.softmax_means(by_key_head(scores_BHTS), v_BGSK)
    else:
        # Divide the output by the softmax's sum, not the weights: the output is narrower, and so is
        # the derivative.
        largest_BHT1 = jax.lax.stop_gradient(jnp.max(scores_BHTS, axis=-1, keepdims=True))
        weights_BGRS = by_key_head(jnp.exp(scores_BHTS - largest_BHT1))
        sums_BGRK = weighted_sums(weights_BGRS, v_BGSK, decoding=decoding)
        out_BGRK = sums_BGRK / jnp.sum(weights_BGRS, axis=-1, keepdims=True)
    out_BHTK = out_BGRK.reshape(*q_BHTK.shape[:-1], -1).astype(v_BGSK.dtype)
    return jnp.swapaxes(out_BHTK, -2, -3)


def _einsum(q_BTHK, k_BSGK, v_BSGK, mask, scoring, tap=None):
    visible_BTS = mask.visible()
    out_BTHK = attend(q_BTHK, k_BSGK, v_BSGK, visible_BTS, scoring, tap)
    return _zero_blind_queries(out_BTHK, visible_BTS)


def _zero_blind_queries(out_BTHK, visible_BTS):
    """Set outputs of queries that see no key to zero; they were finite, so the gradient is zero."""
    sees_BT = jnp.any(visible_BTS, axis=-1)
    return jnp.where(sees_BT[..., None, None], out_BTHK, 0)


def _chunked(q_BTHK, k_BTGK, v_BTGK, mask, scoring):
    """Attention for one chunk of queries at a time.

    Keys after the chunk, or before the window of its first query, are left out.
    """
    n = q_BTHK.shape[-3]
    starts = range(0, n, fused_attention.chunk_size(n))
    # Joined chunks, not slices of all keys: the derivative of a slice is an array of all keys for
    # every chunk.
    cuts = list(starts[1:])
    q_chunks = jnp.split(q_BTHK, cuts, axis=-3)
    k_chunks = jnp.split(k_BTGK, cuts, axis=-3)
    v_chunks = jnp.split(v_BTGK, cuts, axis=-3)
    outs = []
    for i, begin in enumerate(starts):
        end = begin + q_chunks[i].shape[-3]
        oldest = 0
        if isinstance(mask.window, int):
            oldest = max(0, begin + 1 - mask.window)
        first, unseen = divmod(oldest, starts.step)
        k_BSGK = _joined(k_chunks[first : i + 1], unseen)
        v_BSGK = _joined(v_chunks[first : i + 1], unseen)
        own = Mask(jnp.arange(begin, end), jnp.arange(oldest, end), window=mask.window)
        own_scoring = scoring
        if scoring.bias_BHTS is not None:
            own_scoring = scoring._replace(bias_BHTS=scoring.bias_BHTS[..., oldest:end])
        outs.append(attend(q_chunks[i], k_BSGK, v_BSGK, own.visible(), own_scoring))
    return jnp.concatenate(outs, axis=-3)


def _joined(chunks: list, n: int):
    """Return the positions of some chunks without the first n."""
    first, *others = chunks
    return jnp.concatenate([first[..., n:, :, :], *others], axis=-3)


def _xla(q_BTHK, k_BSGK, v_BSGK, mask, scoring):
    visible_BTS = mask.visible()
    out_BTHK = fused_attention.xla(q_BTHK, k_BSGK, v_BSGK, visible_BTS, scale=scoring.scale)
    return _zero_blind_queries(out_BTHK, visible_BTS)


# (queries, keys, values, Mask, Scoring) -> outputs
IMPLEMENTATIONS = {
    "einsum": _einsum,
    "chunked": _chunked,
    "xla": _xla,
    "cudnn": fused_attention.cudnn,
    "splash": fused_attention.splash,
}


def _check_shapes(q_BTHK, k_BSGK, v_BSGK, mask, bias_BSH):
    shapes = f"q {q_BTHK.shape}, k {k_BSGK.shape}, v {v_BSGK.shape}"
    if k_BSGK.shape != v_BSGK.shape:
        raise ValueError(f"causal_attention: keys and values differ in shape: {shapes}")
    if q_BTHK.shape[:-3] != k_BSGK.shape[:-3] or q_BTHK.shape[-1] != k_BSGK.shape[-1]:
        raise ValueError(
            f"causal_attention: queries and keys differ in batch or head width: {shapes}"
        )
    if bias_BSH is not None and bias_BSH.shape[-2] != k_BSGK.shape[-3]:
        raise ValueError(
            f"causal_attention: bias_BSH {bias_BSH.shape} is not of all keys: {shapes}; "
            "here.earlier returns an array of all positions"
        )
    if q_BTHK.shape[-2] % k_BSGK.shape[-2]:
        raise ValueError(f"causal_attention: key heads must divide query heads: {shapes}")
    if mask.contiguous and q_BTHK.shape[-3] != k_BSGK.shape[-3]:
        raise ValueError(
            f"causal_attention: contiguous positions need as many queries as keys: {shapes}"
        )
