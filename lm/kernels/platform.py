"""The platform that a program is compiled for, which may not be the one it is compiled on."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

# XLA's options of training programs. On TPUs collectives then run at the same time as products. On
# GPUs the products for queries, keys and values stay apart: joined, their result is copied. Both are
# measured in compiled programs (benchmarks/NOTES.md).
OPTIONS: dict[str, dict[str, str | bool]] = {
    "gpu": {"xla_gpu_dot_merger_threshold_mb": "0"},
    "tpu": dict.fromkeys(
        (
            "xla_tpu_overlap_compute_collective_tc",
            "xla_enable_async_all_gather",
            "xla_enable_async_all_reduce",
            "xla_enable_async_reduce_scatter_fusion",
        ),
        True,
    ),
}
# libtpu 0.0.50 refuses these on other chips ("incorrect results, hang"); 0.0.42 took them.
OF_V5E = dict.fromkeys(
    (
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
    ),
    True,
)
_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def target() -> str:
    """Return the platform of the program that is traced: "cpu", "gpu" or "tpu".

    All choices between forms of a computation ask here, while they are traced.
    """
    return _target.get() or jax.default_backend()


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Trace the programs of this context for another platform than that of this process.

    JAX reuses traces of the same function: jit a function of its own within the context.

    >>> with compiling_for("tpu"):
    ...     target()
    'tpu'
    """
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)


def compiler_options(
    platform: str, device_kind: str, changed: tuple[str, ...] | None = None
) -> dict[str, str | bool]:
    """Return XLA's options of a training program, with those of config.train.compiler_options.

    `device_kind` is that of `jax.devices()[0].device_kind`.

    >>> compiler_options("cpu", "cpu", ("xla_cpu_enable_fast_math=true",))
    {'xla_cpu_enable_fast_math': True}
    """
    options: dict[str, str | bool] = dict(OPTIONS.get(platform, {}))
    if device_kind == "TPU v5 lite":
        options |= OF_V5E
    for option in changed or ():
        name, value = option.split("=", 1)
        options[name] = {"true": True, "false": False}.get(value, value)
    return options
