"""Tests of the project on the device, by many processes, with the names of those that fail."""

import os

from benchmarks.gpu.kit import Kit, ended, started
from benchmarks.gpu.lines import outcomes

# Their results depend on the device. In the order of value: the time may be up before the last.
PATHS = ["tests/test_step.py", "tests/layers", "tests/kernels", "tests/training/test_resume.py", "tests/generation",
         "tests/test_model.py", "tests/test_optimizers.py", "tests/training"]  # fmt: skip
TINY = ["tests/layers/test_dropout.py"]
# Sums in a fixed order and products in float32, as tests expect; autotuning would take the time.
ENV = {
    "XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
}


def measure(kit: Kit) -> None:
    """Run the tests; DIR/tests.txt has a line for each, and DIR/tests.log what pytest says."""
    lines = kit.out / "tests.txt"
    lines.write_text("")
    n = 2 if kit.tiny else max(2, len(os.sched_getaffinity(0)) - 2)
    paths = TINY if kit.tiny else PATHS
    options = ["-n", str(n), "--maxprocesses", str(n), "-p", "benchmarks.gpu.lines"]
    process = started(
        ["-m", "pytest", *options, *paths],
        kit.out / "tests.log",
        TEST_LINES=str(lines),
        **({} if kit.tiny else ENV),
    )
    status = ended(process, max(1.0, kit.left() - 5))
    found = outcomes(lines)
    counts = {outcome: len(tests) for outcome, tests in found.items()}
    kit.record(
        "tests",
        " ".join(paths),
        **counts,
        finished=status is not None,
        names=found["failed"],
        unfinished=found["running"],
    )
