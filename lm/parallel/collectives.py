"""The collectives that are written by hand.

Inside `map_over_batch` a device sees its own examples and positions, and its own slices of parameters over `fsdp`.
`gather_parameter` completes a parameter where it is used; its derivative scatters the gradient, so the communication is
exactly what is written here. Over `tensor` XLA's partitioner does the work.
"""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from lm.parallel.mesh import BATCH_AXES, axis_size, traced_mesh
from lm.parallel.sharding import parameter_spec
from lm.parameters import Parameter, Table, flat, nest

BY_HAND = ("replica", "fsdp", "sequence")  # the axes that `map_over_batch` maps; `tensor` is left to the partitioner


def map_over_batch(f, table: Table, params_out: bool = False):
    """f(params, fields) with each device on its own slices; without a mesh f itself.

    fields: arrays (B, T, ...) or, for names that end in _B, (B, ...). What f returns it has added up over devices
    (`sum_over_batch`); with params_out that is followed by something spread as the parameters are.
    """
    mesh = traced_mesh()
    if mesh is None:
        return f
    params = nest({path: _by_hand(parameter_spec(p, dict(mesh.shape))) for path, p in table.items()})
    # With an axis left to the partitioner XLA:CPU cannot add up bfloat16 (jaxlib 0.10.2): none is, where that can be.
    by_hand = set(BY_HAND) | ({"tensor"} if mesh.shape["tensor"] == 1 else set())

    def by_device(params_, fields):
        specs = {name: PartitionSpec(BATCH_AXES, *(() if name.endswith("_B") else ("sequence",))) for name in fields}
        whole = PartitionSpec()
        return jax.shard_map(
            f, in_specs=(params, specs), out_specs=(whole, params) if params_out else whole,
            axis_names=by_hand, check_vma=False,
        )(params_, fields)  # fmt: skip

    return by_device


def _by_hand(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(axis if axis in BY_HAND else None for axis in spec))


def _inside(axis: str) -> bool:
    """Whether this is inside `map_over_batch`, and the axis has more than one device."""
    mesh = traced_mesh()
    return mesh is not None and axis in mesh.manual_axes and mesh.shape[axis] > 1


def sum_over_batch(tree):
    """Sums over all devices that share the batch."""
    axes = tuple(filter(_inside, BY_HAND))
    return jax.lax.psum(tree, axes) if axes else tree


def sum_gradients(grads: dict, table: Table) -> dict:
    """Gradients of each device's own loss, added up in float32 over the devices that share the batch, once.

    Over fsdp the derivative of `gather_parameter` has added up already, except for what is whole there.
    """
    if not (axes := tuple(filter(_inside, BY_HAND))):
        return grads
    specs = {path: parameter_spec(p, dict(traced_mesh().shape)) for path, p in table.items()}

    def add(path, g):
        left = tuple(axis for axis in axes if axis not in specs[path])
        return jax.lax.psum(g.astype(jnp.float32), left).astype(g.dtype) if left else g

    return nest({path: add(path, g) for path, g in flat(grads).items()})


def local_shape(p: Parameter) -> tuple[int, ...]:
    """The shape that a device has of a parameter inside `map_over_batch`, its own everywhere else."""
    if not _inside("fsdp"):
        return p.shape
    spec = parameter_spec(p, dict(traced_mesh().shape))
    return tuple(n // axis_size("fsdp") if axis == "fsdp" else n for n, axis in zip(p.shape, spec, strict=True))


def gather_parameter(w, p: Parameter, dtype):
    """A parameter completed over fsdp, in the dtype that it is used in; its gradient is added up in float32."""
    if not _inside("fsdp") or "fsdp" not in (spec := parameter_spec(p, dict(traced_mesh().shape))):
        return w
    axis, wide = spec.index("fsdp"), w.dtype
    tensor = PartitionSpec(*(name if name == "tensor" else None for name in spec))

    def complete(w):
        return _by_slices(lambda w: jax.lax.all_gather(w.astype(dtype), "fsdp", axis=axis, tiled=True), tensor)(w)

    def scatter(_, g):
        def add(g):
            return jax.lax.psum_scatter(g.astype(jnp.float32), "fsdp", scatter_dimension=axis, tiled=True)

        return (_by_slices(add, tensor)(g).astype(wide),)

    completed = jax.custom_vjp(complete)
    completed.defvjp(lambda w: (complete(w), None), scatter)
    return checkpoint_name(completed(w), "gathered")


def _by_slices(f, spec: PartitionSpec):
    """f for each slice of its argument over tensor. Without it the partitioner completes the slices for f's collective
    over another axis, and cuts them again.
    """
    if axis_size("tensor") == 1:
        return f
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False)


def gather_positions(x, axis: int):
    """Positions, or what belongs to them, completed over the sequence axis."""
    return jax.lax.all_gather(x, "sequence", axis=axis, tiled=True) if _inside("sequence") else x


def gather_keys(k_BTGK):
    """Keys or values of all positions."""
    heads = PartitionSpec(*[None] * (k_BTGK.ndim - 2), "tensor")
    return _by_slices(lambda k: gather_positions(k, -3), heads)(k_BTGK) if _inside("sequence") else k_BTGK


def global_seq_len(n_local: int) -> int:
    """The length of the sequences of which a device has n_local positions."""
    return n_local * axis_size("sequence") if _inside("sequence") else n_local


def local_positions(n_local: int):
    """The positions that a device has: 0 .. n_local-1 where it has all."""
    mine = jnp.arange(n_local)
    return mine + jax.lax.axis_index("sequence") * n_local if _inside("sequence") else mine


def gathers_parameters() -> bool:
    """Whether parameters are completed where they are used; `keep_all_but_gathered` then forgets them again."""
    return _inside("fsdp")


def keep_all_but_gathered(primitive, *_, **options) -> bool:
    """A policy for jax.checkpoint: completed parameters are completed anew in the backward pass, all else is kept."""
    gathered = primitive.name == "all_gather" and "fsdp" in options["axis_name"]
    return not gathered and primitive.name != "name"  # the name's own output is as large as what it names


def n_batch_shards() -> int:
    """How many devices share a batch's tokens inside `map_over_batch`."""
    return math.prod(axis_size(axis) for axis in BY_HAND if _inside(axis))
