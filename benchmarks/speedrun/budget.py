"""Measure a config's training step, and estimate how many characters it can train on in 15 minutes.

    python3 -m benchmarks.speedrun.budget --config FILE --config.train.batch_size=16

Takes any arguments of lm.train. It compiles the training program, with warm caches if there are any, and runs a few
steps on one core, because other processes lengthen even the CPU time of two threads that wait for each other. The
estimate is a range: on two cores a step takes between half of the CPU time on one core and all of it.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import pin_to_one_core
from benchmarks.detail_cost import seconds
from benchmarks.speedrun.tracks import CORES, TRACKS
from lm import parameters, runtime
from lm.command_line.training import parse_arguments
from lm.errors import with_exit_code

ROUNDS, STEPS = 5, 2
BUDGET = TRACKS["shakespeare-2-cores"].wall_limit


@with_exit_code
def main() -> int:
    fixed = {"eval.every": 0, "checkpoint.every": 0, "train.steps_per_dispatch": STEPS}
    _, config = parse_arguments([*sys.argv[1:], *(f"--config.{key}={value}" for key, value in fixed.items())])
    pin_to_one_core()
    runtime.start_jax(config.data.cache_dir)
    import jax

    from benchmarks.worker import Ours
    from lm.training.run import prepare

    run, found = prepare(config, say=print), []

    def train():
        found[0].run(STEPS)
        jax.block_until_ready(found[0].state)

    with tempfile.TemporaryDirectory() as workdir:
        compilation, _ = seconds(lambda: found.append(Ours(run, Path(workdir))))
        train()
        steps = [seconds(train)[0] / STEPS for _ in range(ROUNDS)]
    cpu, n = statistics.median(steps), run.config.train.batch_size * run.config.train.seq_len
    print(f"{parameters.count(run.table):,} parameters, {n:,} characters a step, {compilation:.0f} CPU s to compile")
    rate = n * run.flops_per_token / cpu / 1e9
    print(f"{1000 * cpu:.0f} CPU ms a step ({1000 * min(steps):.0f} to {1000 * max(steps):.0f}), {rate:.0f} GFLOP/s")
    low, high = (cores * (BUDGET - compilation) / cpu * n / 1e6 for cores in (1, CORES))
    print(f"in {BUDGET} s on {CORES} cores: {low:.1f} to {high:.1f} million characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
