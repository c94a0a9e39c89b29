"""Sharding rules for parameters and optimizer state, and placement of batches on the mesh."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lm.declarations import Parameter, Table
from lm.parallel.mesh import BATCH_AXES, current_mesh, traced_mesh

# The mesh axis of each logical axis of a parameter; all other axes are replicated.
RULES = {"D": "fsdp", "V": "tensor", "H": "tensor", "G": "tensor", "F": "tensor"}


def parameter_spec(p: Parameter, sizes: dict[str, int]) -> PartitionSpec:
    """Return the PartitionSpec of a parameter.

    Small parameters, such as gains and biases, are replicated over fsdp: a gather would cost more
    than it saves. A vocabulary that tensor does not divide is replicated over tensor. An axis of
    the mesh divides one axis of a parameter, the last one that it can: tables of values by token
    are divided by heads, as the values are.
    """

    def axis_of(letter: str, length: int) -> str | None:
        axis = RULES.get(letter)
        if axis is None or (axis == "fsdp" and p.small) or length % sizes[axis]:
            return None
        return axis

    axes = list(map(axis_of, p.axes, p.shape))
    last = [None if axis in axes[i + 1 :] else axis for i, axis in enumerate(axes)]
    return PartitionSpec(*last)


def shard_state(abstract_state, table: Table, mesh=None):
    """Add shardings to a train state's shapes: rules for parameters, and for moments like theirs.

    A leaf belongs to a parameter if its path ends with the parameter's path and both have the same
    shape. All other leaves (counters) are replicated. Without a mesh the state is returned
    unchanged.

    `mesh` is a concrete or an abstract mesh; None: the mesh set by jax.set_mesh.
    """
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
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
    """Return the sharding of results that every process reads; None without a mesh."""
    mesh = current_mesh()
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def replicate_inside(x):
    """Replicate an array over the mesh, within jit."""
    return x if traced_mesh() is None else jax.lax.with_sharding_constraint(x, PartitionSpec())


def shard_examples(mesh, shape: tuple[int, ...], axis: int, rows):
    """Return an array whose dimension `axis`, the examples of a batch, is sharded over the mesh.

    Args:
        mesh: the mesh; None: return the array of `rows`, on the host.
        shape: shape of the full array.
        axis: the dimension of examples.
        rows: function of a tuple of slices for dimensions 0 .. axis, which returns that part of the
            array. Each process calls it for its own parts only.
    """
    if mesh is None:
        return rows((slice(None),) * (axis + 1))
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH_AXES))
    return jax.make_array_from_callback(
        shape, sharding, lambda index: rows((index or ())[: axis + 1])
    )


def replicate(mesh, array):
    """Copy an array of the host to every device of the mesh (None: to the one device)."""
    if mesh is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, PartitionSpec()), array.__getitem__
    )
