"""Which attention runs on which platform, and the attention of JAX's own kernels.

The equation itself is in lm/layers/attention.py, which calls these functions.
"""

import functools

import jax
import jax.numpy as jnp

from lm.kernels import platform

CHUNK = 128
LANES = 128  # splash attention divides sequences into blocks of a multiple of it


def choose_implementation(
    implementation,
    *,
    platform,
    dtype,
    d_head,
    softcap,
    window,
    segments,
    contiguous,
    n_queries,
    more_scores=False,
):
    """Return the implementation that runs, and why; pure, to check a config before compilation.

    "einsum" is the reference and supports everything. "chunked" skips the keys that come after a
    chunk of queries or before its window, which leaves little more than half of the work; it needs
    contiguous positions and no segments. "xla" is jax.nn.dot_product_attention, without softcap.
    "cudnn" is its flash attention on NVIDIA GPUs: 16-bit inputs, d_head a multiple of 8 up to 128,
    contiguous positions, no softcap, and a window that is an int; it reads segments as a mask from
    memory. "splash" is JAX's flash attention on TPUs: contiguous positions, a multiple of 128
    tokens, and a window that is an int. "auto" is splash or cudnn if possible, else chunked if
    there are several chunks and it is possible, else einsum.

    Args:
        platform: as from lm.kernels.platform.target.
        window: None, an int, or anything else for a window known only at run time.
        segments, contiguous: bools, see `Mask` of lm/layers/attention.py.
        dtype, d_head, softcap, n_queries: see `causal_attention` there.
        more_scores: whether there is a bias or a sink, which only "einsum" and "chunked" have.

    Raises:
        ValueError: unknown implementation, or one that does not support the arguments; names one
            that does.

    >>> model = {"dtype": "float32", "d_head": 64, "softcap": None, "window": None, "segments": False}
    >>> choose_implementation("auto", platform="cpu", contiguous=True, n_queries=1024, **model)
    ('chunked', 'cudnn needs an NVIDIA GPU (the platform is cpu)')
    """
    no_more_scores = [("has no bias and no sink", more_scores)]
    no_softcap = [(f"has no softcap (softcap is {softcap})", softcap is not None)]
    one_document = [("has no document mask (segments are given)", segments)]
    whole_sequences = [("needs positions that are 0..T-1 (contiguous is False)", not contiguous)]
    varies = not isinstance(window, int | None)
    static_window = [("needs one window for all layers, known before compilation", varies)]
    dtype = jnp.dtype(dtype)
    wrong_width = d_head % 8 != 0 or d_head > 128
    gpu = [
        (f"needs an NVIDIA GPU (the platform is {platform})", platform not in ("gpu", "cuda")),
        (f"needs bfloat16 or float16 inputs (they are {dtype.name})", dtype.itemsize != 2),
        (f"needs d_head to be a multiple of 8 up to 128 (it is {d_head})", wrong_width),
    ]
    odd = segments and n_queries % 2 == 1
    even = [(f"needs an even number of tokens for documents (they are {n_queries})", odd)]
    tpu = [
        (f"needs a TPU (the platform is {platform})", platform != "tpu"),
        (f"needs a multiple of {LANES} tokens (they are {n_queries})", n_queries % LANES != 0),
    ]
    flash = no_more_scores + static_window + whole_sequences
    limits = {
        "einsum": [],
        "chunked": one_document + whole_sequences,
        "xla": no_softcap + no_more_scores,
        "cudnn": no_softcap + gpu + flash + even,
        "splash": tpu + flash,
    }
    if implementation not in ("auto", *limits):
        raise ValueError(
            f"attention is {implementation!r}; expected one of auto, {', '.join(limits)}"
        )
    problems = {}
    for name, conditions in limits.items():
        problems[name] = [what for what, violated in conditions if violated]
    if implementation == "auto":
        fused, chip = ("splash", "TPU") if platform == "tpu" else ("cudnn", "GPU")
        if not problems[fused]:
            return fused, f"flash attention on a {chip}"
        several_chunks = not problems["chunked"] and n_queries > CHUNK
        return "chunked" if several_chunks else "einsum", f"{fused} {problems[fused][0]}"
    if problems[implementation]:
        raise ValueError(
            f"attention implementation {implementation!r} "
            f"{', and '.join(problems[implementation])}; use 'auto' or 'einsum'"
        )
    return implementation, "set in the config"


def chunk_size(n_queries: int) -> int:
    """Return the number of queries per chunk: CHUNK, or more for at most 16 chunks to compile.

    >>> chunk_size(256), chunk_size(8192)
    (128, 512)
    """
    return max(CHUNK, -(-n_queries // 16))


def xla(q_BTHK, k_BSGK, v_BSGK, visible_BTS, *, scale):
    """Return jax.nn.dot_product_attention."""
    mask_BTS = jnp.broadcast_to(visible_BTS, (*q_BTHK.shape[:-3], *visible_BTS.shape[-2:]))
    q, k, v = (a.reshape(-1, *a.shape[-3:]) for a in (q_BTHK, k_BSGK, v_BSGK))
    mask_B1TS = mask_BTS.reshape(-1, 1, *mask_BTS.shape[-2:])
    out = jax.nn.dot_product_attention(q, k, v, mask=mask_B1TS, scale=scale, implementation="xla")
    return out.reshape(q_BTHK.shape)


def cudnn(q_BTHK, k_BTGK, v_BTGK, mask, scoring):
    """Return flash attention on NVIDIA GPUs over contiguous positions, with a scale only.

    For the arguments see `IMPLEMENTATIONS` of lm/layers/attention.py.
    """
    q, k, v = (a.reshape(-1, *a.shape[-3:]) for a in (q_BTHK, k_BTGK, v_BTGK))
    segments = [a.reshape(q.shape[:2]) for a in _segments(mask, q_BTHK)]
    left_right = None if mask.window is None else (mask.window - 1, 0)

    def attend(q, k, v, segments_BT=None):
        mask_B1TT = None
        if segments_BT is not None:
            # The causal and window masks cost nothing; documents need one, the same for all heads.
            mask_B1TT = (segments_BT[:, :, None] == segments_BT[:, None])[:, None]
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask_B1TT,
            is_causal=True,
            local_window_size=left_right,
            scale=scoring.scale,
            implementation="cudnn",
        )

    return _over_heads(attend, q, k, v, *segments).reshape(q_BTHK.shape)


def splash(q_BTHK, k_BTGK, v_BTGK, mask, scoring):
    """Return flash attention on TPUs over contiguous positions; arguments as of `cudnn`."""
    q, k, v = (jnp.swapaxes(a.reshape(-1, *a.shape[-3:]), 1, 2) for a in (q_BTHK, k_BTGK, v_BTGK))
    segments = _segments(mask, q_BTHK)
    attend = functools.partial(_splash_by_head, window=mask.window, softcap=scoring.softcap)
    q = (q.astype(jnp.float32) * scoring.scale).astype(q.dtype)  # the kernel has no scale
    out = _over_heads(attend, q, k, v, *segments, axis=1)
    return jnp.swapaxes(out, 1, 2).reshape(q_BTHK.shape)


def _segments(mask, q_BTHK) -> list:
    """Return the documents' numbers for each query; empty without documents."""
    if mask.q_segments is None:
        return []
    return [jnp.broadcast_to(mask.q_segments, q_BTHK.shape[:-2])]


def _splash_by_head(q_BHTK, k_BGTK, v_BGTK, segments_BT=None, *, window, softcap):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    n_heads, n = q_BHTK.shape[1:3]
    mask = splash.CausalMask((n, n))
    if window is not None:
        mask = splash.LocalMask((n, n), (window - 1, 0), 0)
    block = next(size for size in (512, 384, 256, LANES) if n % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * n_heads),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        interpret=platform.target() != "tpu",
    )
    segments = None if segments_BT is None else splash.SegmentIds(segments_BT, segments_BT)
    return jax.vmap(kernel)(q_BHTK, k_BGTK, v_BGTK, segments)


def _over_heads(attend, q, k, v, *others, axis=2):
    """Return attend(q, k, v, *others), mapped over the mesh axes that may share heads.

    Heads are in dimension `axis` of q, k, v and the result. Inside a map over some axes of a mesh,
    cuDNN's own rule for the others fails (jax 0.10.2 to 0.12.0: "'GSPMDSharding' object has no
    attribute 'spec'"). Kernels of TPUs have no rule.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
    if not axes or not mesh.manual_axes:
        return attend(q, k, v, *others)
    heads = jax.P(*[None] * axis, axes)
    mapped = jax.shard_map(
        attend,
        in_specs=(heads,) * 3 + (jax.P(),) * len(others),
        out_specs=heads,
        axis_names=set(axes),
        check_vma=False,
    )
    return mapped(q, k, v, *others)
