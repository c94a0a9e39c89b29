"""The layers that benchmarks/layers.py times, in pairs: ours compiled by jit, and PyTorch's run eagerly.

In the group "columns" the second function is not PyTorch's but LayerNorm in JAX, in a loop over the columns.
"""

import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

from lm.layers import feed_forward, losses, norms
from lm.layers.attention import Mask, causal_attention

Case = tuple[str, tuple[Callable, int], Callable]  # (name, (our function, its bytes), the other function)


def jitted(f, *arrays) -> tuple[Callable, int]:
    """Compile f and its vector-Jacobian product at these arrays; see `compiled`."""
    return compiled(lambda *arrays: (lambda out, vjp: (out, vjp(out)))(*jax.vjp(f, *arrays)), *arrays)


def compiled(f, *arrays) -> tuple[Callable, int]:
    """Compile f at these arrays.

    Returns:
        (a function without arguments that runs it, bytes of the program's arguments, results and temporaries)
    """
    run = jax.jit(f).lower(*arrays).compile()
    arrays, m = jax.device_put(arrays), run.memory_analysis()
    size = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return lambda: jax.block_until_ready(run(*arrays)), size


def eager(f, *arrays) -> Callable:
    """Return a function without arguments that runs f and its vector-Jacobian product in PyTorch."""
    tensors = [torch.from_numpy(a).requires_grad_() for a in arrays]

    def run():
        out = f(*tensors)
        return torch.autograd.grad(out, tensors, out.detach())

    return run


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(math.prod(shape)).standard_normal(shape, np.float32)


def norm_cases() -> Iterator[Case]:
    x, scale, bias = normal(4096, 768), normal(768), normal(768) + 1
    theirs = eager(lambda x, scale, bias: F.layer_norm(x, (768,), scale, bias), x, scale, bias)
    yield "LayerNorm (4096, 768); torch", jitted(norms.layer_norm, x, scale, bias), theirs
    theirs = eager(lambda x, scale: F.rms_norm(x, (768,), scale, 1e-5), x, scale)
    yield "RMSNorm (4096, 768); torch", jitted(norms.rms_norm, x, scale), theirs


def layer_norm_by_columns(x, scale, bias, eps=1e-5):
    """Compute LayerNorm from the recurrence of Welford (1962), literally: in a loop over the columns of x (N, D)."""
    n, D = x.shape

    def add(i, moments):
        mean_N, total_N = moments
        deviation_N = x[:, i] - mean_N
        mean_N = mean_N + deviation_N / (i + 1)
        return mean_N, total_N + deviation_N * (x[:, i] - mean_N)

    mean_N, total_N = jax.lax.fori_loop(0, D, add, (jnp.zeros(n), jnp.zeros(n)))
    return (x - mean_N[:, None]) * jax.lax.rsqrt(total_N / D + eps)[:, None] * scale + bias


def column_cases() -> Iterator[Case]:
    arrays = normal(4096, 768), normal(768), normal(768) + 1
    for name, compile_ in (("forward alone", compiled), ("forward and backward", jitted)):
        loop, _ = compile_(layer_norm_by_columns, *arrays)
        yield f"LayerNorm (4096, 768), {name}; a loop over columns", compile_(norms.layer_norm, *arrays), loop


def attention_cases() -> Iterator[Case]:
    q, k, v = (normal(8, 256, 6, 64) for _ in range(3))
    theirs = eager(
        lambda *qkv: F.scaled_dot_product_attention(*(a.transpose(1, 2) for a in qkv), is_causal=True), q, k, v
    )
    for name in ("einsum", "chunked", "xla"):
        ours = jitted(functools.partial(causal_attention, mask=Mask.causal(256), implementation=name), q, k, v)
        yield f"attention (8, 256, 6, 64), {name}; torch's SDPA", ours, theirs


def head_cases() -> Iterator[Case]:
    h, w, targets = normal(1, 2048, 128), normal(32_074, 128), np.arange(2048)[None]

    def whole(h, w):
        return losses.softmax_cross_entropy(losses.head_logits(h, losses.Head(w, transposed=True)), targets)[0]

    def chunks(h, w):
        return losses.chunked_softmax_cross_entropy(h, losses.Head(w, transposed=True), targets, chunk_size=512)[0]

    theirs = eager(lambda h, w: F.cross_entropy(h[0] @ w.T, torch.from_numpy(targets[0]), reduction="sum"), h, w)
    yield "head and loss (2048, 128, 32074), whole; torch", jitted(whole, h, w), theirs
    yield "head and loss (2048, 128, 32074), chunks of 512; torch", jitted(chunks, h, w), theirs


def ffn_cases() -> Iterator[Case]:
    arrays = normal(2048, 384), normal(384, 1536), normal(384, 1536) + 1, normal(1536, 384)
    ours = jitted(functools.partial(feed_forward.glu, activation="silu"), *arrays)
    theirs = eager(lambda x, gate, up, down: (F.silu(x @ gate) * (x @ up)) @ down, *arrays)
    yield "SwiGLU (2048, 384, 1536); torch", ours, theirs


CASES = {
    "norms": norm_cases,
    "columns": column_cases,
    "attention": attention_cases,
    "head": head_cases,
    "ffn": ffn_cases,
}
