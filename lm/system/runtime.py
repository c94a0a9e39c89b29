"""Set up JAX for a process. Importing this module does not import jax."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os

from lm.system import malloc
from lm.system.errors import UserError

ADVICE = {  # what to do if JAX does not find the platform
    "gpu": "install the extra [cuda] and a driver that supports its CUDA version, and check nvidia-smi; in a container "
    "LD_LIBRARY_PATH must include the driver's directory (on GKE /usr/local/nvidia/lib64)",
    "tpu": "install the extra [tpu], and check that no other process uses the TPU",
    "cpu": "add cpu to JAX_PLATFORMS",
}
# Equal seeds must give equal bits, whatever JAX_* variables say. Parameters and activations have
# dtypes of their own.
PROMISED = {
    "jax_threefry_partitionable": True,
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_random_seed_offset": 0,
}
# On GPUs XLA generates kernels of products, and compares their speed with that of cuBLAS. Without
# them, a model of 11 million parameters compiled in 22 s instead of 78 on an H200, and trained as
# fast (docs/performance.md).
QUICK_TO_COMPILE = (
    "--xla_gpu_enable_triton_gemm=false --xla_gpu_experimental_enable_fusion_autotuner=false"
)
COMPILED = "/jax/core/compile/backend_compile_duration"  # an event of jax.monitoring


@functools.cache
def _occupy_fragments_after_compilation() -> None:
    """Register a listener of JAX's compilations; functools.cache limits it to one per process."""
    import jax

    def after(event: str, duration_secs: float, **_: str | int) -> None:
        # Programs that are read from the cache leave few fragments.
        if event == COMPILED and duration_secs >= 1:
            malloc.occupy_fragments()

    jax.monitoring.register_event_duration_secs_listener(after)


def start_jax(
    cache_dir: str | None = None,
    *,
    deterministic: bool = False,
    retain_memory: bool = True,
    single_arena: bool = True,
):
    """Import and return jax, with the settings that must precede this, and a cache of programs.

    Args:
        cache_dir: the directory of caches; None: the user's cache directory.
        deterministic: choose GPU kernels whose sums are always added in one order.
        retain_memory: see `lm.system.malloc`; False for commands that need memory rather than
            speed.
        single_arena: see `malloc.retain_freed_memory`.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    is_file = flags.strip()[:1] not in ("", "-")  # XLA_FLAGS may name a file of flags
    if _compiles_for_gpus() and QUICK_TO_COMPILE not in flags and not is_file:
        # the last of equal flags counts
        os.environ["XLA_FLAGS"] = flags = f"{QUICK_TO_COMPILE} {flags}".strip()
    if deterministic:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
    if retain_memory:
        malloc.retain_freed_memory(single_arena=single_arena)
        _occupy_fragments_after_compilation()
    import jax

    from lm.system.files import user_cache

    for name, value in PROMISED.items():
        jax.config.update(name, value)
    if not jax.config.values["jax_compilation_cache_dir"]:
        with contextlib.suppress(UserError):  # no home directory: each start compiles
            jax.config.update("jax_compilation_cache_dir", str(user_cache(cache_dir) / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return jax


def _compiles_for_gpus() -> bool:
    """Return whether JAX has a plugin for GPUs that is known to have `QUICK_TO_COMPILE`.

    An unknown flag would end the process.
    """
    has_plugin = any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))
    version = importlib.metadata.version("jaxlib").split(".")
    return has_plugin and tuple(map(int, version[:2])) < (0, 13)


def require_platform(platform: str | None) -> None:
    """Raise UserError, with JAX's reason, unless JAX uses this platform: "cpu", "gpu" or "tpu";
    None: any.

    By default JAX falls back to the CPU. Call it after `processes.connect` and before anything uses
    a device.
    """
    import jax

    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    backend = "no device"
    reason = "JAX_PLATFORMS names another one first, or one that does not exist"
    try:
        backend = jax.default_backend()
        if platform in (None, backend):
            return
        # raises an error with the reason; for "gpu" it has none
        jax.devices("cuda" if platform == "gpu" else platform)
    except (RuntimeError, AssertionError) as error:  # the latter: JAX_PLATFORMS=cuda without a GPU
        reason = str(error) or reason
    place = f"--platform {platform}: " if platform else ""
    setting = os.environ.get("JAX_PLATFORMS")
    named = f" (with JAX_PLATFORMS={setting})" if setting else ""
    raise UserError(
        f"{place}JAX found {backend}{named}: {' '.join(reason.split())[:500].rstrip('.')}; "
        f"{ADVICE.get(platform or '', 'correct or unset JAX_PLATFORMS')}"
    )
