"""Causal attention for training and for cached decoding, with several implementations behind one function."""

import dataclasses
import functools
import logging
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.kernels import platform, softmax_means
from lm.layers.linear import scores, weighted_sums
from lm.layers.linear import softcap as apply_softcap

CHUNK = 128
LANES = 128  # splash attention divides sequences into blocks of a multiple of it
UNLIMITED = 2**30  # a traced window of this size limits nothing


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees: those of its own segment, at its own and earlier positions, within the window.

    Attributes:
        q_positions, k_positions: integers (B, T) and (B, S), or (T,) and (S,) for all examples. Keys at negative
            positions are never seen: empty slots of a cache, which may hold any finite numbers.
        q_segments, k_segments: integers shaped like the positions, or both None: documents that must not see each
            other.
        window: only keys at positions in (p - window, p] are seen from position p. None, an int, or a traced int32
            scalar (so that a scan over layers may vary it), for which UNLIMITED means no window.
        contiguous: promises, unchecked, that queries and keys are the same tokens, and that the positions of tokens of
            one segment differ by as much as their indices. This allows "chunked" attention, which skips keys that no
            query of a chunk sees, and "cudnn" and "splash", which build their own causal mask.

    Raises:
        ValueError: only one of the segments is given, or `window` is less than 1.
    """

    q_positions: Any
    k_positions: Any
    q_segments: Any = None
    k_segments: Any = None
    window: Any = None
    contiguous: bool = False

    def __post_init__(self):
        if (self.q_segments is None) != (self.k_segments is None):
            raise ValueError("Mask: give q_segments and k_segments, or neither")
        if isinstance(self.window, int) and self.window < 1:
            raise ValueError(f"Mask: window is {self.window}; it counts the query's own key, so it is at least 1")

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
        distance = jnp.asarray(self.q_positions)[..., :, None] - jnp.asarray(self.k_positions)[..., None, :]
        mask = (distance >= 0) & (jnp.asarray(self.k_positions) >= 0)[..., None, :]
        if self.window is not None:
            mask &= distance < self.window
        if self.q_segments is not None:
            mask &= self.q_segments[..., :, None] == self.k_segments[..., None, :]
        return mask


def causal_attention(
    q_BTHK, k_BSGK, v_BSGK, mask: Mask, *, softcap=None, scale=None, bias_BSH=None, sink_H=None, implementation="auto",
    tap=None,
):  # fmt: skip
    """Return softmax(scale q k) v over the keys that each query sees (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    Scores and softmax are float32. A query that sees no key returns zeros and passes no gradient.

    Args:
        q_BTHK: queries, with any leading dimensions for B.
        k_BSGK, v_BSGK: keys and values with the same leading dimensions. Query head h uses key and value head
            h // (H / G).
        mask: which keys each query sees.
        softcap: scores are capped to (-softcap, softcap) before the mask; None: no cap.
        scale: factor of the scores; None: 1 / sqrt(K).
        bias_BSH: added to the scores of each key after the cap, or None. What a query adds to all of its scores changes
            nothing, so this includes differences of sums up to key and query.
        sink_H: logits of one more key for each head, whose value is 0, or None.
        implementation: see `choose_implementation`.
        tap: called with "scores" and "weights" and the arrays (B, H, T, S), after the cap and after the softmax; its
            results take their places. All scores then exist at once.

    Returns:
        (B, T, H, K) in the dtype of q.

    Raises:
        ValueError: shapes do not fit each other, or the implementation does not support the arguments.

    >>> q, k, v = (jnp.ones((5, 2, 4)) for _ in range(3))  # 5 positions, 2 heads of width 4
    >>> causal_attention(q, k, v, Mask.causal(5)).shape
    (5, 2, 4)
    """
    _check_shapes(q_BTHK, k_BSGK, v_BSGK, mask)
    d_head = q_BTHK.shape[-1]
    chosen, reason = choose_implementation(
        implementation, platform=platform.target(), dtype=q_BTHK.dtype, d_head=d_head, softcap=softcap,
        window=mask.window, segments=mask.q_segments is not None, contiguous=mask.contiguous,
        n_queries=q_BTHK.shape[-3], more_scores=bias_BSH is not None or sink_H is not None,
    )  # fmt: skip
    scale = 1 / math.sqrt(d_head) if scale is None else scale
    scoring = Scoring(scale, softcap, bias_BSH, sink_H)
    if tap is not None:
        return _tapped(q_BTHK, k_BSGK, v_BSGK, mask, scoring, tap)
    if implementation == "auto":
        _log_once(f"attention: {chosen}; {reason}")
    return IMPLEMENTATIONS[chosen](q_BTHK, k_BSGK, v_BSGK, mask, scoring)


class Scoring(NamedTuple):
    """How scores follow from products of queries and keys, see `causal_attention`."""

    scale: float
    softcap: float | None = None
    bias_BSH: jax.Array | None = None
    sink_H: jax.Array | None = None


def choose_implementation(
    implementation, *, platform, dtype, d_head, softcap, window, segments, contiguous, n_queries, more_scores=False
):
    """Return the implementation that runs, and why. A pure function, so a config can be checked before compilation.

    "einsum" is the reference and supports everything. "chunked" skips the keys that come after a chunk of queries or
    before its window, which leaves little more than half of the work; it needs contiguous positions and no segments.
    "xla" is jax.nn.dot_product_attention, without softcap. "cudnn" is its flash attention on NVIDIA GPUs: 16-bit
    inputs, d_head a multiple of 8 up to 128, contiguous positions, no softcap, no segments, and a window that is an
    int. "splash" is JAX's flash attention on TPUs: contiguous positions, a multiple of 128 tokens, and a window that is
    an int. "auto" is splash or cudnn if possible, else chunked if there are several chunks and it is possible, else
    einsum.

    Args:
        implementation: "auto" or a key of IMPLEMENTATIONS.
        platform: as from lm.kernels.platform.target.
        window: None, an int, or anything else for a window known only at run time.
        segments, contiguous: bools, see `Mask`.
        dtype, d_head, softcap, n_queries: see `causal_attention`.
        more_scores: whether there is a bias or a sink, which only "einsum" and "chunked" have.

    Returns:
        (name, reason).

    Raises:
        ValueError: unknown implementation, or one that does not support the arguments; names one that does.

    >>> model = {"dtype": "float32", "d_head": 64, "softcap": None, "window": None, "segments": False}
    >>> choose_implementation("auto", platform="cpu", contiguous=True, n_queries=1024, **model)
    ('chunked', 'cudnn needs an NVIDIA GPU (the platform is cpu)')
    """
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention is {implementation!r}; expected one of auto, {', '.join(IMPLEMENTATIONS)}")
    no_more_scores = [("has no bias and no sink", more_scores)]
    no_softcap = [(f"has no softcap (softcap is {softcap})", softcap is not None)]
    one_document = [("has no document mask (segments are given)", segments)]
    whole_sequences = [("needs positions that are 0..T-1 (contiguous is False)", not contiguous)]
    static_window = [("needs one window for all layers, known before compilation", not isinstance(window, int | None))]
    gpu = [
        (f"needs an NVIDIA GPU (the platform is {platform})", platform not in ("gpu", "cuda")),
        (f"needs bfloat16 or float16 inputs (they are {jnp.dtype(dtype).name})", jnp.dtype(dtype).itemsize != 2),
        (f"needs d_head to be a multiple of 8 up to 128 (it is {d_head})", d_head % 8 != 0 or d_head > 128),
    ]
    tpu = [
        (f"needs a TPU (the platform is {platform})", platform != "tpu"),
        (f"needs a multiple of {LANES} tokens (they are {n_queries})", n_queries % LANES != 0),
    ]
    flash = no_more_scores + static_window + whole_sequences
    limits = {
        "einsum": [],
        "chunked": one_document + whole_sequences,
        "xla": no_softcap + no_more_scores,
        "cudnn": no_softcap + gpu + flash + one_document,
        "splash": tpu + flash,
    }
    problems = {name: [what for what, violated in found if violated] for name, found in limits.items()}
    if implementation == "auto":
        fused = "splash" if platform == "tpu" else "cudnn"
        if not problems[fused]:
            return fused, "flash attention on a TPU" if platform == "tpu" else "flash attention on a GPU"
        several_chunks = not problems["chunked"] and n_queries > CHUNK
        return "chunked" if several_chunks else "einsum", f"{fused} {problems[fused][0]}"
    if problems[implementation]:
        raise ValueError(
            f"attention implementation {implementation!r} {', and '.join(problems[implementation])}; "
            "use 'auto' or 'einsum'"
        )
    return implementation, "set in the config"


def _einsum(q_BTHK, k_BSGK, v_BSGK, mask, scoring):
    visible_BTS = mask.visible()
    out_BTHK = _masked_softmax(q_BTHK, k_BSGK, v_BSGK, visible_BTS, scoring)
    return _zero_blind_queries(out_BTHK, visible_BTS)


def _scores(q_BTHK, k_BSGK, v_BSGK, visible_BTS, scoring: Scoring, tap=None):
    """Return the masked scores (B, H, T, S), and the values with all heads; a sink is one more score at the end."""
    # Key heads are repeated for the queries that share them. An einsum with separate group and query axes needs no
    # extra memory but is not a plain batched product, which takes 1.6 times as long on a CPU.
    n_shared = q_BTHK.shape[-2] // k_BSGK.shape[-2]
    k_BSHK, v_BSHK = (jnp.repeat(a, n_shared, axis=-2) if n_shared > 1 else a for a in (k_BSGK, v_BSGK))
    scores_BHTS = apply_softcap(scores(q_BTHK, k_BSHK) * scoring.scale, scoring.softcap)
    if scoring.bias_BSH is not None:
        scores_BHTS += jnp.swapaxes(scoring.bias_BSH, -1, -2)[..., None, :]
    scores_BHTS = scores_BHTS if tap is None else tap("scores", scores_BHTS)
    scores_BHTS = jnp.where(visible_BTS[..., None, :, :], scores_BHTS, jnp.finfo(scores_BHTS.dtype).min)
    if scoring.sink_H is not None:
        sink_BHT1 = jnp.broadcast_to(scoring.sink_H[:, None, None], (*scores_BHTS.shape[:-1], 1))
        scores_BHTS = jnp.concatenate([scores_BHTS, sink_BHT1.astype(scores_BHTS.dtype)], axis=-1)
    return scores_BHTS, v_BSHK


def _tapped(q_BTHK, k_BSGK, v_BSGK, mask, scoring, tap):
    """Attention with its scores and weights observed or replaced."""
    visible_BTS = mask.visible()
    scores_BHTS, v_BSHK = _scores(q_BTHK, k_BSGK, v_BSGK, visible_BTS, scoring, tap)
    weights_BHTS = tap("weights", jax.nn.softmax(scores_BHTS)[..., : k_BSGK.shape[-3]])  # without the sink
    return _zero_blind_queries(weighted_sums(weights_BHTS, v_BSHK).astype(v_BSHK.dtype), visible_BTS)


def _masked_softmax(q_BTHK, k_BSGK, v_BSGK, visible_BTS, scoring):
    """The reference: two products around a softmax. A query that sees nothing returns the mean of all values."""
    scores_BHTS, v_BSHK = _scores(q_BTHK, k_BSGK, v_BSGK, visible_BTS, scoring)
    if scoring.sink_H is None and softmax_means.enabled(v_BSHK):
        return softmax_means.softmax_means(scores_BHTS, v_BSHK).astype(v_BSHK.dtype)
    # Divide the output by the softmax's sum, not the weights: the output is narrower, and so is the derivative.
    weights_BHTS = jnp.exp(scores_BHTS - jax.lax.stop_gradient(jnp.max(scores_BHTS, axis=-1, keepdims=True)))
    sum_BTH = jnp.swapaxes(jnp.sum(weights_BHTS, axis=-1), -1, -2)
    weights_BHTS = weights_BHTS[..., : v_BSHK.shape[-3]]  # without the sink
    return (weighted_sums(weights_BHTS, v_BSHK) / sum_BTH[..., None]).astype(v_BSHK.dtype)


def _zero_blind_queries(out_BTHK, visible_BTS):
    """Set the output of queries that see no key to zero. It was finite, so its gradient is zero, too."""
    return jnp.where(jnp.any(visible_BTS, axis=-1)[..., None, None], out_BTHK, 0)


def chunk_size(n_queries: int) -> int:
    """Return the number of queries per chunk: CHUNK, or more so that there are at most 16 chunks to compile.

    >>> chunk_size(256), chunk_size(8192)
    (128, 512)
    """
    return max(CHUNK, -(-n_queries // 16))


def _chunked(q_BTHK, k_BTGK, v_BTGK, mask, scoring):
    """Attention for one chunk of queries at a time, without the keys after it or before its first query's window."""
    n = q_BTHK.shape[-3]
    starts = range(0, n, chunk_size(n))
    # Joined chunks, not slices of all keys: the derivative of a slice is an array of all keys for every chunk.
    q_chunks, k_chunks, v_chunks = (jnp.split(a, list(starts[1:]), axis=-3) for a in (q_BTHK, k_BTGK, v_BTGK))
    outs = []
    for i, begin in enumerate(starts):
        end = begin + q_chunks[i].shape[-3]
        oldest = max(0, begin + 1 - mask.window) if isinstance(mask.window, int) else 0
        first, unseen = divmod(oldest, starts.step)
        k, v = (
            jnp.concatenate([chunks[first][..., unseen:, :, :], *chunks[first + 1 : i + 1]], axis=-3)
            for chunks in (k_chunks, v_chunks)
        )
        visible_TS = Mask(jnp.arange(begin, end), jnp.arange(oldest, end), window=mask.window).visible()
        bias_BSH = None if scoring.bias_BSH is None else scoring.bias_BSH[..., oldest:end, :]
        outs.append(_masked_softmax(q_chunks[i], k, v, visible_TS, scoring._replace(bias_BSH=bias_BSH)))
    return jnp.concatenate(outs, axis=-3)


def _xla(q_BTHK, k_BSGK, v_BSGK, mask, scoring):
    visible_BTS = mask.visible()
    mask_BTS = jnp.broadcast_to(visible_BTS, (*q_BTHK.shape[:-3], *visible_BTS.shape[-2:]))
    q, k, v = (a.reshape(-1, *a.shape[-3:]) for a in (q_BTHK, k_BSGK, v_BSGK))
    mask_B1TS = mask_BTS.reshape(-1, 1, *mask_BTS.shape[-2:])
    out = jax.nn.dot_product_attention(q, k, v, mask=mask_B1TS, scale=scoring.scale, implementation="xla")
    return _zero_blind_queries(out.reshape(q_BTHK.shape), visible_BTS)


def _cudnn(q_BTHK, k_BSGK, v_BSGK, mask, scoring):
    # cuDNN would read an explicit mask (B, H, T, S) from memory; its own causal and window masks cost nothing.
    q, k, v = (a.reshape(-1, *a.shape[-3:]) for a in (q_BTHK, k_BSGK, v_BSGK))
    left_right = None if mask.window is None else (mask.window - 1, 0)
    attend = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        local_window_size=left_right,
        scale=scoring.scale,
        implementation="cudnn",
    )
    return _over_heads(attend, q, k, v).reshape(q_BTHK.shape)


def _splash(q_BTHK, k_BSGK, v_BSGK, mask, scoring):
    q, k, v = (jnp.swapaxes(a.reshape(-1, *a.shape[-3:]), 1, 2) for a in (q_BTHK, k_BSGK, v_BSGK))
    segments = [] if mask.q_segments is None else [jnp.broadcast_to(mask.q_segments, q_BTHK.shape[:-2])]
    attend = functools.partial(_splash_by_head, window=mask.window, softcap=scoring.softcap)
    q = (q.astype(jnp.float32) * scoring.scale).astype(q.dtype)  # the kernel has no scale
    out = _over_heads(attend, q, k, v, *segments, axis=1)
    return jnp.swapaxes(out, 1, 2).reshape(q_BTHK.shape)


def _splash_by_head(q_BHTK, k_BGTK, v_BGTK, segments_BT=None, *, window, softcap):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    n_heads, n = q_BHTK.shape[1:3]
    mask = splash.CausalMask((n, n)) if window is None else splash.LocalMask((n, n), (window - 1, 0), 0)
    block = next(size for size in (512, 384, 256, LANES) if n % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * n_heads), head_shards=1, q_seq_shards=1, attn_logits_soft_cap=softcap,
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        interpret=platform.target() != "tpu",
    )  # fmt: skip
    segments = None if segments_BT is None else splash.SegmentIds(segments_BT, segments_BT)
    return jax.vmap(kernel)(q_BHTK, k_BGTK, v_BGTK, segments)


def _over_heads(attend, q, k, v, *others, axis=2):
    """Return attend(q, k, v, *others), mapped over the mesh axes that XLA's partitioner would share heads over.

    Heads are in dimension `axis` of q, k, v and the result. Inside a map over some axes of a mesh, cuDNN's own rule for
    the others fails (jax 0.10.2: "'GSPMDSharding' object has no attribute 'spec'"). Kernels of TPUs have no rule.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
    if not axes or not mesh.manual_axes:
        return attend(q, k, v, *others)
    heads = jax.P(*[None] * axis, axes)
    mapped = jax.shard_map(
        attend, in_specs=(heads,) * 3 + (jax.P(),) * len(others), out_specs=heads, axis_names=set(axes), check_vma=False
    )
    return mapped(q, k, v, *others)


IMPLEMENTATIONS = {"einsum": _einsum, "chunked": _chunked, "xla": _xla, "cudnn": _cudnn, "splash": _splash}


def _check_shapes(q_BTHK, k_BSGK, v_BSGK, mask):
    shapes = f"q {q_BTHK.shape}, k {k_BSGK.shape}, v {v_BSGK.shape}"
    if k_BSGK.shape != v_BSGK.shape:
        raise ValueError(f"causal_attention: keys and values differ in shape: {shapes}")
    if q_BTHK.shape[:-3] != k_BSGK.shape[:-3] or q_BTHK.shape[-1] != k_BSGK.shape[-1]:
        raise ValueError(f"causal_attention: queries and keys differ in batch or head width: {shapes}")
    if q_BTHK.shape[-2] % k_BSGK.shape[-2]:
        raise ValueError(f"causal_attention: key heads must divide query heads: {shapes}")
    if mask.contiguous and q_BTHK.shape[-3] != k_BSGK.shape[-3]:
        raise ValueError(f"causal_attention: contiguous positions need as many queries as keys: {shapes}")


@functools.cache
def _log_once(message):
    logging.getLogger("lm").info(message)
