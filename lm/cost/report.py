"""The text that --plan prints."""

import collections
import re

from lm import parameters
from lm.config import MeshConfig, Resolved
from lm.cost import flops, traffic
from lm.cost.communication import Bytes, seconds
from lm.cost.compiled import ON_ONE_DEVICE, Compiled
from lm.cost.estimate import USABLE, Estimate, estimate, product_seconds, search_meshes
from lm.cost.memory import attention_implementation, micro_batches_per_step
from lm.cost.units import duration, si
from lm.kernels.platform import compiler_options

SHOWN = 5  # meshes
MOVED = 12  # kernels
# parts of JAX's names that say nothing of the model
CONTROL = ("shard_map", "while", "body", "closed_call", "checkpoint")


def plan(
    config: Resolved, device_name: str, n_devices: int, n_slices: int = 1
) -> tuple[str, Estimate]:
    """Describe what a run needs on its mesh, or on the best one if all axes have their defaults.

    Arguments and errors as for `estimate` and `search_meshes`. Returns the text and the estimate
    that it describes.
    """
    if config.mesh != MeshConfig() or n_devices == 1:
        chosen = estimate(config, device_name, n_devices, n_slices)
        return describe(chosen), chosen
    estimates = search_meshes(config, device_name, n_devices, n_slices)
    meshes = _mesh_table(estimates) + _batch_advice(config, n_devices)
    return describe(estimates[0], meshes), estimates[0]


def describe(e: Estimate, meshes: str = "") -> str:
    """Describe an estimate: verdict, memory, communication, time, other meshes, options."""
    m = e.config.model
    t = e.config.train
    d = e.device
    per_token = flops.flops_per_token(m, t.seq_len)
    mfu = flops.mfu(e.tokens_per_step / e.seconds, per_token, e.n_devices, e.peak)
    n_micro = micro_batches_per_step(e.config, e.sizes)
    rows = t.batch_size // (e.sizes["replica"] * e.sizes["fsdp"] * n_micro)
    overlaps = "does not overlap them"
    if d.platform == "tpu":
        overlaps = "over replica and fsdp overlaps them, unless gradients are scattered"
    implementation, reason = attention_implementation(e.config, d, e.sizes)
    lines = [
        f"{'Fits' if e.fits else 'DOES NOT FIT'}: {si(e.memory.total, 'B')} of "
        f"{si(d.memory, 'B')} per device ({USABLE:.0%} usable).",
        f"{t.steps:,} steps take about {duration(t.steps * e.seconds)}: {e.seconds:.3g} s per "
        f"step, {si(e.tokens_per_step / e.seconds)} tokens/s, MFU {mfu:.0%}.",
        "",
        f"{_devices(e)}, mesh {_mesh(e)}",
        f"{parameters.count(parameters.parameter_table(m)):,} parameters, {si(per_token, 'FLOP')} "
        "per token",
        f"{e.tokens_per_step:,} tokens per step in {n_micro} "
        f"micro-batch{'es' if n_micro > 1 else ''} of {rows} sequence{'s' if rows > 1 else ''} "
        f"per device; {si(e.tokens_per_step * t.steps)} tokens in all",
        f"attention: {implementation}; {reason}",
        "",
        "Memory per device",
        *_memory_lines(e),
        "",
        "Sent per device and step",
        *_communication_lines(e),
        "",
        "Assumptions",
        f"  matrix products at {d.attained:.0%} of the vendor's peak, {si(e.peak, 'FLOP/s')} in "
        f"{m.compute_dtype};",
        f"  communication {overlaps};",
        f"  optimizer state and activations are moved at {si(d.bandwidth, 'B/s')}; no host time;",
        f"  links: {si(d.link, 'B/s')} within groups of {d.group} devices, {si(d.network, 'B/s')} "
        "beyond; per device, one direction",
    ]
    if meshes:
        lines += ["", meshes]
    if options := compiler_options(d.platform, d.kind, t.compiler_options):
        lines += ["", "Options of the compiler"]
        lines += [f"  {name}={_flag(value)}" for name, value in options.items()]
    return "\n".join(lines)


def _flag(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _devices(e: Estimate) -> str:
    """Return the number and kind of devices; Google counts two cores per chip of v4 and v5p."""
    slices = f" in {e.n_slices} slices" if e.n_slices > 1 else ""
    if e.device.platform == "gpu" or e.device.cores > 1:
        return f"{e.n_devices} x {e.device_name}{slices}"
    google = f" ({e.device_name}-{2 * e.n_devices} in Google's count)"
    return f"{e.n_devices} {e.device_name} chips{slices}" + google * (
        e.device_name in ("v4", "v5p")
    )


def _mesh(e: Estimate) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in e.sizes.items())


def _memory_lines(e: Estimate) -> list[str]:
    m = e.config.model
    memory = e.memory
    gradients = "gradients"
    if micro_batches_per_step(e.config, e.sizes) > 1:
        gradients += ", and their float32 sum over micro-batches"
    rows = {
        f"parameters ({m.param_dtype})": memory.parameters,
        f"optimizer state ({e.config.optimizer.name})": memory.optimizer,
        gradients: memory.gradients,
        "copies of layers' parameters in another dtype or layout": memory.copies,
        f"activations for the backward pass (remat={m.remat})": memory.activations,
        "the loss: head, logits and their gradient": memory.loss,
        "backward pass of a layer: activations, gathered parameters": memory.layer,
        "total": memory.total,
    }
    return [f"  {what:<62}{si(size, 'B'):>10}" for what, size in rows.items() if size]


def _communication_lines(e: Estimate) -> list[str]:
    lines = []
    for s in e.sent:
        time = seconds(s, e.device, e.sizes)
        how = f"{s.kind} over {' x '.join(s.axes)}"
        lines.append(
            f"  {s.what:<50}{how:<34}{si(s.sent, 'B'):>9}  {time:.3g} s at "
            f"{si(s.sent / time, 'B/s')}"
        )
    if e.config.optimizer.name == "soap" and e.n_devices > 1:
        lines.append("  The communication of soap's state is not counted.")
    return lines or ["  nothing"]


def _mesh_table(estimates: list[Estimate]) -> str:
    """List the first meshes of `search_meshes`."""
    fitting = [e for e in estimates if e.fits]
    n = len(estimates)
    if not fitting:
        return (
            f"None of the {n} possible meshes fits; this one needs the least memory. Use "
            "more devices, or reduce the activations with --config.train.micro_batch_size=1 or "
            "--config.model.remat=block, the logits with --config.train.loss_chunk=512."
        )
    lines = [f"Meshes: {len(fitting)} of {n} fit. The fastest, with s per step and memory:"]
    for e in fitting[:SHOWN]:
        lines.append(f"  {_mesh(e):<50}{e.seconds:>8.3g}{si(e.memory.total, 'B'):>10}")
    return "\n".join(lines)


def _batch_advice(config: Resolved, n_devices: int) -> str:
    """Return which batch sizes let all devices hold whole sequences, or "" if this one does."""
    batch_size = config.train.batch_size
    if batch_size % n_devices == 0:
        return ""
    below = batch_size // n_devices * n_devices
    sizes = filter(None, (below, below + n_devices))
    flags = " or ".join(f"--config.train.batch_size={size}" for size in sizes)
    return (
        f"\nThe batch of {batch_size} sequences is not divisible by {n_devices} devices, so that "
        f"each mesh splits layers or sequences; with {flags} none needs to."
    )


def describe_compiled(e: Estimate, c: Compiled) -> str:
    """Describe what the compiler says about a program; beside the training step, the estimate."""
    planned = e.sent_by_collective if c.state else Bytes(float)

    def line(what: str, compiled: float, of_plan: float) -> str:
        text = f"  {what:<54}{si(compiled, 'B'):>10}"
        return text + f"{si(of_plan, 'B'):>10}" * bool(c.state)

    devices = f"one of {_devices(e)}" if c.program in ON_ONE_DEVICE else _devices(e)
    lines = [
        f"{f'Compiled for {devices} in {c.seconds:.0f} s':<56}{'compiler':>10}"
        + f"{'plan':>10}" * bool(c.state),
        line("largest use of memory per device", c.peak, e.memory.total),
    ]
    if c.state:
        in_place = "replaced in place"
        if c.aliased < c.state:
            in_place = f"COPIED: {si(c.state - c.aliased, 'B')} of it"
        lines.append(f"  {'train state of ' + si(c.state, 'B') + ' per device':<54}{in_place}")
    for kind, axes in planned | c.sent:
        total = c.sent[kind, axes]
        what = f"sent per device and step: {kind} over {' x '.join(axes)}"
        lines.append(line(what, total, planned[kind, axes]))
        if total:
            lines[-1] += f"  {c.overlapped[kind, axes] / total:.0%} overlapped"
    if c.compute:
        planned_compute = product_seconds(e.config, e.device, e.n_devices)
        what = "time of a step without communication and kernels"
        lines.append(f"  {what:<54}{c.compute:>8.3g} s {planned_compute:>7.3g} s")
    lines += _kernel_lines(e, c)
    lines.append("The largest buffers")
    lines += [f"  {_owner(name):<54}{si(size, 'B'):>10}" for size, name in c.buffers]
    return "\n".join(lines)


def _kernel_lines(e: Estimate, c: Compiled) -> list[str]:
    """Return a table of what a program's kernels move, and for training the time that follows."""
    bandwidth = e.device.bandwidth
    # by kind, and by kind and owner
    moved: collections.Counter[tuple[str, ...]] = collections.Counter()
    runs: collections.Counter[tuple[str, ...]] = collections.Counter()
    for kernel in c.kernels:
        owner = re.sub(r"layers/\d+", "layers/*", _owner(kernel.owner))
        for group in ((kernel.kind,), (kernel.kind, owner)):
            moved[group] += kernel.total
            runs[group] += kernel.times
    kinds = [group for group, _ in moved.most_common() if len(group) == 1]
    owners = [group for group, _ in moved.most_common() if len(group) == 2]
    total = sum(moved[kind] for kind in kinds)
    of_products = moved[traffic.PRODUCTS,]

    def line(what: str, n: int, size: int) -> str:
        return f"  {what:<54}{n:>5} x {si(size, 'B'):>9}{1e3 * size / bandwidth:>9.3g} ms"

    lines = [f"Moved by kernels per device, at most, and its time at {si(bandwidth, 'B/s')}"]
    lines += [line(*kind, runs[kind], moved[kind]) for kind in kinds]
    lines.append(line("all kernels", sum(runs[kind] for kind in kinds), total))
    if c.state:
        products = max(product_seconds(e.config, e.device, e.n_devices), of_products / bandwidth)
        milliseconds = 1e3 * (products + (total - of_products) / bandwidth)
        what = f"time of a step: products at {e.device.attained:.0%} of the peak, then the rest"
        lines.append(f"  {what:<76}{milliseconds:>9.3g} ms")
    lines.append("The kernels that move most, besides products")
    largest = [group for group in owners if group[0] != traffic.PRODUCTS]
    for group in largest[:MOVED]:
        kind, owner = group
        lines.append(line(f"{owner} ({kind})", runs[group], moved[group]))
    return lines


def _owner(name: str) -> str:
    """Shorten JAX's name of what a buffer holds.

    >>> _owner("state.params['layers']['ffn']['w_up_DF']")
    'params/layers/ffn/w_up_DF'
    >>> _owner("jit(train_step)/shard_map/transpose(jvp())/while/body/closed_call/layers/0/ffn/dot_general")
    'layers/0/ffn/dot_general, backward'
    """
    if name.startswith("state."):
        return "/".join(re.findall(r"\w+", name.removeprefix("state.")))
    parts = [part for part in name.split("/") if re.fullmatch(r"[\w.-]+", part)]
    parts = [part for part in parts if part not in CONTROL]
    return ("/".join(parts[-4:]) or name[:50]) + ", backward" * ("transpose(jvp" in name)
