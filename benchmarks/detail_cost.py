"""Measure the cost of log.detail_every: the time of one measurement relative to that of a training step.

    python3 -m benchmarks.detail_cost --config configs/shakespeare.py

Takes any arguments of lm.train. Both programs are compiled first. Each of 15 rounds then times 10 training steps and
one measurement, in reverse order in every other round. Prints medians.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from lm import runtime
from lm.command_line.training import parse_arguments
from lm.errors import with_exit_code

ROUNDS, STEPS = 15, 10


@with_exit_code
def main() -> int:
    rare = [f"--config.{key}=0" for key in ("eval.every", "checkpoint.every", "log.detail_every")]
    _, config = parse_arguments([*sys.argv[1:], *rare])
    runtime.start_jax(config.data.cache_dir)
    import jax

    from benchmarks.worker import Ours
    from lm.training.run import prepare

    with tempfile.TemporaryDirectory() as workdir:
        ours = Ours(prepare(config, say=print), Path(workdir))
        compilation = seconds(lambda: ours.loop.diagnostics.details(ours.state))

        def train():
            ours.run(STEPS)
            jax.block_until_ready(ours.state)

        train()
        step, detail = [], []
        for i in range(ROUNDS):
            pairs = [(step, train, STEPS), (detail, lambda: ours.loop.diagnostics.details(ours.state), 1)]
            for found, work, n in pairs[:: (-1) ** i]:
                found.append([x / n for x in seconds(work)])
    for i, clock in enumerate(("CPU", "wall")):
        ratios = [d[i] / s[i] for d, s in zip(detail, step, strict=True)]
        medians = statistics.median(s[i] for s in step), statistics.median(d[i] for d in detail)
        print(
            f"{clock} seconds: step {medians[0]:.3f}, measurement {medians[1]:.3f}; "
            f"a measurement takes {statistics.median(ratios):.2f} steps ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"first measurement, with its compilation: CPU {compilation[0]:.1f} s, wall {compilation[1]:.1f} s")
    return 0


def seconds(work) -> tuple[float, float]:
    """Return the CPU seconds and the wall seconds of a call."""
    began = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - began[0], time.perf_counter() - began[1]


if __name__ == "__main__":
    sys.exit(main())
