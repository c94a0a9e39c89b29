"""Estimate memory, communication and step time on hardware that is not here.

    python -m lm.train --config FILE --plan --device h100:64

Nothing is allocated or compiled: all figures follow from formulas (lm/cost/memory.py, lm/cost/communication.py) and
the vendors' figures (lm/cost/devices.py). What XLA really keeps in memory is only known once the step
is compiled for the device.
"""

import functools

from lm import parameters
from lm.config import Config
from lm.cost import flops
from lm.cost.communication import Transfer, link_speed, transfers
from lm.cost.devices import DEVICES, Device
from lm.cost.memory import Memory, memory_per_device, micro_batches_per_step
from lm.cost.units import duration_range, si
from lm.errors import UserError
from lm.parallel.mesh import check_mesh

USABLE = 0.9  # of the memory; the rest is left to XLA and fragmentation
ATTAINED = 0.4  # of the peak by matrix products, in the slower estimate


def estimate(config: Config, device_name: str, n_devices: int) -> str:
    """Describe what a run needs on n_devices of a kind: the verdict first, then memory, communication and time.

    Args:
        config: a resolved config.
        device_name: a name of lm.cost.devices.DEVICES.
        n_devices: as many JAX devices must be visible, of any kind.

    Raises:
        UserError: the mesh does not fit the config, the device does not support config.model.attention, or its peak in
            config.model.compute_dtype is not published.
    """
    device, sizes, t = DEVICES[device_name], check_mesh(config, n_devices), config.train
    dtype = config.model.compute_dtype
    if (peak := device.peak.get(dtype)) is None:
        published = " or ".join(device.peak)
        raise UserError(f"config.model.compute_dtype: no {dtype} peak is published for {device_name}; use {published}")
    memory = memory_per_device(config, device, sizes)
    sent = list(transfers(config, sizes))
    low, high = step_time(
        config,
        peak,
        communication=sum(s.sent / link_speed(device, sizes, s.axes) for s in sent),
        update=(2 * memory.parameters + 2 * memory.optimizer + memory.gradients) / device.bandwidth,
        n_devices=n_devices,
    )
    fits = "Fits" if memory.total <= USABLE * device.memory else "DOES NOT FIT"
    tokens = t.batch_size * t.seq_len
    per_token = flops.flops_per_token(config.model, t.seq_len)
    mfu = functools.partial(flops.mfu, flops_per_token=per_token, n_devices=n_devices, peak=peak)
    lines = [
        f"{fits}: {si(memory.total, 'B')} of {si(device.memory, 'B')} per device ({USABLE:.0%} usable).",
        f"{t.steps:,} steps take {duration_range(t.steps * low, t.steps * high)}: {low:.3g} to {high:.3g} s per step, "
        f"{si(tokens / high)} to {si(tokens / low)} tokens/s, MFU {mfu(tokens / high):.0%} to {mfu(tokens / low):.0%}.",
        "",
        f"{n_devices} x {device_name}, mesh " + " x ".join(f"{axis} {size}" for axis, size in sizes.items()),
        *_run_lines(config, sizes),
        "",
        "Memory per device",
        *_memory_lines(memory, config, accumulates=micro_batches_per_step(config, sizes) > 1),
        "",
        "Sent per device and step",
        *_communication_lines(sent, device, sizes),
        *(["  Muon's own communication is not counted."] if config.optimizer.name == "muon" and n_devices > 1 else []),
        "",
        "Assumptions",
        f"  faster: matrix products at the vendor's peak, {si(peak, 'FLOP/s')} in {dtype}; communication overlaps them",
        f"  slower: matrix products at {ATTAINED:.0%} of the peak; no overlap",
        f"  both: parameters and optimizer state are read and written at {si(device.bandwidth, 'B/s')}; no latency, no "
        "host time",
        f"  links: {si(device.link, 'B/s')} within groups of {device.group} devices, {si(device.network, 'B/s')} "
        "beyond; per device, one direction",
    ]
    return "\n".join(lines)


def step_time(
    config: Config, peak: float, *, communication: float, update: float, n_devices: int
) -> tuple[float, float]:
    """Return the range of a step's time in seconds.

    Args:
        config: a resolved config.
        peak: FLOP/s of one device. The faster estimate attains it and overlaps communication; the slower one attains
            40 % of it and overlaps nothing.
        communication: seconds of all communication.
        update: seconds of the optimizer's reads and writes.
        n_devices: number of devices.
    """
    t, m = config.train, config.model
    recomputed = 4 / 3 if m.remat == "block" else 1
    compute = recomputed * flops.flops_per_token(m, t.seq_len) * t.batch_size * t.seq_len / n_devices / peak
    return max(compute, communication) + update, compute / ATTAINED + communication + update


def _run_lines(config: Config, sizes: dict[str, int]) -> list[str]:
    m, t, n_micro = config.model, config.train, micro_batches_per_step(config, sizes)
    n_parameters = parameters.count(parameters.parameter_table(m))
    tokens = t.batch_size * t.seq_len
    rows = t.batch_size // (sizes["replica"] * sizes["fsdp"] * n_micro)
    return [
        f"{n_parameters:,} parameters, {si(flops.flops_per_token(m, t.seq_len), 'FLOP')} per token",
        f"{tokens:,} tokens per step in {n_micro} micro-batch{'es' if n_micro > 1 else ''} of {rows} "
        f"sequence{'s' if rows > 1 else ''} per device; {si(tokens * t.steps)} tokens in all",
    ]


def _memory_lines(memory: Memory, config: Config, *, accumulates: bool) -> list[str]:
    m = config.model
    summed = ", and their float32 sum over micro-batches" if accumulates else ""
    rows = {
        f"parameters ({m.param_dtype})": memory.parameters,
        f"optimizer state ({config.optimizer.name})": memory.optimizer,
        f"gradients ({m.param_dtype}{summed})": memory.gradients,
        "parameters gathered over fsdp (two layers, embeddings, head)": memory.gathered,
        f"activations for the backward pass (remat={m.remat})": memory.activations,
        "logits and their gradient (float32)": memory.logits,
        "total": memory.total,
    }
    return [f"  {what:<62}{si(size, 'B'):>10}" for what, size in rows.items() if size]


def _communication_lines(sent: list[Transfer], device: Device, sizes: dict[str, int]) -> list[str]:
    lines = []
    for s in sent:
        speed = link_speed(device, sizes, s.axes)
        how = f"{s.kind} over {' x '.join(s.axes)}"
        lines.append(f"  {s.what:<50}{how:<34}{si(s.sent, 'B'):>9}  {s.sent / speed:.3g} s at {si(speed, 'B/s')}")
    return lines or ["  nothing"]
