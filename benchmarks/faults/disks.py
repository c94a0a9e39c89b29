"""Disks that are full or read-only. These faults need the permission to mount a file system."""

import contextlib
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.judge import Outcome, Trial
from benchmarks.faults.runs import Bench, differences, judge_and_undo

N_SIZES = 20


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path | None]:
    """Mount a file system of this size in a directory; None where that is not permitted."""
    directory.mkdir(exist_ok=True)
    mounted = shutil.which("mount") and not _run(
        "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)
    )
    try:
        yield directory if mounted else None
    finally:
        if mounted:
            _run("umount", "--lazy", str(directory))


def full(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Train on disks of random sizes; where one is too small, resume with more space."""
    for _ in range(N_SIZES):
        size = draw.randrange(4, 260)
        with small_disk(bench.base / "disk", f"{size}k") as disk:
            if disk is None:
                print("full_disk: mounting a file system is not permitted here")
                return
            yield _trial(bench, disk, f"a disk of {size} KiB")
    for _ in range(2):
        with small_disk(bench.base / "disk", "2m") as disk:
            (disk / "run").mkdir()
            _run("mount", "-o", "remount,ro", str(disk))
            yield _trial(bench, disk, "a read-only disk")
            _run("mount", "-o", "remount,rw", str(disk))


def _trial(bench: Bench, disk: Path, fault: str) -> Trial:
    workdir = disk / "run"

    def losses(outcome: Outcome) -> list[str]:
        if outcome.code == 0:
            return []
        left = [
            path.name for path in disk.rglob("*") if "tmp" in path.name or "partial" in path.name
        ]
        repeated = outcome.output.count("No space left") > 1
        return [f"partial files are left behind: {left}"] * bool(left) + [
            "two lines report the full disk"
        ] * repeated

    return judge_and_undo(
        fault,
        lambda: bench.train(workdir, "--resume"),
        lambda _: differences(workdir, bench.reference),
        lambda: _run("mount", "-o", "remount,rw,size=4m", str(disk)),
        names=(str(disk),),
        losses=losses,
    )


def _run(*command: str) -> int:
    return subprocess.run(command, capture_output=True).returncode
