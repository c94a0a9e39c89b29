"""Explicit collectives, for parameters over `fsdp` and positions over `sequence`.

Inside `map_over_batch` a device sees its own examples and positions, and its own shards of
parameters over `fsdp`. `gather_parameter` all-gathers a parameter where it is used, and its
derivative reduce-scatters the gradient. Over `tensor` XLA's partitioner inserts the communication.
Outside of `map_over_batch` all functions do nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from lm.config.values import divisors
from lm.declarations import Parameter, Table, flat, nest
from lm.kernels import platform
from lm.parallel.mesh import BATCH_AXES, axis_size, traced_mesh
from lm.parallel.sharding import parameter_spec

SMALLEST_SQUARE = 16  # chips over which collectives are made in two stages on TPUs, see `_stages`
MANUAL_AXES = ("replica", "fsdp", "sequence")  # the axes that `map_over_batch` maps


def map_over_batch(f, table: Table, params_out: bool = False):
    """Return f(params, fields, *whole) mapped over the devices with their shards; f without a mesh.

    Args:
        f: function of params, fields and scalars that all devices have. Its result must be summed
            over the devices (`sum_over_batch`). With `params_out` it is followed by a tree that is
            sharded like the parameters.

    Returns:
        A function of these. Fields are arrays (B, T, ...), or (B, ...) if their name ends in _B.
    """
    mesh = traced_mesh()
    if mesh is None:
        return f
    axes = set(MANUAL_AXES)
    if mesh.shape["tensor"] == 1:
        # XLA:CPU cannot sum bfloat16 while an axis is left to the partitioner (jaxlib 0.10.2 to
        # 0.12.0).
        axes.add("tensor")
    params = nest({path: _within(_spec(p), axes) for path, p in table.items()})
    replicated = PartitionSpec()

    def spec_of(name: str) -> PartitionSpec:
        if name.endswith("_B"):
            return PartitionSpec(BATCH_AXES)
        return PartitionSpec(BATCH_AXES, "sequence")

    def call(params_, fields, *whole):
        of_fields = {name: spec_of(name) for name in fields}
        mapped = jax.shard_map(
            f,
            in_specs=(params, of_fields, *(replicated for _ in whole)),
            out_specs=(replicated, params) if params_out else replicated,
            axis_names=axes,
            check_vma=False,
        )
        return mapped(params_, fields, *whole)

    return call


def _spec(p: Parameter) -> PartitionSpec:
    return parameter_spec(p, dict(traced_mesh().shape))


def _within(spec: PartitionSpec, axes: set[str]) -> PartitionSpec:
    return PartitionSpec(*(axis if axis in axes else None for axis in spec))


def _is_mapped(axis: str) -> bool:
    """Return whether the caller is inside `map_over_batch` and the axis has more than one device."""
    mesh = traced_mesh()
    return mesh is not None and axis in mesh.manual_axes and mesh.shape[axis] > 1


def sum_over_batch(tree):
    """Sum over all devices that share the batch."""
    axes = tuple(filter(_is_mapped, MANUAL_AXES))
    return jax.lax.psum(tree, axes) if axes else tree


def max_over_batch(tree):
    """Return the maximum over all devices that share the batch."""
    axes = tuple(filter(_is_mapped, MANUAL_AXES))
    return jax.lax.pmax(tree, axes) if axes else tree


def sum_gradients(grads: dict, table: Table) -> dict:
    """Sum gradients of each device's own loss, in float32, over the devices that share the batch.

    Over fsdp the derivative of `gather_parameter` has already summed the gradients of sharded
    parameters.
    """
    axes = tuple(filter(_is_mapped, MANUAL_AXES))
    if not axes:
        return grads

    def sum_one(path, g):
        remaining = tuple(axis for axis in axes if axis not in _spec(table[path]))
        if not remaining:
            return g
        return jax.lax.psum(g.astype(jnp.float32), remaining).astype(g.dtype)

    return nest({path: sum_one(path, g) for path, g in flat(grads).items()})


def gather_parameter(w, p: Parameter, dtype):
    """All-gather this device's shard of a parameter over fsdp, if it is sharded there.

    It is sent and returned in `dtype`. Its gradient is summed in float32.
    """
    if not _is_mapped("fsdp") or "fsdp" not in (spec := _spec(p)):
        return w
    tensor_spec = PartitionSpec(*(axis if axis == "tensor" else None for axis in spec))
    gathered = _differentiable_all_gather(w, spec.index("fsdp"), tensor_spec, dtype, w.dtype)
    return checkpoint_name(gathered, "gathered")


def _all_gather(w, axis, tensor_spec, dtype, shard_dtype):
    def gather(w):
        w = w.astype(dtype)
        for groups in reversed(_stages()):
            w = jax.lax.all_gather(w, "fsdp", axis=axis, tiled=True, axis_index_groups=groups)
        return w

    return _map_over_tensor(gather, tensor_spec)(w)


def _all_gather_forward(w, *static):
    # Call the primitive all_gather, which `save_all_but_gathered` recognizes, and not the function
    # with a derivative.
    return _all_gather(w, *static), None


def _all_gather_backward(axis, tensor_spec, dtype, shard_dtype, _, g):
    def scatter(g):
        g = g.astype(jnp.float32)
        for groups in _stages():
            g = jax.lax.psum_scatter(
                g, "fsdp", scatter_dimension=axis, tiled=True, axis_index_groups=groups
            )
        return g

    return (_map_over_tensor(scatter, tensor_spec)(g).astype(shard_dtype),)


_differentiable_all_gather = jax.custom_vjp(_all_gather, nondiff_argnums=(1, 2, 3, 4))
_differentiable_all_gather.defvjp(_all_gather_forward, _all_gather_backward)


def _stages() -> list[list[list[int]] | None]:
    """Return the groups of the stages that scatter gradients over fsdp; None: all devices.

    XLA:TPU sums over all chips of a slice in full, in place of a reduce-scatter (libtpu 0.0.42). It
    keeps two stages, over the rows and then the columns of a square, which together send as many
    bytes as one.
    """
    n = axis_size("fsdp")
    rows = max(d for d in divisors(n) if d * d <= n)
    if platform.target() != "tpu" or n < SMALLEST_SQUARE or rows == 1:
        return [None]
    numbers = np.arange(n).reshape(rows, n // rows)
    return [numbers.T.tolist(), numbers.tolist()]


def _map_over_tensor(f, spec: PartitionSpec):
    """Return f applied to each shard over tensor.

    Otherwise the partitioner would gather the shards for f's collective over another axis, and
    split them again.
    """
    if axis_size("tensor") == 1:
        return f
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False)


def gather_sequence(x, axis: int):
    """All-gather positions, or arrays by position, over the devices that share a sequence."""
    if not _is_mapped("sequence"):
        return x
    return jax.lax.all_gather(x, "sequence", axis=axis, tiled=True)


def gather_keys(k_BTGK):
    """All-gather keys or values over the devices that share a sequence: (B, S, G, K)."""
    if not _is_mapped("sequence"):
        return k_BTGK
    heads = PartitionSpec(*[None] * (k_BTGK.ndim - 2), "tensor")
    gather = functools.partial(gather_sequence, axis=-3)
    return _map_over_tensor(gather, heads)(k_BTGK)


def from_neighbor(x, distance: int):
    """Return x of the device with the positions before (-1) or after (1) its own; 0 without one."""
    if not _is_mapped("sequence"):
        return jnp.zeros_like(x)
    n = axis_size("sequence")
    pairs = [(i, i - distance) for i in range(n) if 0 <= i - distance < n]
    return jax.lax.ppermute(x, "sequence", pairs)


def along_sequence(run, state_B, inputs_BT, document_BT):
    """Return the outputs (B, T, ...) of a recurrence whose state goes from device to device.

    Device i computes text b in step i + b and sends its state on. There are B + P - 1 steps on P
    devices, so with few texts the devices mostly wait.

    Args:
        run: (state_B, inputs_BT, document_BT) -> (state_B, outputs_BT), for any number of texts.
        state_B: the state before the first token of each text.
        inputs_BT, document_BT: of this device's positions; see `Here.recurrence`.
    """
    if not _is_mapped("sequence"):
        return run(state_B, inputs_BT, document_BT)[1]
    device = jax.lax.axis_index("sequence")
    n_texts = len(document_BT)
    n_steps = n_texts + axis_size("sequence") - 1

    # Otherwise the derivative would keep the inputs of a text for each step.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(received, number):
        # Before its first text and after its last one, a device computes one that nobody reads.
        text = jnp.clip(number - device, 0, n_texts - 1)
        start, inputs, document = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, text, 1), (state_B, inputs_BT, document_BT)
        )
        before = jax.tree.map(lambda a, b: jnp.where(device == 0, a, b), start, received)
        after, outputs = run(before, inputs, document)
        return jax.tree.map(lambda x: from_neighbor(x, -1), after), outputs[0]

    # Until a state arrives: one from which any recurrence may start.
    placeholder = jax.tree.map(lambda x: x[:1], state_B)
    _, outputs_NT = jax.lax.scan(step, placeholder, jnp.arange(n_steps))
    return jax.lax.dynamic_slice_in_dim(outputs_NT, device, n_texts)


def global_seq_len(n_local: int) -> int:
    """Return the full length of a sequence, given the number of its positions on this device."""
    return n_local * axis_size("sequence") if _is_mapped("sequence") else n_local


def local_positions(n_local: int):
    """Return the positions of this device's tokens: 0 .. n_local-1 unless a sequence is sharded."""
    index = jnp.arange(n_local)
    if not _is_mapped("sequence"):
        return index
    # XLA:TPU's partitioner would divide them over tensor, and gather them, tables and masks
    # wherever they are used.

    def shifted(index):
        return index + jax.lax.axis_index("sequence") * n_local

    return _map_over_tensor(shifted, PartitionSpec())(index)


def gathers_parameters() -> bool:
    """Return whether parameters are gathered where they are used."""
    return _is_mapped("fsdp")


def save_all_but_gathered(primitive, *_, **options) -> bool:
    """Policy for jax.checkpoint: save everything but gathered parameters."""
    gathered = primitive.name == "all_gather" and "fsdp" in options["axis_name"]
    # the output of "name" is as large as its input
    return not gathered and primitive.name != "name"


def gather_per_micro_batch(params, micro_batch):
    """Return both behind a barrier that keeps the gathers inside the loop over micro-batches.

    The parameters do not change in the loop. Without the barrier XLA may therefore move the gathers
    of unrolled layers out of the loop and keep the gathered parameters of all layers in memory.
    XLA's CPU compiler removes the barrier.
    """
    if not gathers_parameters():
        return params, micro_batch
    return jax.lax.optimization_barrier((params, micro_batch))
