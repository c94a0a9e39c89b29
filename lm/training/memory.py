"""Refuse a config that needs more memory than is available, before anything is allocated.

The exit code is 2, as for other mistakes in the config, so that a scheduler does not restart the run.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from lm import parameters
from lm.config import Resolved
from lm.cost.memory import activation_bytes, logit_bytes, memory_per_device
from lm.cost.units import si
from lm.errors import UserError, first_line

# On a CPU the estimate was 0.62 to 1.00 times what XLA allocates for training (4 configs without remat, which XLA:CPU
# undoes), and 0.48 to 1.10 times what it allocates for evaluation (7 configs). So a config is refused only above MARGIN
# times the available memory, and a smaller batch is suggested only if it needs at most SURE times the available memory.
MARGIN, SURE = 1.25, 0.5
_MODEL = "config.model.{d_model, n_layers, d_ff, n_heads}"
STATE = "parameters, gradients and optimizer state"
_KEYS = {
    STATE: "config.model.{vocab_size, d_model, n_layers, d_ff, n_heads, max_positions}",
    "activations": "config.train.{batch_size, seq_len}, " + _MODEL,
    "logits": "config.train.{batch_size, seq_len}, config.model.vocab_size",
    "evaluation": "config.eval.batch_size, config.train.{batch_size, seq_len}",
    "the windows of a dispatch": "config.train.{steps_per_dispatch, batch_size}",
}


def check_memory(config: Resolved, sizes: dict[str, int]) -> None:
    """Raise UserError, with the keys to reduce, if a device of a mesh of these sizes has too little memory to train."""
    device = jax.local_devices()[0]
    available = device_memory(device)
    if available is None:
        return
    limit = MARGIN * available
    n_copies, itemsize = 2 if config.train.steps else 1, jnp.dtype(config.model.param_dtype).itemsize
    n_parameters = parameters.count(parameters.parameter_table(config.model))
    needed = {STATE: n_copies * n_parameters * itemsize / (sizes["fsdp"] * sizes["tensor"])}  # at least
    if needed[STATE] <= limit:  # for larger parameters JAX may refuse the shapes
        needed = needed_bytes(config, device, sizes)
    if sum(needed.values()) <= limit:
        return
    use = max(needed, key=needed.__getitem__)
    raise UserError(
        f"out of memory: training needs at least {si(sum(needed.values()), 'B')} on each device, which has "
        f"{si(available, 'B')}; {si(needed[use], 'B')} of this is for {use}: reduce {_KEYS[use]}"
        + (_smaller_batches(config, device, sizes, available) if use != STATE else "")
    )


def needed_bytes(config: Resolved, device, sizes: dict[str, int]) -> dict[str, float]:
    """Return the bytes on one device by use (a key of _KEYS): of training or of evaluation, whichever has more."""
    m, t = config.model, config.train
    memory = memory_per_device(config, device, sizes)
    found = {STATE: memory.parameters + memory.optimizer + (memory.gradients + memory.copies if t.steps else 0)}
    found["the windows of a dispatch"] = 12.0 * max(2, t.steps_per_dispatch) * t.batch_size  # int64 and int32
    evaluated = dataclasses.replace(
        config,
        model=dataclasses.replace(m, remat="none"),
        train=dataclasses.replace(t, batch_size=config.eval.batch_size or t.batch_size, micro_batch_size=None),
    )
    # An evaluation keeps about half of the activations that training keeps of a block, and no gradients of logits.
    evaluation = (activation_bytes(evaluated, device, sizes) / m.n_layers + logit_bytes(evaluated, sizes)) / 2
    if t.steps and memory.activations + memory.layer + memory.loss >= evaluation:
        return found | {"activations": memory.activations + memory.layer, "logits": memory.loss}
    return found | {"evaluation": evaluation}


def _smaller_batches(config: Resolved, device, sizes: dict[str, int], available: float) -> str:
    """Return "; KEY = VALUE would fit" with the largest power of two of micro_batch_size that fits, or ""."""
    n_parts, t = sizes["replica"] * sizes["fsdp"], config.train

    def with_size(size: int) -> Resolved:
        rows = min(config.eval.batch_size or t.batch_size, size * n_parts)
        evaluation = dataclasses.replace(config.eval, batch_size=rows)
        return dataclasses.replace(config, train=dataclasses.replace(t, micro_batch_size=size), eval=evaluation)

    for exponent in reversed(range((t.batch_size // n_parts).bit_length())):
        smaller = with_size(2**exponent)
        if sum(needed_bytes(smaller, device, sizes).values()) <= SURE * available:
            rows = smaller.eval.batch_size
            evaluation = "" if rows == config.eval.batch_size else f" with config.eval.batch_size = {rows}"
            return f"; config.train.micro_batch_size = {2**exponent}{evaluation} would fit"
    return ""


def device_memory(device) -> float | None:
    """Return the bytes that programs can allocate on a device; None if they are not known.

    CPU devices share the memory of the machine, or the part of it that the process may use.
    """
    if device.platform == "cpu":
        total = host_memory()
        return total and total / jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def host_memory() -> int | None:
    """Return the bytes of memory of this machine, or the limit of its control group if lower; None if unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError):
        group = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip())
        for directory in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or it contains "max"
                limits.append(int((directory / "memory.max").read_text()))
    return min(limits, default=None)


@contextlib.contextmanager
def report_out_of_memory(
    advice: str = "use a smaller config.train.micro_batch_size, config.eval.batch_size, config.train.seq_len or "
    f"{_MODEL}, or more devices with config.mesh.fsdp",
) -> Iterator[None]:
    """Return a context that raises UserError, with advice, if the host or a device runs out of memory."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        raise UserError(f"out of memory: {first_line(error)}; {advice}") from error
