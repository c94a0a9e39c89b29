"""Single layers, forward and backward, beside torch's: python -m benchmarks.layers --pin

Ours are compiled by jit, torch's run eagerly; both in one process, in turns, float32. Both share a process, so of its
memory no side's share can be told; "arrays" is what our compiled program takes, arguments and results included.
"""

import functools
import itertools
import math
import os
import statistics
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"  # torch's layers are on the CPU too; ours must be told before jax is imported

import jax
import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.compare import given, in_turns, markdown, options, publish, ratio, shown
from lm.layers import feed_forward, losses, norms
from lm.layers.attention import Mask, causal_attention
from lm.runtime import retain_freed_memory


def main() -> int:
    a = given(options("layers", __doc__))
    retain_freed_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cases = itertools.chain(norm_cases(), attention_cases(), head_cases(), ffn_cases())
    rows = [compared(name, ours, theirs, a.rounds) for name, ours, theirs in cases]
    clock = "cpu" if a.pin else "wall"
    header = ["layer", f"ms ({clock})", "beside", "beside / ours", "by wall time", "arrays"]
    cells = [
        [
            r["layer"], *(f"{r[side][clock]:.2f}" for side in ("ours_ms", "theirs_ms")), shown(r["ratio"][clock]),
            f"{r['ratio']['wall']['median']:.2f}", f"{r['program_bytes'] / 2**20:.0f} MiB",
        ]
        for r in rows
    ]  # fmt: skip
    publish(a, rows, markdown(header, cells))
    return 0


def compared(name: str, ours, theirs, rounds: int) -> dict:
    run, program_bytes = ours
    turns = in_turns(rounds, timer(run), timer(theirs))
    seconds = {clock: [[turn[clock] for turn in side] for side in turns] for clock in ("cpu", "wall")}
    medians = [{clock: 1e3 * statistics.median(sides[k]) for clock, sides in seconds.items()} for k in (0, 1)]
    found = {"layer": name, "ours_ms": medians[0], "theirs_ms": medians[1], "program_bytes": program_bytes}
    return found | {"ratio": {clock: ratio(*sides) for clock, sides in seconds.items()}}


def timer(f):
    """A function that gives the seconds of one of several calls of f, after a first one."""
    f()
    began = time.perf_counter()
    f()
    n = max(1, round(0.1 / (time.perf_counter() - began)))

    def seconds() -> dict:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(n):
            f()
        return {"cpu": (time.process_time() - cpu) / n, "wall": (time.perf_counter() - wall) / n}

    return seconds


def jitted(f, *arrays):
    """(f and its derivative at the arrays, as a function without arguments; the bytes of all arrays of the program)."""
    run = jax.jit(lambda *arrays: (lambda out, vjp: (out, vjp(out)))(*jax.vjp(f, *arrays)))
    run = run.lower(*arrays).compile()
    arrays, m = jax.device_put(arrays), run.memory_analysis()
    size = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return lambda: jax.block_until_ready(run(*arrays)), size


def eager(f, *arrays):
    """The same in torch."""
    tensors = [torch.from_numpy(a).requires_grad_() for a in arrays]

    def run():
        out = f(*tensors)
        return torch.autograd.grad(out, tensors, out.detach())

    return run


# ---- What is compared: (name, ours, beside) --------------------------------------------------------------------------


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(math.prod(shape)).standard_normal(shape, np.float32)


def norm_cases():
    x, scale, bias = normal(4096, 768), normal(768), normal(768) + 1
    theirs = eager(lambda x, scale, bias: F.layer_norm(x, (768,), scale, bias), x, scale, bias)
    yield "LayerNorm (4096, 768); torch", jitted(norms.layer_norm, x, scale, bias), theirs
    theirs = eager(lambda x, scale: F.rms_norm(x, (768,), scale, 1e-5), x, scale)
    yield "RMSNorm (4096, 768); torch", jitted(norms.rms_norm, x, scale), theirs


def attention_cases():
    q, k, v = (normal(8, 256, 6, 64) for _ in range(3))
    theirs = eager(
        lambda *qkv: F.scaled_dot_product_attention(*(a.transpose(1, 2) for a in qkv), is_causal=True), q, k, v
    )
    for name in ("einsum", "chunked", "xla"):
        ours = jitted(functools.partial(causal_attention, mask=Mask.causal(256), implementation=name), q, k, v)
        yield f"attention (8, 256, 6, 64), {name}; torch's SDPA", ours, theirs


def head_cases():
    h, w, targets = normal(1, 2048, 128), normal(32_074, 128), np.arange(2048)[None]

    def whole(h, w):
        return losses.softmax_cross_entropy(losses.head_logits(h, losses.Head(w, transposed=True)), targets)[0]

    def chunks(h, w):
        return losses.chunked_softmax_cross_entropy(h, losses.Head(w, transposed=True), targets, chunk_size=512)[0]

    theirs = eager(lambda h, w: F.cross_entropy(h[0] @ w.T, torch.from_numpy(targets[0]), reduction="sum"), h, w)
    yield "head and loss (2048, 128, 32074), whole; torch", jitted(whole, h, w), theirs
    yield "head and loss (2048, 128, 32074), chunks of 512; torch", jitted(chunks, h, w), theirs


def ffn_cases():
    arrays = normal(2048, 384), normal(384, 1536), normal(384, 1536) + 1, normal(1536, 384)
    ours = jitted(functools.partial(feed_forward.glu, activation="silu"), *arrays)
    theirs = eager(lambda x, gate, up, down: (F.silu(x @ gate) * (x @ up)) @ down, *arrays)
    yield "SwiGLU (2048, 384, 1536); torch", ours, theirs


if __name__ == "__main__":
    sys.exit(main())
