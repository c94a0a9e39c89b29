"""The device mesh: its axes, their sizes for some devices, and whether a config fits on it.

The mesh has four axes. `replica` and `fsdp` shard the examples of a batch; `fsdp` also shards the
parameters (ZeRO-3, Rajbhandari et al. 2020, arXiv:1910.02054); `tensor` shards heads and
feed-forward features (Shoeybi et al. 2019, arXiv:1909.08053); `sequence` shards the positions.

Launchers check a config on a login node, so jax is imported only where a mesh is made or read.
"""

import contextlib
import math
from typing import TYPE_CHECKING

import numpy as np

from lm.config import MESH_AXES, Config, MeshConfig
from lm.config.checks import need_whole_sequences
from lm.config.values import divisors
from lm.system.errors import UserError

if TYPE_CHECKING:
    import jax

BATCH_AXES = ("replica", "fsdp")  # the axes that shard the examples of a batch


def mesh_sizes(c: MeshConfig, n_devices: int) -> dict[str, int]:
    """Return the size of each axis in the order of MESH_AXES, with -1 filled in.

    Raises:
        UserError: the product of the sizes is not the number of devices.

    >>> mesh_sizes(MeshConfig(replica=-1, fsdp=2), n_devices=8)
    {'replica': 4, 'fsdp': 2, 'tensor': 1, 'sequence': 1}
    """
    sizes = {axis: getattr(c, axis) for axis in MESH_AXES}
    given = math.prod(size for size in sizes.values() if size > 0)
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    open_axis = next((axis for axis, size in sizes.items() if size < 0), None)
    if n_devices % given or (open_axis is None and given != n_devices):
        if open_axis:
            advice = "the product of the other axes must be"
        else:
            advice = "set one axis to -1 and the product of the others to"
        raise UserError(
            f"config.mesh: {shown} does not fit {n_devices} devices; {advice} "
            f"{_listed(divisors(n_devices))}"
        )
    if open_axis:
        sizes[open_axis] = n_devices // given
    return sizes


def _listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def check_mesh(config: Config, n_devices: int, n_slices: int = 1) -> dict[str, int]:
    """Check that a config can be sharded over its mesh, and return the size of each axis.

    Args:
        config: the config, resolved or not. Keys that are unset in an unresolved config are not
            checked.
        n_devices: the number of devices of all processes.
        n_slices: the number of TPU slices that the devices form.

    Raises:
        UserError: the config cannot be sharded over this mesh; lists all problems and what would
            fit.
    """
    m = config.model
    t = config.train
    sizes = mesh_sizes(config.mesh, n_devices)
    data = sizes["replica"] * sizes["fsdp"]
    eval_batch = config.eval.batch_size or t.batch_size
    problems = []
    for key, value, parts, what in (
        ("train.batch_size", t.batch_size, data, "replica x fsdp"),
        ("eval.batch_size", eval_batch, data, "replica x fsdp"),
        ("model.d_model", m.d_model, sizes["fsdp"], "fsdp"),
        ("model.n_heads", m.n_heads, sizes["tensor"], "tensor"),
        ("model.n_kv_heads", m.n_kv_heads, sizes["tensor"], "tensor"),
        ("model.d_ff", m.d_ff, sizes["tensor"], "tensor"),
        ("train.seq_len", t.seq_len, sizes["sequence"], "sequence"),
    ):
        if value is not None and value % parts:
            near = sorted({max(parts, value // parts * parts), -(-value // parts) * parts})
            fitting = [n for n in divisors(n_devices) if value % n == 0]
            problems.append(
                f"config.{key}: {value} is not divisible by {what} = {parts}; use {_listed(near)}, "
                f"or a config.mesh with {what} = {_listed(fitting)}"
            )
    if sizes["replica"] % n_slices:
        problems.append(
            f"config.mesh.replica: {sizes['replica']} is not a multiple of the {n_slices} TPU "
            "slices; the other axes would cross the network between them"
        )
    if m.dropout and sizes["sequence"] > 1:
        problems.append(
            "config.model.dropout: dropout is not supported with config.mesh.sequence > 1; use "
            "dropout 0"
        )
    if (whole := need_whole_sequences(m)) and sizes["sequence"] > 1:
        problems.append(
            f"config.mesh.sequence: model.{whole[0]} needs whole sequences on a device; use 1"
        )
    if t.debug and n_devices > 1:
        problems.append(
            f"config.train.debug: without jit only one device works, and {n_devices} are visible; "
            "hide the others"
        )
    if m.attention in ("chunked", "cudnn", "splash") and sizes["sequence"] > 1:
        problems.append(
            f"config.model.attention: {m.attention} does not support config.mesh.sequence > 1; use "
            "auto"
        )
    if problems:
        raise UserError(*problems)
    return sizes


def make_mesh(sizes: dict[str, int], devices=None) -> "jax.sharding.Mesh":
    """Return the mesh over these devices (None: all), for jax.set_mesh."""
    import jax
    from jax.experimental import mesh_utils
    from jax.sharding import AxisType

    devices = jax.devices() if devices is None else devices
    shape = tuple(sizes.values())
    types = (AxisType.Auto,) * len(sizes)
    if len({getattr(device, "slice_index", 0) for device in devices}) == 1:
        # jax.make_mesh splits an axis of the chips, as 16 x 4 on 8x8 needs, on a v5e only.
        array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        array = over_slices(shape, devices)
    return jax.sharding.Mesh(array, tuple(sizes), axis_types=types)


def over_slices(shape: tuple[int, ...], devices: "list[jax.Device]") -> np.ndarray:
    """Return the devices of several slices in the order of a mesh; jax.make_mesh refuses them.

    A node of GPUs is a slice, too: there every axis may cross the network, the last one fastest. Of
    TPUs only the first axis, `replica`, does.

    Raises:
        UserError: the first axis is not a multiple of the number of TPU slices.
    """
    from jax.experimental import mesh_utils

    if devices[0].platform != "tpu":
        return np.asarray(sorted(devices, key=lambda device: device.id)).reshape(shape)
    n = len({device.slice_index for device in devices})
    if shape[0] % n:
        raise UserError(f"config.mesh.replica: {shape[0]} is not a multiple of the {n} TPU slices")
    within = (shape[0] // n, *shape[1:])
    across = (n, *(1 for _ in shape[1:]))
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def use_mesh(sizes: dict[str, int]):
    """Return a context manager that sets the mesh; it does nothing for a single device."""
    import jax

    if math.prod(sizes.values()) == 1:
        return contextlib.nullcontext()
    return jax.set_mesh(make_mesh(sizes))


def current_mesh() -> "jax.sharding.Mesh | None":
    """Return the mesh set by jax.set_mesh in this thread; None for a single device."""
    import jax

    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def traced_mesh():
    """Return the mesh of the trace; None for one device, and for a mesh of a sweep."""
    import jax

    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == MESH_AXES else None


def axis_size(axis: str) -> int:
    """Return the number of devices along an axis of the traced mesh; 1 without a mesh."""
    mesh = traced_mesh()
    return mesh.shape[axis] if mesh else 1
