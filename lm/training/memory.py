"""Refuse a config that needs more memory than there is: by its arrays, and its compiled programs.

The exit code is 2, as for other mistakes in the config, so that a scheduler does not restart the
run.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from lm import parameters
from lm.config import Resolved
from lm.cost.memory import micro_batches_per_step, train_state_bytes
from lm.cost.units import si
from lm.system.errors import UserError, first_line

_MODEL = "config.model.{d_model, n_layers, d_ff, n_heads}"
STATE = "parameters, gradients and optimizer state"
STREAM = "the inputs of a layer"
WINDOWS = "the windows of a dispatch"
# What to reduce, by what needs the most memory.
_KEYS = {
    STATE: "config.model.{vocab_size, d_model, n_layers, d_ff, n_heads, max_positions}",
    STREAM: "config.train.{micro_batch_size, seq_len}",
    WINDOWS: "config.train.{steps_per_dispatch, batch_size}",
}
_OF_PROGRAM = {
    "training": (
        f"config.train.{{micro_batch_size, seq_len, loss_chunk}}, {_MODEL}, or use "
        "config.model.remat=block"
    ),
    "evaluation": "config.eval.batch_size, config.train.{seq_len, loss_chunk}",
}


def check_arrays(config: Resolved, sizes: dict[str, int]) -> None:
    """Raise UserError if the arrays that training surely needs do not fit into a device.

    What the compiled programs need beside them, `check_program` knows.
    """
    available = device_memory(jax.local_devices()[0])
    if available is None:
        return
    t = config.train
    state = smallest_state(config, sizes)
    if state <= available:  # for larger parameters JAX may refuse the shapes
        of_parameters, others = train_state_bytes(config, sizes)
        state = of_parameters + others
        if t.steps:
            state += of_parameters  # the gradients
    rows = rows_of_a_micro_batch(config, sizes) if t.steps else 0
    width = config.model.d_model * jnp.dtype(config.model.compute_dtype).itemsize
    n_windows = max(2, t.steps_per_dispatch) * t.batch_size
    needed = {
        STATE: state,
        STREAM: rows * t.seq_len // sizes["sequence"] * width,
        WINDOWS: 12 * n_windows,  # starts: int64 on the host and int32 on the device
    }
    if sum(needed.values()) <= available:
        return
    use = max(needed, key=needed.__getitem__)
    raise UserError(
        f"out of memory: training needs at least {si(sum(needed.values()), 'B')} on each device, "
        f"which has {si(available, 'B')}; {si(needed[use], 'B')} of this is for {use}: reduce "
        f"{_KEYS[use]}"
    )


def check_program(name: str, compiled, config: Resolved, sizes: dict[str, int]) -> None:
    """Raise UserError if a device has less memory than a compiled program needs.

    Args:
        name: "training" or "evaluation".
        compiled: the compiled program, which knows what it needs (`jax.stages.Compiled`).
        config, sizes: those that it was compiled for.
    """
    available = device_memory(jax.local_devices()[0])
    memory = compiled.memory_analysis()
    if available is None or memory is None:
        return
    arguments = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    needed = arguments + memory.temp_size_in_bytes
    if needed <= available:
        return
    advice = f"reduce {_OF_PROGRAM[name]}"
    # At most half of the memory: the estimate by rows is rough.
    rows = int(rows_of_a_micro_batch(config, sizes) * available / needed / 2)
    if name == "training" and rows:
        advice += f"; try --config.train.micro_batch_size={2 ** (rows.bit_length() - 1)}"
    raise UserError(
        f"out of memory: the {name} program needs {si(needed, 'B')} on each device, which has "
        f"{si(available, 'B')}; {si(memory.temp_size_in_bytes, 'B')} of this is for activations, "
        f"gradients and logits: {advice}"
    )


def smallest_state(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the bytes of the parameters, in training with gradients, if all are sharded evenly."""
    n_copies = 2 if config.train.steps else 1
    n_parameters = parameters.count(parameters.parameter_table(config.model))
    itemsize = jnp.dtype(config.model.param_dtype).itemsize
    return n_copies * n_parameters * itemsize / (sizes["fsdp"] * sizes["tensor"])


def rows_of_a_micro_batch(config: Resolved, sizes: dict[str, int]) -> int:
    """Return how many sequences of a micro-batch a device has."""
    n_parts = sizes["replica"] * sizes["fsdp"] * micro_batches_per_step(config, sizes)
    return config.train.batch_size // n_parts


def device_memory(device) -> float | None:
    """Return the bytes that programs can allocate on a device; None if they are not known.

    CPU devices share the memory of the machine, or the part of it that the process may use.
    """
    if device.platform == "cpu":
        total = host_memory()
        return total and total / jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def host_memory() -> int | None:
    """Return the bytes of memory of this machine, or of its control group if fewer, or None."""
    limits = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError):
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
        folder = Path(f"/sys/fs/cgroup{group}")
        for directory in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or it contains "max"
                limits.append(int((directory / "memory.max").read_text()))
    return min(limits, default=None)


@contextlib.contextmanager
def report_out_of_memory(
    advice: str = "use a smaller config.train.micro_batch_size, config.eval.batch_size, config.train.seq_len or "
    f"{_MODEL}, or more devices with config.mesh.fsdp",
) -> Iterator[None]:
    """Return a context that raises UserError, with advice, if a device or the host lacks memory."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise UserError(f"out of memory: {first_line(error)}; {advice}") from error
        raise
