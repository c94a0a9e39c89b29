"""Where arrays live: the rules that shard parameters and optimizer state, and the placement of batches."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lm.parallel.mesh import BATCH_AXES, current_mesh, traced_mesh
from lm.parameters import Parameter, Table

# The mesh axis of each logical axis of a parameter; all other axes are replicated.
RULES = {"D": "fsdp", "V": "tensor", "H": "tensor", "G": "tensor", "F": "tensor"}


def parameter_spec(p: Parameter, sizes: dict[str, int]) -> PartitionSpec:
    """How a parameter is spread. Gains and biases are whole over fsdp: a gather would cost more than it saves."""

    def axis_of(letter: str, length: int) -> str | None:
        axis = RULES.get(letter)
        if axis is None or (axis == "fsdp" and p.kind in ("norm", "bias")) or length % sizes[axis]:
            return None  # the last: a vocabulary that tensor does not divide is whole over it
        return axis

    return PartitionSpec(*map(axis_of, p.axes, p.shape))


def shard_state(abstract_state, table: Table):
    """A train state's shapes with their shardings: parameters by the rules, moments as the parameter they belong to.

    A leaf belongs to the parameter with whose path its own ends and whose shape it has; all others (counters) are whole
    on every device. Without a mesh nothing changes.
    """
    if (mesh := current_mesh()) is None:
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


def replicated_sharding() -> NamedSharding | None:
    """Of results that every process reads: whole on every device."""
    mesh = current_mesh()
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def replicate_inside(x):
    """The same, within jit."""
    return x if traced_mesh() is None else jax.lax.with_sharding_constraint(x, PartitionSpec())


def shard_examples(mesh, shape: tuple[int, ...], axis: int, rows):
    """An array whose dimension `axis` are a batch's examples, spread over the mesh (None: as it comes, on the host).

    rows(index) gives the part of the array at a tuple of slices for dimensions 0 .. axis; a process asks for its own.
    """
    if mesh is None:
        return rows((slice(None),) * (axis + 1))
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH_AXES))
    return jax.make_array_from_callback(shape, sharding, lambda index: rows(index[: axis + 1]))


def replicate(mesh, array):
    """The host's array on every device of the mesh (None: on the one device)."""
    if mesh is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, PartitionSpec()), array.__getitem__)
