"""Compile a run's programs for TPUs or GPUs that are not here; report what the compiler says.

XLA compiles for a description of the devices: `jax.experimental.topologies` with libtpu, or with
JAX's CUDA plugin. The compiler runs in a process of its own, because its settings are read when JAX
starts, and because it may abort.
"""

import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lm.config import Resolved, saved_config, to_dict
from lm.config.values import divisors
from lm.cost import hlo, traffic
from lm.cost.communication import Bytes
from lm.cost.devices import DEVICES
from lm.cost.memory import train_state_bytes
from lm.system.errors import UserError

# Programs that can be compiled, and the function of each.
PROGRAMS = {
    "training": "train_step",
    "evaluation": "eval_step",
    "prefill": "_prefill",
    "decode": "_decode",
}
ON_ONE_DEVICE = ("prefill", "decode")
# Names of the compiler's texts of a function. XLA:GPU puts the name of its target before "after".
PROGRAM = "*.jit_{}*after_optimizations.txt"
REPORT = "*.jit_{}*after_optimizations-memory-usage-report.txt"
ASSIGNMENT = "*.jit_{}*after_optimizations-buffer-assignment.txt"
GENERATED = "*.jit_{}*after_codegen.txt"
LOG = "compiler.txt"
SHOWN = 8  # buffers
# Cycles per second of a TPU's cores: their published peak / (128 x 128 or 256 x 256 products of an
# array, times the number of arrays), see lm/cost/devices.py and
# https://jax-ml.github.io/scaling-book/tpus. Not known of a tpu7x.
CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
# module, extra of pyproject.toml
PLUGINS = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_cuda13_plugin", "cuda")}
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # asks no metadata server of Google Cloud
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
# What XLA must know of a GPU: multiprocessors, cores and threads of each, shared memory per block
# (opt-in) and per multiprocessor, L2, GHz, compute capability. NVIDIA's data sheets and
# architecture papers of each, and the table of technical specifications by compute capability in
# the CUDA programming guide.
GPUS = {
    "a100": (108, 64, 2048, 166_912, 167_936, 41_943_040, 1.41, (8, 0)),
    "h100": (132, 128, 2048, 232_448, 233_472, 52_428_800, 1.98, (9, 0)),
    "h200": (132, 128, 2048, 232_448, 233_472, 52_428_800, 1.98, (9, 0)),
    "b200": (148, 128, 2048, 232_448, 233_472, 132_120_576, 1.965, (10, 0)),
    "l4": (58, 128, 1536, 101_376, 102_400, 50_331_648, 2.04, (8, 9)),
}
GPU_TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {per_core}
  threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {fpus} block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: {per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{kind}"
"""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says about a program. Bytes are those of one device."""

    program: str  # a key of PROGRAMS
    peak: int  # bytes by the assignment of buffers
    state: int  # bytes of the train state; 0 in other programs than training
    aliased: int  # bytes of the arguments that are replaced in place
    buffers: list[tuple[int, str]]  # the largest buffers, in bytes, and to what they belong
    sent: Bytes  # per step
    overlapped: Bytes  # per step: the part that is sent at the same time as other operations
    kernels: list[traffic.Kernel]  # what moves bytes between the device and its memory
    # its estimate of the seconds of a step without communication and kernels; None: unknown
    compute: float | None
    seconds: float  # that the compiler took


def compile_step(
    config: Resolved,
    device_name: str,
    sizes: dict[str, int],
    dump: str | None = None,
    *,
    code: bool = False,
    n_slices: int = 1,
    program: str = "training",
) -> Compiled:
    """Compile a program of a config for a mesh of devices, which this machine need not have.

    Args:
        config, device_name, sizes, n_slices: see `lm.cost.estimate.Estimate`.
        dump: a directory for the compiler's texts; None: they are not kept.
        code: whether to generate code. Otherwise the compiler ends when buffers are assigned, at a
            tenth of the time, and `compute` is not known.
        program: a key of PROGRAMS. "prefill" and "decode" generate the texts of one batch of
            evaluation, with the context of training, on the first device.

    Raises:
        UserError: the compiler is not installed, there is no such slice, or the program does not
            compile. The compiler's own text is then in a file that the message names.
    """
    n_devices = math.prod(sizes.values())
    function = PROGRAMS[program]
    topology = slice_of(device_name, n_devices // n_slices)
    platform = DEVICES[device_name].platform
    module, extra = PLUGINS[platform]
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"--compiled: the compiler for {device_name} is not installed; pip install -e "
            f"'.[{extra}]'"
        )
    if dump:
        Path(dump).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="lm-compiler-", dir=dump))
    job = {
        "config": to_dict(config),
        "device": device_name,
        "sizes": sizes,
        "topology": topology,
        "n_slices": n_slices,
        "program": program,
    }
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
    if platform == "tpu":
        environment |= TPU_ENVIRONMENT
    else:  # autotuning runs kernels on a GPU, and there is none
        flags += " --xla_gpu_autotune_level=0"
    environment["XLA_FLAGS"] = flags
    start = time.monotonic()
    last = [] if code else [p.format(function) for p in (PROGRAM, REPORT, ASSIGNMENT)]
    if not _run_compiler(job, environment, folder, last):
        mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UserError(
            f"--compiled: the {program} program of this config does not compile for {n_devices} x "
            f"{device_name}, mesh {mesh}: {_reason((folder / LOG).read_text(encoding='utf-8'))}; "
            f"the compiler's text is in {folder / LOG}"
        )
    seconds = time.monotonic() - start
    text = _read(folder, PROGRAM.format(function))
    report = _read(folder, REPORT.format(function))
    assignment = _read(folder, ASSIGNMENT.format(function))
    compute = None
    if code and device_name in CLOCKS:
        cycles = hlo.compute_cycles(_read(folder, GENERATED.format(function)))
        compute = cycles / CLOCKS[device_name]
    sent = Bytes(float)
    overlapped = Bytes(float)
    for c in hlo.parse_collectives(text):
        sent[c.kind, c.axes(sizes)] += c.sent
        overlapped[c.kind, c.axes(sizes)] += c.sent * c.overlapped
    compiled = Compiled(
        program=program,
        # of the first memory space, the device's
        peak=int(report.split("Total bytes: ")[1].split()[0]),
        state=sum(train_state_bytes(config, sizes)) if program == "training" else 0,
        aliased=hlo.aliased_bytes(text),
        buffers=hlo.largest_buffers(assignment, text, SHOWN),
        sent=sent,
        overlapped=overlapped,
        kernels=traffic.kernels(text),
        compute=compute,
        seconds=seconds,
    )
    if not dump:
        shutil.rmtree(folder)
    return compiled


def _run_compiler(job: dict, environment: dict, folder: Path, last: list[str]) -> bool:
    """Run the compiler and return whether it succeeded; it ends once `last` are written, if any.

    JAX 0.12 writes the files in several threads, in any order.
    """
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    with open(folder / LOG, "w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "lm.cost.compiled", str(folder / "job.json")]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        sizes: list[list[int]] = []
        while process.poll() is None:
            time.sleep(0.2)
            files = list(filter(None, (_newest(folder, pattern) for pattern in last)))
            sizes = [*sizes[-4:], [file.stat().st_size for file in files]]
            all_written = len(files) == len(last) > 0 and all(sizes[-1])
            if all_written and sizes == 5 * sizes[-1:]:  # nothing was added for a second
                process.kill()
                process.wait()
                return True
    return process.returncode == 0


def _newest(folder: Path, pattern: str) -> Path | None:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime, default=None)


def _read(folder: Path, pattern: str) -> str:
    """Return the newest file of a pattern; "" without one, of code that was not generated."""
    path = _newest(folder, pattern)
    return path.read_text(encoding="utf-8") if path else ""


def slice_of(device_name: str, n_devices: int) -> str:
    """Return the topology of a number of devices, in the words of XLA's compiler.

    Raises:
        UserError: there is no slice of so many TPUs, or no description of this GPU.

    >>> slice_of("v5e", 64), slice_of("tpu7x", 64), slice_of("h100", 16)  # two devices of JAX are a chip of tpu7x
    ('v5e:8x8', 'tpu7x:2x4x4', '1 x 2 x 8')
    """
    device = DEVICES[device_name]
    if device.platform == "gpu":
        if device_name not in GPUS:
            raise UserError(
                f"--compiled: the compiler has no description of {device_name}; use "
                f"{', '.join(GPUS)}"
            )
        if n_devices > device.per_host and n_devices % device.per_host:
            raise UserError(
                f"--device: {n_devices} is not a multiple of the {device.per_host} GPUs of a node"
            )
        n_hosts = max(1, n_devices // device.per_host)
        return f"1 x {n_hosts} x {n_devices // n_hosts}"
    slices = {device.cores * math.prod(map(int, text.split("x"))): text for text in device.slices}
    n, rest = divmod(n_devices, 64)
    if n and not rest and n_devices <= device.largest_slice:
        # Sides are multiples of 4, here as equal as possible.
        sides = min(([a, b, n // a // b] for a in divisors(n) for b in divisors(n // a)), key=sum)
        slices[n_devices] = "x".join(str(4 * side) for side in sorted(sides))
    if n_devices not in slices:
        sizes = str(list(slices))
        if device.largest_slice:
            sizes += f", and multiples of 64 up to {device.largest_slice}"
        raise UserError(
            f"--device: there is no {device_name} slice of {n_devices} devices; there are {sizes}"
        )
    return f"{device_name}:{slices[n_devices]}"


def _reason(text: str) -> str:
    """Return the last line of a traceback, or why the program does not fit, shortened."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["no message"]
    if "cuDNN not found" in text:
        return (
            "cuDNN is not installed; pip install -e '.[cuda]', or set "
            "--config.model.attention=einsum"
        )
    for line in lines:
        if "RESOURCE_EXHAUSTED" in line or "Ran out of memory" in line:
            return line[:300]
    # as Python prints them: jax.errors.JaxRuntimeError: ...
    errors = [line for line in lines if re.match(r"[\w.]+: ", line)]
    return (errors or lines)[-1][:300]


# ---- In the compiler's process -------------------------------------------------------------------


def _compile(job: dict) -> None:
    import jax
    from jax.experimental import topologies

    from lm.kernels.platform import compiler_options, compiling_for
    from lm.parallel.mesh import make_mesh

    config = saved_config(job["config"])
    platform = DEVICES[job["device"]].platform
    kind = DEVICES[job["device"]].kind
    options: dict[str, Any] = {}
    if platform == "tpu":
        if job["device"] == "v4":
            options = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}
        if job["n_slices"] > 1:
            options["num_slices"] = job["n_slices"]
        topology = topologies.get_topology_desc(job["topology"], "tpu", **options)
    else:
        options = {"topology": job["topology"], "target_config": _gpu_target(job["device"])}
        topology = topologies.get_topology_desc("", "cuda", **options)
    sizes = job["sizes"]
    devices = topology.devices
    if job["program"] in ON_ONE_DEVICE:
        sizes = dict.fromkeys(sizes, 1)
        devices = devices[:1]
    mesh = make_mesh(sizes, devices)
    flags = {}
    if job["program"] == "training":
        flags = compiler_options(platform, kind, config.train.compiler_options)
    with jax.set_mesh(mesh), compiling_for(platform):
        _lower(job["program"], config, mesh).compile(flags or None)


def _lower(program: str, config: Resolved, mesh):
    import jax
    import numpy as np

    from lm.cost.memory import abstract_train_state
    from lm.generation.decoding import abstract_programs
    from lm.parallel.mesh import BATCH_AXES
    from lm.step import eval_step, train_step

    state = abstract_train_state(config, mesh)
    t = config.train
    n_rows = t.batch_size if program == "training" else config.eval.batch_size or t.batch_size
    if program in ON_ONE_DEVICE:
        jitted, arguments, options = abstract_programs(state.params, config, n_rows)[program]
        whole = jax.NamedSharding(mesh, jax.P())
        arguments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), arguments
        )
        return jitted.lower(*arguments, **options)
    rows = jax.NamedSharding(mesh, jax.P(BATCH_AXES))
    array = jax.ShapeDtypeStruct((n_rows, t.seq_len + 1), np.int32, sharding=rows)
    batch = {"tokens": array}
    if config.data.packing != "none":
        batch["segments"] = array
    if config.data.targets != "all":
        batch["is_target"] = array
    if program == "evaluation":
        return jax.jit(eval_step, static_argnames="config").lower(state.params, None, batch, config)
    shardings = (jax.tree.map(lambda a: a.sharding, state), None)
    jitted = jax.jit(
        train_step, static_argnames="config", donate_argnames="state", out_shardings=shardings
    )
    return jitted.lower(state, batch, config)


def _gpu_target(name: str) -> str:
    cores, fpus, threads, per_block, per_core, l2, clock, (major, minor) = GPUS[name]
    device = DEVICES[name]
    return GPU_TARGET.format(
        cores=cores,
        fpus=fpus,
        threads=threads,
        per_block=per_block,
        per_core=per_core,
        l2=l2,
        clock=clock,
        major=major,
        minor=minor,
        bandwidth=int(device.bandwidth),
        memory=int(device.memory),
        kind=device.kind,
    )


if __name__ == "__main__":
    _compile(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
