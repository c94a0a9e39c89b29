"""Causal attention for training and for cached decoding, with its implementations behind one signature."""

import functools
import logging
import math

import jax
import jax.numpy as jnp

from lm.layers.linear import scores, weighted_sums
from lm.layers.linear import softcap as apply_softcap

IMPLEMENTATIONS = ("auto", "einsum", "chunked", "xla", "cudnn")
CHUNK = 128
UNLIMITED = 2**30  # a window of at least this many keys is no window


def causal_attention(
    q_BTHK,
    k_BSGK,
    v_BSGK,
    *,
    q_positions,
    k_positions,
    q_segments=None,
    k_segments=None,
    window=None,
    softcap=None,
    scale=None,
    implementation="auto",
    contiguous=False,
):
    """softmax(scale q k) v over the keys that each query sees (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    q_BTHK: queries, with any leading dimensions for B; k_BSGK, v_BSGK: keys and values with the same leading
        dimensions. Query head h uses key and value head h // (H / G). Returns (B, T, H, K) in the dtype of q.
    q_positions, k_positions: integers (B, T) and (B, S), or (T,) and (S,) for all examples. A query sees the keys at
        its own and earlier positions. Keys at negative positions are never seen (empty slots of a
        cache, which may hold any finite numbers).
    q_segments, k_segments: integers shaped like the positions, both or neither: only keys of the query's own segment
        (document) are seen.
    window: only keys at positions in (p - window, p] are seen from position p. None, an int, or a traced int32
        scalar (so that a scan over layers may vary it); UNLIMITED (2**30) or more is no window.
    softcap: scores are capped to (-softcap, softcap) before the mask. scale: 1 / sqrt(K) by default.
    implementation: see choose_implementation.
    contiguous: the caller's promise, not checked, that both positions are 0..T-1 for every example. It allows
        "chunked", which leaves out keys that no query of a chunk sees, and "cudnn", which makes its own causal mask.
    A query that sees no key returns zeros, and passes no gradient. Scores and softmax are float32.
    Raises ValueError for shapes that do not fit each other and for an implementation that cannot do what is asked.
    """
    _check(q_BTHK, k_BSGK, v_BSGK, q_segments, k_segments, window, contiguous)
    d_head = q_BTHK.shape[-1]
    scale = 1 / math.sqrt(d_head) if scale is None else scale
    if isinstance(window, int) and window >= UNLIMITED:
        window = None
    chosen, reason = choose_implementation(
        implementation,
        platform=jax.default_backend(),
        dtype=q_BTHK.dtype,
        d_head=d_head,
        softcap=softcap,
        window=window,
        segments=q_segments is not None,
        contiguous=contiguous,
        n_queries=q_BTHK.shape[-3],
    )
    if implementation == "auto":
        _say_once(f"attention: {chosen} ({reason})")
    if chosen == "cudnn":
        return _cudnn(q_BTHK, k_BSGK, v_BSGK, window, scale)
    if chosen == "chunked":
        return _chunked(q_BTHK, k_BSGK, v_BSGK, window, scale, softcap)
    mask_BTS = visible(q_positions, k_positions, q_segments, k_segments, window)
    if chosen == "xla":
        out_BTHK = _xla(q_BTHK, k_BSGK, v_BSGK, mask_BTS, scale)
    else:
        out_BTHK = _einsum(q_BTHK, k_BSGK, v_BSGK, mask_BTS, scale, softcap)
    # Masked scores are the lowest finite number: a row that sees nothing is so far a mean of all values, and finite.
    sees_BT = jnp.any(mask_BTS, axis=-1)
    return jnp.where(sees_BT[..., None, None], out_BTHK, 0)


def visible(q_positions, k_positions, q_segments=None, k_segments=None, window=None):
    """Which key each query sees: bool (..., T, S). Arguments as for causal_attention."""
    distance = jnp.asarray(q_positions)[..., :, None] - jnp.asarray(k_positions)[..., None, :]
    mask = (distance >= 0) & (jnp.asarray(k_positions) >= 0)[..., None, :]
    if window is not None:
        mask &= distance < window
    if q_segments is not None:
        mask &= q_segments[..., :, None] == k_segments[..., None, :]
    return mask


def choose_implementation(implementation, *, platform, dtype, d_head, softcap, window, segments, contiguous, n_queries):
    """Which implementation runs, and why: a pure function of its arguments, so that a config can be checked before
    compilation.

    implementation: "einsum", the reference, does everything everywhere; "chunked" is the same without the keys that
        come after a chunk of queries or lie before its window, little more than half of the work, for contiguous
        positions and no segments; "xla" is jax.nn.dot_product_attention, which has no softcap; "cudnn" is its flash
        attention on NVIDIA GPUs, for 16-bit inputs, d_head a multiple of 8 up to 128, contiguous positions, no softcap,
        no segments, and a window that is an int; "auto" takes cudnn where it can, else chunked where that makes several
        chunks, else einsum.
    platform: as from jax.default_backend(); window: None, an int, or anything else for one known only at run time;
    segments, contiguous: bools; the others as for causal_attention.
    Returns (name, reason). Raises ValueError, saying what would do, where a choice cannot do what is asked.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation is {implementation!r}; expected one of {', '.join(IMPLEMENTATIONS)}"
        )
    needs_xla = [] if softcap is None else [f"has no softcap (softcap is {softcap})"]
    needs_chunked = [
        problem
        for problem, found in (
            ("has no document mask (segments are given)", segments),
            ("needs positions that are 0..T-1 (contiguous is False)", not contiguous),
        )
        if found
    ]
    needs_cudnn = needs_xla + [
        problem
        for problem, found in (
            (f"needs an NVIDIA GPU (the platform is {platform})", platform not in ("gpu", "cuda")),
            (f"needs bfloat16 or float16 inputs (they are {jnp.dtype(dtype).name})", jnp.dtype(dtype).itemsize != 2),
            (f"needs d_head to be a multiple of 8 up to 128 (it is {d_head})", d_head % 8 != 0 or d_head > 128),
            ("needs one window for all layers, known before compilation", not isinstance(window, int | None)),
        )
        if found
    ]
    needs_cudnn += needs_chunked
    if implementation == "auto":
        if not needs_cudnn:
            return "cudnn", "flash attention for 16-bit inputs on a GPU"
        return "einsum" if needs_chunked or n_queries <= CHUNK else "chunked", f"cudnn {needs_cudnn[0]}"
    problems = {"einsum": [], "chunked": needs_chunked, "xla": needs_xla, "cudnn": needs_cudnn}[implementation]
    if problems:
        raise ValueError(
            f"attention implementation {implementation!r} {', and '.join(problems)}; 'auto' or 'einsum' would do"
        )
    return implementation, "as configured"


def _einsum(q_BTHK, k_BSGK, v_BSGK, mask_BTS, scale, softcap):
    """The reference: two products around a softmax."""
    # Key heads are repeated for the queries that share them: an einsum with group and query axes kept apart costs
    # nothing in memory but is no plain batched product, which on a CPU takes 1.6 times as long.
    n_shared = q_BTHK.shape[-2] // k_BSGK.shape[-2]
    k_BSHK, v_BSHK = (jnp.repeat(a, n_shared, axis=-2) if n_shared > 1 else a for a in (k_BSGK, v_BSGK))
    scores_BHTS = apply_softcap(scores(q_BTHK, k_BSHK) * scale, softcap)
    scores_BHTS = jnp.where(mask_BTS[..., None, :, :], scores_BHTS, jnp.finfo(scores_BHTS.dtype).min)
    # The softmax's sum divides the output, which is narrower than the scores, and so does its derivative.
    weights_BHTS = jnp.exp(scores_BHTS - jax.lax.stop_gradient(jnp.max(scores_BHTS, axis=-1, keepdims=True)))
    sum_BTH = jnp.swapaxes(jnp.sum(weights_BHTS, axis=-1), -1, -2)
    return (weighted_sums(weights_BHTS, v_BSHK) / sum_BTH[..., None]).astype(v_BSHK.dtype)


def chunk_size(n_queries: int) -> int:
    """How many queries a chunk has: CHUNK, or as many as make 16 chunks, each a piece of program to compile."""
    return max(CHUNK, -(-n_queries // 16))


def _chunked(q_BTHK, k_BTGK, v_BTGK, window, scale, softcap):
    """_einsum for a chunk of queries at a time, with the keys up to its last query and from its first one's window on:
    those left out have weight zero.
    """
    n, outs = q_BTHK.shape[-3], []
    size = chunk_size(n)
    for begin in range(0, n, size):
        end = min(begin + size, n)
        first = max(0, begin + 1 - window) if isinstance(window, int) else 0
        mask_TS = visible(jnp.arange(begin, end), jnp.arange(first, end), window=window)
        k, v = (a[..., first:end, :, :] for a in (k_BTGK, v_BTGK))
        outs.append(_einsum(q_BTHK[..., begin:end, :, :], k, v, mask_TS, scale, softcap))
    return jnp.concatenate(outs, axis=-3)


def _xla(q_BTHK, k_BSGK, v_BSGK, mask_BTS, scale):
    mask_BTS = jnp.broadcast_to(mask_BTS, (*q_BTHK.shape[:-3], *mask_BTS.shape[-2:]))
    q, k, v = (a.reshape(-1, *a.shape[-3:]) for a in (q_BTHK, k_BSGK, v_BSGK))
    mask = mask_BTS.reshape(-1, 1, *mask_BTS.shape[-2:])
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="xla")
    return out.reshape(q_BTHK.shape)


def _cudnn(q_BTHK, k_BSGK, v_BSGK, window, scale):
    # With an explicit mask cuDNN would read (B, H, T, S) from memory; its own causal and window masks cost nothing.
    q, k, v = (a.reshape(-1, *a.shape[-3:]) for a in (q_BTHK, k_BSGK, v_BSGK))
    left_right = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=left_right, scale=scale, implementation="cudnn"
    )
    return out.reshape(q_BTHK.shape)


def _check(q_BTHK, k_BSGK, v_BSGK, q_segments, k_segments, window, contiguous):
    shapes = f"q {q_BTHK.shape}, k {k_BSGK.shape}, v {v_BSGK.shape}"
    if k_BSGK.shape != v_BSGK.shape:
        raise ValueError(f"causal_attention: keys and values differ in shape: {shapes}")
    if q_BTHK.shape[:-3] != k_BSGK.shape[:-3] or q_BTHK.shape[-1] != k_BSGK.shape[-1]:
        raise ValueError(f"causal_attention: queries and keys differ in batch or head width: {shapes}")
    if q_BTHK.shape[-2] % k_BSGK.shape[-2]:
        raise ValueError(f"causal_attention: key heads must divide query heads: {shapes}")
    if (q_segments is None) != (k_segments is None):
        raise ValueError("causal_attention: give q_segments and k_segments, or neither")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"causal_attention: window is {window}; it counts the query's own key, so it is at least 1")
    if contiguous and q_BTHK.shape[-3] != k_BSGK.shape[-3]:
        raise ValueError(f"causal_attention: contiguous positions need as many queries as keys: {shapes}")


@functools.cache
def _say_once(message):
    logging.getLogger("lm").info(message)
