"""The device mesh: its axes, their sizes for a number of devices, and the checks that a config fits on it.

The mesh has four axes. `replica` and `fsdp` share the examples of a batch; `fsdp` also shares the parameters (ZeRO-3,
Rajbhandari et al. 2020, arXiv:1910.02054); `tensor` shares heads and feed-forward features (Shoeybi et al. 2019,
arXiv:1909.08053); `sequence` shares the positions.
"""

import contextlib
import dataclasses
import math

import jax
from jax.sharding import AxisType

from lm.config import MESH_AXES, Config, MeshConfig
from lm.errors import UserError

BATCH_AXES = ("replica", "fsdp")  # the axes that share a batch's examples


def mesh_sizes(c: MeshConfig, n_devices: int) -> dict[str, int]:
    """The size of each axis, -1 filled in; raises UserError if they do not make up the devices."""
    sizes = {axis: getattr(c, axis) for axis in MESH_AXES}
    given = math.prod(size for size in sizes.values() if size > 0)
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    open_axis = next((axis for axis, size in sizes.items() if size < 0), None)
    if n_devices % given or (open_axis is None and given != n_devices):
        fits = _listed(_divisors(n_devices))
        raise UserError(
            f"config.mesh: {shown} does not make up {n_devices} devices; "
            + (
                f"without the -1 their product must be {fits}"
                if open_axis
                else f"set one axis to -1, if the product of the others is {fits}"
            )
        )
    return sizes | ({open_axis: n_devices // given} if open_axis else {})


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def check_mesh(config: Config, n_devices: int) -> dict[str, int]:
    """The mesh's sizes for a resolved config; raises UserError for what cannot be spread so, with what would fit."""
    m, t, sizes = config.model, config.train, mesh_sizes(config.mesh, n_devices)
    data = sizes["replica"] * sizes["fsdp"]
    eval_batch = config.eval.batch_size or t.batch_size
    found = []
    if t.micro_batch_size is None and t.batch_size % data == 0 and t.batch_size // data % t.accumulation:
        found.append(
            f"config.train.accumulation: {t.batch_size} sequences over replica x fsdp = {data} are not divisible by "
            f"{t.accumulation}; use {_listed(_divisors(t.batch_size // data))}"
        )
    for key, value, parts, what in (
        ("train.batch_size", t.batch_size, data, "replica x fsdp"),
        ("eval.batch_size", eval_batch, data, "replica x fsdp"),
        ("model.d_model", m.d_model, sizes["fsdp"], "fsdp"),
        ("model.n_heads", m.n_heads, sizes["tensor"], "tensor"),
        ("model.n_kv_heads", m.n_kv_heads, sizes["tensor"], "tensor"),
        ("model.d_ff", m.d_ff, sizes["tensor"], "tensor"),
        ("train.seq_len", t.seq_len, sizes["sequence"], "sequence"),
    ):
        if value % parts:
            near = sorted({max(parts, value // parts * parts), -(-value // parts) * parts})
            found.append(
                f"config.{key}: {value} is not divisible by {what} = {parts}; use {_listed(near)}, or a config.mesh "
                f"with {what} = {_listed([n for n in _divisors(value) if n_devices % n == 0])}"
            )
    if m.dropout and sizes["sequence"] > 1:
        found.append("config.model.dropout: its masks cannot be spread over config.mesh.sequence; use dropout 0")
    if t.debug and n_devices > 1:
        found.append(f"config.train.debug: without jit nothing is spread over {n_devices} devices; let one be visible")
    if m.attention in ("chunked", "cudnn") and sizes["sequence"] > 1:
        found.append(f"config.model.attention: {m.attention} needs every position; use auto, or config.mesh.sequence 1")
    if found:
        raise UserError(*found)
    return sizes


def with_accumulation(config: Config, sizes: dict[str, int]) -> Config:
    """The config with as few micro-batches as config.train.micro_batch_size allows on this mesh, if that is set."""
    t = config.train
    if t.micro_batch_size is None:
        return config
    share = t.batch_size // (sizes["replica"] * sizes["fsdp"])
    needed = next(n for n in _divisors(share) if share // n <= t.micro_batch_size)
    return dataclasses.replace(config, train=dataclasses.replace(t, accumulation=needed, micro_batch_size=None))


def make_mesh(sizes: dict[str, int]) -> jax.sharding.Mesh:
    """The mesh over all devices, for jax.set_mesh."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def use_mesh(sizes: dict[str, int]):
    """A context in which the mesh is in force; none for one device alone."""
    return jax.set_mesh(make_mesh(sizes)) if math.prod(sizes.values()) > 1 else contextlib.nullcontext()


def current_mesh() -> jax.sharding.Mesh | None:
    """The mesh of devices that jax.set_mesh put in force in this thread; None for one device alone."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def traced_mesh():
    """The mesh under which this is traced, None if there is none of ours (one device alone, a sweep's own mesh)."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == MESH_AXES else None


def axis_size(axis: str) -> int:
    mesh = traced_mesh()
    return mesh.shape[axis] if mesh else 1
