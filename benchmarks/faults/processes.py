"""Processes that share a workdir or a cache."""

import random
import shutil
from collections.abc import Iterator

from benchmarks.faults.judge import Outcome, Trial, judge
from benchmarks.faults.runs import Bench, differences

N_ROUNDS = 2


def sharing(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Start the same run twice at once: in one workdir, and in two workdirs with one empty cache."""
    for _ in range(N_ROUNDS):
        workdir = bench.base / "shared"
        shutil.rmtree(workdir, ignore_errors=True)
        ends = _together([bench.arguments(workdir, "--resume")] * 2, bench)
        changes = (
            differences(workdir, bench.reference)
            if 0 in (end.code for end in ends)
            else ["no run finished"]
        )
        for end in ends:
            yield judge("two runs in one workdir", end, changes, names=("is in use by",))
        cache = bench.base / "shared_cache"
        workdirs = [bench.base / f"shared_{i}" for i in range(2)]
        for directory in (cache, *workdirs):
            shutil.rmtree(directory, ignore_errors=True)
        ends = _together(
            [bench.arguments(w, f"--config.data.cache_dir={cache}") for w in workdirs], bench
        )
        for end, workdir in zip(ends, workdirs, strict=True):
            changes = differences(workdir, bench.reference)
            changes = [
                text for text in changes if "config.json" not in text and "summary" not in text
            ]
            yield judge("two runs with one empty cache", end, changes)


def _together(commands: list[list[str]], bench: Bench) -> list[Outcome]:
    running = [bench.process("-m", "lm.train", *arguments) for arguments in commands]
    return [Outcome(process.wait(), process.stdout.read()) for process in running]
