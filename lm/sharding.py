"""The mesh, the rules that spread parameters over it, and the few collectives that are written by hand.

The mesh has four axes. `replica` and `fsdp` share the examples of a batch; `fsdp` also shares the parameters (ZeRO-3,
Rajbhandari et al. 2020, arXiv:1910.02054) and `tensor` their heads and feed-forward features (Shoeybi et al. 2019,
arXiv:1909.08053); `sequence` shares the positions. Inside `over_data` a device sees its own examples and positions, and
its own slices of parameters over `fsdp`, which `gather` completes where they are used: its derivative scatters the
gradient, so what travels is exactly what is written here. Over `tensor` XLA's partitioner does the work.
"""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lm.config import MESH_AXES, Config, MeshConfig
from lm.errors import UserError
from lm.parameters import Parameter, Table, flat, nest

DATA = ("replica", "fsdp")  # what a batch's examples are spread over
BY_HAND = ("replica", "fsdp", "sequence")  # what `over_data` spreads; `tensor` is left to the partitioner

# The mesh axis of each logical axis of a parameter; what is not here is whole on every device.
RULES = {"D": "fsdp", "V": "tensor", "H": "tensor", "G": "tensor", "F": "tensor"}


# ---- The mesh --------------------------------------------------------------------------------------------------------


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


def check(config: Config, n_devices: int) -> dict[str, int]:
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


def in_force(sizes: dict[str, int]):
    """A context in which the mesh is in force; none for one device alone."""
    return jax.set_mesh(make_mesh(sizes)) if math.prod(sizes.values()) > 1 else contextlib.nullcontext()


def mesh_in_force() -> jax.sharding.Mesh | None:
    """The mesh of devices that jax.set_mesh put in force in this thread; None for one device alone."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def _mesh():
    """The mesh under which this is traced, None if there is none of ours (one device alone, a sweep's own mesh)."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == MESH_AXES else None


def _size(axis: str) -> int:
    mesh = _mesh()
    return mesh.shape[axis] if mesh else 1


# ---- Where arrays live -----------------------------------------------------------------------------------------------


def parameter_spec(p: Parameter, sizes: dict[str, int]) -> PartitionSpec:
    """How a parameter is spread. Gains and biases are whole over fsdp: a gather would cost more than it saves."""

    def axis_of(letter: str, length: int) -> str | None:
        axis = RULES.get(letter)
        if axis is None or (axis == "fsdp" and p.kind in ("norm", "bias")) or length % sizes[axis]:
            return None  # the last: a vocabulary that tensor does not divide is whole over it
        return axis

    return PartitionSpec(*map(axis_of, p.axes, p.shape))


def spread(abstract_state, table: Table):
    """A train state's shapes with their shardings: parameters by the rules, moments as the parameter they belong to.

    A leaf belongs to the parameter with whose path its own ends and whose shape it has; all others (counters) are whole
    on every device. Without a mesh nothing changes.
    """
    if (mesh := mesh_in_force()) is None:
        return abstract_state
    specs = {path: parameter_spec(p, dict(mesh.shape)) for path, p in table.items()}

    def with_sharding(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        ends = ("/".join(names[i:]) for i in range(len(names)))
        owner = next((end for end in ends if end in specs), None)
        belongs = owner is not None and table[owner].shape == leaf.shape
        sharding = NamedSharding(mesh, specs[owner] if belongs else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, abstract_state)


def everywhere() -> NamedSharding | None:
    """Of results that every process reads: whole on every device."""
    mesh = mesh_in_force()
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def whole_inside(x):
    """The same, within jit."""
    return x if _mesh() is None else jax.lax.with_sharding_constraint(x, PartitionSpec())


def by_examples(mesh, shape: tuple[int, ...], axis: int, rows):
    """An array whose dimension `axis` are a batch's examples, spread over the mesh (None: as it comes, on the host).

    rows(index) gives the part of the array at a tuple of slices for dimensions 0 .. axis; a process asks for its own.
    """
    if mesh is None:
        return rows((slice(None),) * (axis + 1))
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))
    return jax.make_array_from_callback(shape, sharding, lambda index: rows(index[: axis + 1]))


def whole(mesh, array):
    """The host's array on every device of the mesh (None: on the one device)."""
    if mesh is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, PartitionSpec()), array.__getitem__)


# ---- Collectives -----------------------------------------------------------------------------------------------------


def over_data(f, table: Table, params_out: bool = False):
    """f(params, fields) with each device on its own slices; without a mesh f itself.

    fields: arrays (B, T, ...) or, for names that end in _B, (B, ...). What f returns it has added up over devices
    (`add_up`); with params_out that is followed by something spread as the parameters are.
    """
    mesh = _mesh()
    if mesh is None:
        return f
    params = nest({path: _by_hand(parameter_spec(p, dict(mesh.shape))) for path, p in table.items()})
    # With an axis left to the partitioner XLA:CPU cannot add up bfloat16 (jaxlib 0.10.2): none is, where that can be.
    by_hand = set(BY_HAND) | ({"tensor"} if mesh.shape["tensor"] == 1 else set())

    def by_device(params_, fields):
        specs = {name: PartitionSpec(DATA, *(() if name.endswith("_B") else ("sequence",))) for name in fields}
        whole = PartitionSpec()
        return jax.shard_map(
            f, in_specs=(params, specs), out_specs=(whole, params) if params_out else whole,
            axis_names=by_hand, check_vma=False,
        )(params_, fields)  # fmt: skip

    return by_device


def _by_hand(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(axis if axis in BY_HAND else None for axis in spec))


def _inside(axis: str) -> bool:
    """Whether this is inside `over_data`, and the axis has more than one device."""
    mesh = _mesh()
    return mesh is not None and axis in mesh.manual_axes and mesh.shape[axis] > 1


def add_up(tree):
    """Sums over all devices that share the batch."""
    axes = tuple(filter(_inside, BY_HAND))
    return jax.lax.psum(tree, axes) if axes else tree


def add_up_gradients(grads: dict, table: Table) -> dict:
    """Gradients of each device's own loss, added up in float32 over the devices that share the batch, once.

    Over fsdp the derivative of `gather` has added up already, except for what is whole there.
    """
    if not (axes := tuple(filter(_inside, BY_HAND))):
        return grads
    specs = {path: parameter_spec(p, dict(_mesh().shape)) for path, p in table.items()}

    def add(path, g):
        left = tuple(axis for axis in axes if axis not in specs[path])
        return jax.lax.psum(g.astype(jnp.float32), left).astype(g.dtype) if left else g

    return nest({path: add(path, g) for path, g in flat(grads).items()})


def local_shape(p: Parameter) -> tuple[int, ...]:
    """The shape that a device has of a parameter inside `over_data`, its own everywhere else."""
    if not _inside("fsdp"):
        return p.shape
    spec = parameter_spec(p, dict(_mesh().shape))
    return tuple(n // _size("fsdp") if axis == "fsdp" else n for n, axis in zip(p.shape, spec, strict=True))


def gather(w, p: Parameter, dtype):
    """A parameter completed over fsdp, in the dtype that it is used in; its gradient is added up in float32."""
    if not _inside("fsdp") or "fsdp" not in (spec := parameter_spec(p, dict(_mesh().shape))):
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
    if _size("tensor") == 1:
        return f
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False)


def gather_positions(x, axis: int):
    """Positions, or what belongs to them, completed over the sequence axis."""
    return jax.lax.all_gather(x, "sequence", axis=axis, tiled=True) if _inside("sequence") else x


def gather_keys(k_BTGK):
    """Keys or values of all positions."""
    heads = PartitionSpec(*[None] * (k_BTGK.ndim - 2), "tensor")
    return _by_slices(lambda k: gather_positions(k, -3), heads)(k_BTGK) if _inside("sequence") else k_BTGK


def n_positions(n_local: int) -> int:
    """The length of the sequences of which a device has n_local positions."""
    return n_local * _size("sequence") if _inside("sequence") else n_local


def positions(n_local: int):
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


def n_shards() -> int:
    """How many devices share a batch's tokens inside `over_data`."""
    return math.prod(_size(axis) for axis in BY_HAND if _inside(axis))
