"""Mirrors of runs: damaged files, and runs that are killed and lose their directory."""

import itertools
import random
import shutil
from collections.abc import Iterator

from benchmarks.faults.damage import WAYS, damage, files_below
from benchmarks.faults.judge import Trial, judge
from benchmarks.faults.kills import kill_after
from benchmarks.faults.runs import COMPILING, Bench, differences, stopped_at
from benchmarks.faults.workdirs import shuffled


def damaged(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of the mirror of an interrupted run in every way, and start an empty workdir from it."""
    original, copy, workdir = (bench.base / name for name in ("mirror", "damaged_mirror", "from_mirror"))
    if not original.exists():
        keys = (f"--mirror=file://{original}", "--config.train.steps_per_dispatch=1")
        with stopped_at(9):
            bench.train(bench.base / "mirrored", *keys, seconds=COMPILING)
    for file, way in shuffled(itertools.product(files_below(original), WAYS), draw):
        for directory in (copy, workdir):
            shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(original, copy)
        damage(copy / file.relative_to(original), way, draw)
        outcome, lost = bench.train(workdir, f"--mirror=file://{copy}"), []
        found = differences(workdir, bench.reference, steps=False) if outcome.code == 0 else []
        if outcome.code in (1, 2):
            shutil.copyfile(file, copy / file.relative_to(original))
            again = bench.train(workdir, f"--mirror=file://{copy}")
            lost += [again.last_line] if again.code else differences(workdir, bench.reference, steps=False)
        yield judge(f"{file.relative_to(original)} {way}", outcome, found, lost, names=("--mirror", "checkpoint"))


def killed(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Kill runs with SIGKILL at random moments, delete their workdirs, and repeat the commands."""
    for i in range(5):
        workdir, mirror = bench.base / f"killed_copying_{i}", f"--mirror=file://{bench.base}/mirror_{i}"
        kill_after(bench, "compiled", draw.random() * 4, bench.arguments(workdir, mirror))
        shutil.rmtree(workdir, ignore_errors=True)
        outcome = bench.train(workdir, mirror)
        found = differences(workdir, bench.reference, steps=False) if outcome.code == 0 else []
        lost = [] if outcome.code == 0 else [f"it cannot be resumed: {outcome.last_line}"]
        yield judge("SIGKILL at a random moment, and the workdir deleted", outcome, found, lost)
