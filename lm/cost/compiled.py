"""Compile the training program for TPUs or GPUs that are not here, and report what the compiler says.

XLA compiles for a description of the devices: `jax.experimental.topologies` with libtpu, or with JAX's CUDA plugin. The
compiler runs in a process of its own, because its settings are read when JAX starts, and because it may abort.
"""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lm.config import Resolved, saved_config, to_dict
from lm.cost.devices import DEVICES
from lm.errors import UserError

PLUGINS = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_cuda13_plugin", "cuda")}  # module, extra of pyproject.toml
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # asks no metadata server of Google Cloud
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
# What XLA must know of a GPU, from NVIDIA's data sheets and the tables of its CUDA programming guide: multiprocessors,
# cores of each, shared memory per block (opt-in) and per multiprocessor, L2, GHz, compute capability.
GPUS = {
    "a100": (108, 64, 166_912, 167_936, 41_943_040, 1.41, (8, 0)),
    "h100": (132, 128, 232_448, 233_472, 52_428_800, 1.98, (9, 0)),
    "h200": (132, 128, 232_448, 233_472, 52_428_800, 1.98, (9, 0)),
}
GPU_TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {per_core}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus} block_dim_limit_x: 2147483647
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
    """What the compiler says about the training program of one step.

    Attributes:
        peak, arguments, aliased: bytes per device: the most in use, the train state and batch, and the outputs that
            take the place of arguments.
        state: bytes per device of the train state, which the program replaces.
        sent: bytes that each device sends per step, by kind, mesh axes, and whether other operations overlap.
        seconds: that the compiler took.
    """

    peak: int
    arguments: int
    aliased: int
    state: int
    sent: list[tuple[str, list[str], bool, float]]
    seconds: float


def compile_step(config: Resolved, device_name: str, sizes: dict[str, int], dump: str | None = None) -> Compiled:
    """Compile the training step of a config for a mesh of devices, which this machine need not have.

    Args:
        config: a resolved config.
        device_name: a name of lm.cost.devices.DEVICES.
        sizes: the size of each mesh axis.
        dump: a directory for the text of the compiled program; None: it is not kept.

    Raises:
        UserError: the compiler is not installed, there is no such slice, or the program does not compile. The
            compiler's own text is then in a file that the message names.
    """
    topology, platform = slice_of(device_name, math.prod(sizes.values())), DEVICES[device_name].platform
    module, extra = PLUGINS[platform]
    if importlib.util.find_spec(module) is None:
        raise UserError(f"--compiled: the compiler for {device_name} is not installed; pip install -e '.[{extra}]'")
    if dump:
        Path(dump).mkdir(parents=True, exist_ok=True)
    job = {"config": to_dict(config), "device": device_name, "sizes": sizes, "topology": topology, "dump": dump}
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | (TPU_ENVIRONMENT if platform == "tpu" else {})
    if platform == "gpu":  # autotuning would need a GPU
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    command = [sys.executable, "-m", "lm.cost.compiled"]
    done = subprocess.run(command, input=json.dumps(job), env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return Compiled(**json.loads(done.stdout.splitlines()[-1]))
    folder = Path(dump or tempfile.mkdtemp(prefix="lm-compiler-"))
    (folder / "compiler.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    raise UserError(
        f"--compiled: the training step of this config does not compile for {math.prod(sizes.values())} x "
        f"{device_name}, mesh {mesh}: {_reason(done.stderr)}; the compiler's text is in {folder / 'compiler.txt'}"
    )


def slice_of(device_name: str, n_devices: int) -> str:
    """Return the topology of a number of devices, in the words of XLA's compiler.

    Raises:
        UserError: there is no slice of so many TPUs, or no description of this GPU.

    >>> slice_of("v5e", 64), slice_of("h100", 16)
    ('v5e:8x8', '1 x 2 x 8')
    """
    device = DEVICES[device_name]
    if device.platform == "gpu":
        if device_name not in GPUS:
            raise UserError(f"--compiled: the compiler has no description of {device_name}; use {', '.join(GPUS)}")
        if n_devices > device.per_host and n_devices % device.per_host:
            raise UserError(f"--device: {n_devices} is not a multiple of the {device.per_host} GPUs of a node")
        n_hosts = max(1, n_devices // device.per_host)
        return f"1 x {n_hosts} x {n_devices // n_hosts}"
    slices = {math.prod(map(int, text.split("x"))): text for text in (device.gke.topologies if device.gke else ())}
    if n_devices not in slices:
        raise UserError(f"--device: there is no {device_name} slice of {n_devices} chips; there are {list(slices)}")
    return f"{device_name}:{slices[n_devices]}"


def _reason(text: str) -> str:
    """Return the last line of a traceback, or why the program does not fit, shortened."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["no message"]
    if "cuDNN not found" in text:
        return "cuDNN is not installed; pip install -e '.[cuda]', or set --config.model.attention=einsum"
    chosen = next((line for line in lines if "RESOURCE_EXHAUSTED" in line or "Ran out of memory" in line), None)
    errors = [line for line in lines if ": " in line and line.split(":")[0].replace(".", "").isidentifier()]
    return (chosen or (errors or lines)[-1])[:300]


# ---- In the compiler's process ------------------------------------------------------------------------------------


def _compile(job: dict) -> Compiled:
    import jax
    import numpy as np
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import AxisType, Mesh

    from lm.cost.hlo import parse_collectives
    from lm.cost.memory import abstract_train_state, local_bytes
    from lm.kernels.platform import compiling_for
    from lm.parallel.mesh import BATCH_AXES
    from lm.step import train_step

    config, sizes, platform = saved_config(job["config"]), job["sizes"], DEVICES[job["device"]].platform
    if platform == "tpu":
        family = job["device"]
        options = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)} if family == "v4" else {}
        topology = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"], **options)
    else:
        description = {"topology": job["topology"], "target_config": _gpu_target(job["device"])}
        topology = topologies.get_topology_desc(platform="cuda", topology_name="", **description)
    devices = mesh_utils.create_device_mesh(tuple(sizes.values()), topology.devices)
    mesh = Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    state, t = abstract_train_state(config, mesh), config.train
    rows = jax.NamedSharding(mesh, jax.P(BATCH_AXES))
    names = ("tokens", "segments") if config.data.packing == "documents" else ("tokens",)
    batch = {name: jax.ShapeDtypeStruct((t.batch_size, t.seq_len + 1), np.int32, sharding=rows) for name in names}
    shardings = (jax.tree.map(lambda a: a.sharding, state), None)
    jitted = jax.jit(train_step, static_argnames="config", donate_argnames="state", out_shardings=shardings)
    with jax.set_mesh(mesh), compiling_for(platform):
        lowered = jitted.lower(state, batch, config)
        start = time.monotonic()
        program = lowered.compile()
        seconds = time.monotonic() - start
    text, memory = program.as_text() or "", program.memory_analysis()
    assert memory, platform
    if job["dump"]:
        Path(job["dump"], "step.hlo").write_text(text, encoding="utf-8")
    sent: dict[tuple, float] = {}
    for c in parse_collectives(text):
        key = c.kind, c.axes(sizes), c.overlapped
        sent[key] = sent.get(key, 0.0) + c.sent
    return Compiled(
        peak=memory.peak_memory_in_bytes,
        arguments=memory.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        state=local_bytes(state),
        sent=[(kind, list(axes), overlapped, n_bytes) for (kind, axes, overlapped), n_bytes in sent.items()],
        seconds=seconds,
    )


def _gpu_target(name: str) -> str:
    cores, fpus, per_block, per_core, l2, clock, (major, minor) = GPUS[name]
    device = DEVICES[name]
    return GPU_TARGET.format(
        cores=cores, fpus=fpus, per_block=per_block, per_core=per_core, l2=l2, clock=clock, major=major, minor=minor,
        bandwidth=int(device.bandwidth), memory=int(device.memory), kind=device.kind,
    )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_compile(json.load(sys.stdin)))))
