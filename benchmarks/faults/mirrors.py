"""Mirrors of runs: damaged files, and runs that are killed and lose their directory."""

import random
import shutil
from collections.abc import Iterator

from benchmarks.faults.judge import Trial
from benchmarks.faults.runs import (
    COMPILING,
    Bench,
    differences,
    judge_after_kill,
    judge_and_undo,
    stopped_at,
)


def damaged(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of an interrupted run's mirror, and start an empty workdir from it."""
    original = bench.base / "mirror"
    workdir = bench.base / "from_mirror"
    if not original.exists():
        keys = (f"--mirror=file://{original}", "--config.train.steps_per_dispatch=1")
        with stopped_at(9):
            bench.train(bench.base / "mirrored", *keys, seconds=COMPILING)
    for fault, file, copy in bench.damaged(original, draw):
        shutil.rmtree(workdir, ignore_errors=True)
        yield judge_and_undo(
            fault,
            lambda copy=copy: bench.train(workdir, f"--mirror=file://{copy}"),
            lambda _: differences(workdir, bench.reference, steps=False),
            lambda file=file, copy=copy: shutil.copyfile(original / file.relative_to(copy), file),
            names=("--mirror", "checkpoint"),
        )


def killed(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Kill runs with SIGKILL at random moments, delete their workdirs, and repeat the commands."""
    for i in range(5):
        workdir = bench.base / f"killed_copying_{i}"
        mirror = f"--mirror=file://{bench.base}/mirror_{i}"
        bench.kill(
            "compiled", draw.random() * 4, "-m", "lm.train", *bench.arguments(workdir, mirror)
        )
        shutil.rmtree(workdir, ignore_errors=True)
        yield judge_after_kill(
            "SIGKILL at a random moment, and the workdir deleted",
            bench.train(workdir, mirror),
            lambda workdir=workdir: differences(workdir, bench.reference, steps=False),
        )
