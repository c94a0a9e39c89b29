"""What a run would take on machines that are not here: python -m lm.train --config FILE --plan --device h100:64

Nothing is allocated. Memory of parameters and optimizer follows from their shardings, and is checked against the
compiled program's arguments; activations, logits, communication and time are formulas for the named device. What XLA
would really keep in flight on it is not known before it is compiled there.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from lm import parameters
from lm.config import Config, layer_windows
from lm.cost import flops
from lm.errors import UserError
from lm.layers.attention import choose_implementation, chunk_size
from lm.parallel import sharding
from lm.parallel.mesh import BATCH_AXES, check_mesh, current_mesh, make_mesh, mesh_sizes
from lm.step import init_state, n_micro_batches, train_step


@dataclasses.dataclass(frozen=True)
class Device:
    """What the vendor says of one device; bytes and bytes a second, links in one direction.

    kind: as in lm/cost/flops.py. link: to other devices of its node or slice, which has n_near of them;
    network: to devices beyond.
    """

    kind: str
    memory: float
    bandwidth: float
    link: float
    n_near: int
    network: float


# NVIDIA's data sheets of the A100 (2021), H100 SXM (2023), H200 (2023) and L4 (2023); NVLink is given for both
# directions together and halved here. The network is that of NVIDIA's DGX A100 and H100, one port of 200 or 400 Gb/s a
# GPU; the L4 has PCIe 4.0 x16 and, assumed here, 8 to a node and 100 Gb/s between nodes. Google Cloud's pages "TPU v4",
# "TPU v5e", "TPU v5p" and "TPU v6e": the interconnect of a chip, one direction (400 GB/s both ways for the v5e);
# beyond a slice, assumed here, 100 Gb/s for each host of 4 chips.
DEVICES = {
    "a100": Device("NVIDIA A100-SXM4-80GB", 80e9, 2.039e12, 300e9, 8, 25e9),
    "h100": Device("NVIDIA H100 80GB HBM3", 80e9, 3.35e12, 450e9, 8, 50e9),
    "h200": Device("NVIDIA H200", 141e9, 4.8e12, 450e9, 8, 50e9),
    "l4": Device("NVIDIA L4", 24e9, 300e9, 32e9, 8, 1.5e9),
    "v4": Device("TPU v4", 32e9, 1.228e12, 300e9, 4096, 3e9),
    "v5e": Device("TPU v5 lite", 16e9, 819e9, 200e9, 256, 3e9),
    "v5p": Device("TPU v5", 95e9, 2.765e12, 600e9, 8960, 3e9),
    "v6e": Device("TPU v6 lite", 32e9, 1.64e12, 448e9, 256, 3e9),
}


def named_device(text: str) -> tuple[str, int]:
    """ "h100:64" as (name, how many); raises UserError."""
    name, _, count = text.partition(":")
    if name not in DEVICES or not count.isdecimal() or int(count) < 1:
        raise UserError(
            f"--device: {text!r} is not NAME:COUNT with a name of {', '.join(DEVICES)}; h100:64, for example"
        )
    return name, int(count)


def plan(config: Config, name: str, n_devices: int) -> str:
    """The plan of a resolved config, for people; raises UserError for a mesh that does not fit."""
    device, sizes = DEVICES[name], check_mesh(config, n_devices)
    state = State(config, n_devices)
    table, t = parameters.parameter_table(config.model), config.train
    per_token = flops.flops_per_token(config.model, t.seq_len)
    kept = {
        "parameters": state.parameters,
        "optimizer state": state.optimizer,
        "gradients": state.gradients,
        "completed: two layers, embeddings, head": completed(config, sizes),
        f"activations (remat {config.model.remat})": activations(config, device, sizes),
        "logits and their gradient": logits(config, sizes),
    }
    sent = list(communication(config, sizes))
    peak = flops.peak_flops(device.kind, config.model.compute_dtype)
    if peak is None:
        dtype = config.model.compute_dtype
        raise UserError(f"config.model.compute_dtype: no {dtype} peak is published for {name}; use bfloat16")
    updated = (2 * state.parameters + 2 * state.optimizer + state.gradients) / device.bandwidth
    fast, slow = step_time(config, peak, sum(s.sent / _speed(device, sizes, s.axes) for s in sent), updated, n_devices)
    mfu = functools.partial(flops.mfu, flops_per_token=per_token, n_devices=n_devices, peak=peak)
    tokens = t.batch_size * t.seq_len
    total = sum(kept.values())
    lines = [
        f"{n_devices} x {name}: " + " x ".join(f"{axis} {size}" for axis, size in sizes.items()),
        f"{parameters.count(table):,} parameters, {per_token:,.0f} FLOPs a token, {tokens:,} tokens a step "
        f"in {micro_batches(config, sizes)} micro-batches",
        "",
        "memory a device",
        *(f"  {what:<38}{_bytes(size):>12}" for what, size in kept.items()),
        f"  {'together':<38}{_bytes(total):>12}  of {_bytes(device.memory)}"
        + ("" if total < 0.9 * device.memory else ": TOO MUCH (a tenth is left to XLA and fragmentation)"),
        f"  parameters, optimizer state and batch: {_bytes(state.compiled)} in the compiled program's arguments, "
        + ("as computed" if state.compiled == state.arguments else f"{_bytes(state.arguments)} COMPUTED"),
        "",
        "communication a step and device",
        *(f"  {s.what:<52}{s.kind:<16}{s.axis:<16}{_bytes(s.sent):>12}" for s in sent),
        *([] if sent else ["  none"]),
        *(["  (and muon's own, which is not counted)"] if config.optimizer.name == "muon" and n_devices > 1 else []),
        "",
        f"step time {fast:.3g} to {slow:.3g} s: {tokens / slow:,.0f} to {tokens / fast:,.0f} tokens/s, "
        f"MFU {mfu(tokens / slow):.0%} to {mfu(tokens / fast):.0%}",
        f"  the first: products at the vendor's peak for {config.model.compute_dtype}, all communication hidden behind "
        "them;",
        "  the second: products at 40 % of it, nothing hidden; both with the optimizer's reads and writes, without "
        "latencies and the host",
        f"  {t.steps:,} steps, {t.steps * tokens:,} tokens: {_hours(t.steps * fast)} to {_hours(t.steps * slow)}",
    ]
    return "\n".join(lines)


# ---- Memory ----------------------------------------------------------------------------------------------------------


class State:
    """Bytes on each device of what a step is given, from the shardings and from the compiled program."""

    def __init__(self, config: Config, n_devices: int):
        # Compiled with the layers scanned and attention that a CPU has: the arguments are the same.
        model = dataclasses.replace(config.model, scan_layers=True, attention="einsum")
        config = dataclasses.replace(config, model=model)
        sizes, t = mesh_sizes(config.mesh, n_devices), config.train
        with jax.set_mesh(make_mesh(sizes)):
            table = parameters.parameter_table(config.model)
            init = functools.partial(init_state, config)
            state = sharding.shard_state(jax.eval_shape(init, 0), table)
            shape = (t.batch_size, t.seq_len + 1)
            rows = jax.NamedSharding(current_mesh(), jax.P(BATCH_AXES))
            batch = {"tokens": jax.ShapeDtypeStruct(shape, np.int32, sharding=rows)}
            self.parameters, self.optimizer = local_bytes(state.params), local_bytes(state.opt_state)
            # The gradients of a micro-batch exist beside their sum, which is float32.
            summed = 4 / jnp.dtype(config.model.param_dtype).itemsize if micro_batches(config, sizes) > 1 else 0
            self.gradients = self.parameters * (1 + summed)
            self.arguments = local_bytes(state) + local_bytes(batch)
            out = (jax.tree.map(lambda a: a.sharding, state), None)
            jitted = jax.jit(train_step, static_argnames="config", out_shardings=out, keep_unused=True)
            found = jitted.lower(state, batch, config).compile().memory_analysis()
            self.compiled, self.temporaries = found.argument_size_in_bytes, found.temp_size_in_bytes  # on this CPU


def local_bytes(tree) -> int:
    """Bytes that one device holds of arrays with shardings."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def micro_batches(config: Config, sizes: dict) -> int:
    """Return the number of micro-batches of a step on each device."""
    t = config.train
    return n_micro_batches(t.batch_size // (sizes["replica"] * sizes["fsdp"]), t.micro_batch_size)


def _tokens(config: Config, sizes: dict) -> float:
    """Tokens that a device has of a micro-batch."""
    t = config.train
    n_shards = sizes["replica"] * sizes["fsdp"] * sizes["sequence"]
    return t.batch_size * t.seq_len / (n_shards * micro_batches(config, sizes))


def completed(config: Config, sizes: dict) -> float:
    """Bytes of parameters completed over fsdp: two layers (this one and the next), the embeddings and the head.

    Of the last two also the whole gradients, before they are scattered.
    """
    if sizes["fsdp"] == 1:
        return 0
    m, table = config.model, parameters.parameter_table(config.model)
    layers = sum(p.size / m.n_layers for path, p in table.items() if path.startswith("layers/"))
    outer = sum(p.size for path, p in table.items() if p.kind == "embedding" or path.startswith("head/"))
    narrow, wide = jnp.dtype(m.compute_dtype).itemsize, jnp.dtype(m.param_dtype).itemsize
    return (2 * layers * narrow + outer * (narrow + wide)) / sizes["tensor"]


def scores_held(config: Config, device: Device, sizes: dict) -> float:
    """Of how many keys, in the mean, the attention that the device would choose holds a query's scores.

    Raises UserError if the device cannot do what config.model.attention asks for.
    """
    m = config.model
    windows = set(layer_windows(m))
    try:
        chosen, _ = choose_implementation(
            m.attention,
            platform="gpu" if device.kind.startswith("NVIDIA") else "tpu",
            dtype=m.compute_dtype,
            d_head=m.d_head,
            softcap=m.attn_softcap,
            window="varies" if m.scan_layers and len(windows) > 1 else None,
            segments=config.data.packing == "documents",
            contiguous=sizes["sequence"] == 1 and config.data.packing == "none",
            n_queries=config.train.seq_len,
        )
    except ValueError as error:
        raise UserError(f"config.model.attention: {error}") from None
    n = config.train.seq_len
    if chosen != "chunked":
        return 0 if chosen == "cudnn" else n
    size, varies = chunk_size(n), m.scan_layers and len(windows) > 1  # then a window only masks
    seen = [(n + size) / 2 if varies or not w else min((n + size) / 2, size + w - 1) for w in layer_windows(m)]
    return sum(seen) / len(seen)


def activations(config: Config, device: Device, sizes: dict) -> float:
    """Bytes kept for the backward pass: of all layers what config.model.remat keeps, of one layer everything."""
    m, tensor = config.model, sizes["tensor"]
    heads = (m.n_heads + 2 * m.n_kv_heads) * m.d_head / tensor  # queries, keys and values
    inner = {"mlp": 1, "glu": 2}[m.ffn] * m.d_ff / tensor
    # Both norms' inputs and outputs; queries and keys before and after their rotation; attention's output; the
    # products of the feed-forward layer and what its activation makes of them.
    everything = 4 * m.d_model + 2 * heads + m.n_heads * m.d_head / tensor + 2 * inner
    everything += 2 * m.n_kv_heads * m.d_head / tensor * (sizes["sequence"] - 1)  # keys and values of all positions
    # Weights, and scores in float32, masked or not.
    scores = 1 + 4 / jnp.dtype(m.compute_dtype).itemsize
    everything += scores * m.n_heads / tensor * scores_held(config, device, sizes)
    kept = {"none": everything, "dots": m.d_model + heads + 2 * m.d_model + inner, "block": m.d_model}[m.remat]
    once = everything if m.remat != "none" else 0
    return (m.n_layers * kept + once) * _tokens(config, sizes) * jnp.dtype(m.compute_dtype).itemsize


def logits(config: Config, sizes: dict) -> float:
    """Bytes of the logits that exist at once, float32, and of as many gradients."""
    n, chunk = _tokens(config, sizes), config.train.loss_chunk
    share = sizes["tensor"] if config.model.vocab_size % sizes["tensor"] == 0 else 1
    n_shards = sizes["replica"] * sizes["fsdp"] * sizes["sequence"]
    return 2 * 4 * (min(n, chunk / n_shards) if chunk else n) * config.model.vocab_size / share


# ---- Communication ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sent:
    """One kind of communication: `times` collectives a step over axes, of `payload` bytes (as in lm/collectives.py)."""

    what: str
    kind: str
    axes: tuple[str, ...]
    n: int
    payload: float
    times: int

    @property
    def axis(self) -> str:
        return " x ".join(self.axes)

    @property
    def sent(self) -> float:
        return ring_bytes(self.kind, self.n, self.payload) * self.times


def communication(config: Config, sizes: dict) -> Iterator[Sent]:
    """What a step sends, by kind; scalars and gains are left out. See lm/parallel/sharding.py."""
    m, table = config.model, parameters.parameter_table(config.model)
    wide, narrow = jnp.dtype(m.param_dtype).itemsize, jnp.dtype(m.compute_dtype).itemsize

    def of(axes, what, kind, payload, times):
        axes = tuple(axis for axis in axes if sizes[axis] > 1)
        if axes and payload and times:
            yield Sent(what, kind, axes, math.prod(sizes[axis] for axis in axes), payload, times)

    def size(p) -> float:
        """Parameters of p on a device when it is complete over fsdp."""
        return p.size / (sizes["tensor"] if "tensor" in sharding.parameter_spec(p, sizes) else 1)

    shared = {path: p for path, p in table.items() if "fsdp" in sharding.parameter_spec(p, sizes)}
    layers = sum(size(p) for path, p in shared.items() if path.startswith("layers/"))
    rows = sum(size(p) for p in shared.values() if p.kind == "embedding")  # looked up in the dtype they are kept in
    head = size(shared["embedding" if m.tie_embeddings else "head/w_DV"]) if shared else 0
    n = micro_batches(config, sizes)
    yield from of(["fsdp"], "layers' parameters, forward and backward", "all-gather", layers * narrow, 2 * n)
    yield from of(["fsdp"], "embeddings and head", "all-gather", rows * wide + head * narrow, n)
    yield from of(["fsdp"], "gradients of all of them", "reduce-scatter", (layers + rows + head) * 4, n)
    reduced = sum(size(p) for p in shared.values()) / sizes["fsdp"] * 4  # added up in float32
    yield from of(["replica", "sequence"], "gradients, once a step", "all-reduce", reduced, 1)
    tokens, outputs = _tokens(config, sizes), 2 + (m.remat == "block")  # a block's last output is not recomputed
    gathers = 1 + (m.remat != "none")  # no policy keeps completed keys and values
    x_BTD = tokens * m.d_model * narrow
    inputs = 3 + {"mlp": 1, "glu": 2}[m.ffn]
    yield from of(["tensor"], "attention's and feed-forward outputs", "all-reduce", x_BTD, n * outputs * m.n_layers)
    yield from of(["tensor"], "gradients of their inputs", "all-reduce", x_BTD, n * inputs * m.n_layers)
    if m.vocab_size % sizes["tensor"] == 0:
        yield from of(["tensor"], "embeddings, and the gradient of the head's input", "all-reduce", x_BTD, 2 * n)
    kv = tokens * sizes["sequence"] * m.n_kv_heads * m.d_head / sizes["tensor"] * narrow
    yield from of(["sequence"], "keys and values", "all-gather", kv, n * 2 * gathers * m.n_layers)
    yield from of(["sequence"], "gradients of keys and values", "reduce-scatter", kv, n * 2 * m.n_layers)


# ---- Time ------------------------------------------------------------------------------------------------------------


def step_time(config: Config, peak: float, travel: float, updated: float, n_devices: int) -> tuple[float, float]:
    """The range of a step's seconds: communication hidden behind products at their peak, or after them at 40 % of it.

    travel: seconds of all communication. updated: seconds of the optimizer's reads and writes.
    """
    t, m = config.train, config.model
    recomputed = 4 / 3 if m.remat == "block" else 1
    compute = recomputed * flops.flops_per_token(m, t.seq_len) * t.batch_size * t.seq_len / n_devices / peak
    return max(compute, travel) + updated, compute / 0.4 + travel + updated


def ring_bytes(kind: str, n: int, payload: float) -> float:
    """Bytes that each of n devices sends for one collective."""
    times = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}
    return times.get(kind, (n - 1) / n) * payload


def _speed(device: Device, sizes: dict, axes: tuple[str, ...]) -> float:
    """Bytes a second of a collective: devices are numbered with the last axis fastest, so it spans what lies within."""
    names = list(sizes)
    span = math.prod(sizes[name] for name in names[names.index(axes[0]) :])
    return device.link if span <= device.n_near else device.network


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.4g} {unit}"
        n /= 1000


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h"
