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
        found = (
            differences(workdir, bench.reference)
            if 0 in (end.code for end in ends)
            else ["no run finished"]
        )
        for end in ends:
            yield judge("two runs in one workdir", end, found, names=("is in use by",))
        cache, workdirs = (
            bench.base / "shared_cache",
            [bench.base / f"shared_{i}" for i in range(2)],
        )
        for directory in (cache, *workdirs):
            shutil.rmtree(directory, ignore_errors=True)
        ends = _together(
            [bench.arguments(w, f"--config.data.cache_dir={cache}") for w in workdirs], bench
        )
        for end, workdir in zip(ends, workdirs, strict=True):
            found = differences(workdir, bench.reference)
            found = [text for text in found if "config.json" not in text and "summary" not in text]
            yield judge("two runs with one empty cache", end, found)


def _together(commands: list[list[str]], bench: Bench) -> list[Outcome]:
    running = [bench.process("-m", "lm.train", *arguments) for arguments in commands]
    return [Outcome(process.wait(), process.stdout.read()) for process in running]
