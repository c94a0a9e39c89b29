"""Runs that are killed at chosen and at random moments, and resumed."""

import os
import random
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.damage import fingerprint
from benchmarks.faults.judge import Trial
from benchmarks.faults.runs import Bench, differences, judge_after_kill

MAX_PAUSE = 0.02  # maximum seconds between two random moments


def before_each_operation(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Kill a new run before each of its operations on files and at random moments, and resume it."""
    for state in states(bench, draw, None):
        yield resumed(bench, state, "new run killed", bench.reference)


def before_each_operation_after_resuming(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Kill a resumed run likewise; every second time its newest checkpoint is corrupted."""
    corrupted = draw.random() < 0.5
    expected = bench.resumed
    start = bench.interrupted
    if corrupted:
        start = bench.base / "corrupted"
        expected = bench.base / "corrupted_resumed"
        for directory in (start, expected):
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(bench.interrupted, directory)
            next((directory / "checkpoints" / "10" / "state" / "d").iterdir()).write_bytes(b"")
        assert bench.train(expected, "--resume").code == 0
    for state in states(bench, draw, start):
        # A run that fell back saves step 10 only if it is interrupted there again.
        yield resumed(bench, state, "resumed run killed", expected, steps=not corrupted)


def resumed(bench: Bench, state: Path, fault: str, expected: Path, *, steps: bool = True) -> Trial:
    """Resume a killed run, compare it with an undisturbed run, and delete it; see `differences`."""
    outcome = bench.train(state, "--resume")
    trial = judge_after_kill(fault, outcome, lambda: differences(state, expected, steps=steps))
    shutil.rmtree(state, ignore_errors=True)
    return trial


def states(bench: Bench, draw: random.Random, start: Path | None) -> Iterator[Path]:
    """Run lm.train, and yield a copy of each distinct workdir that a kill could leave.

    At each such moment all threads of the run are stopped (SIGSTOP), its directory is copied, and
    it continues. SIGKILL would leave the same files, because what a process has written remains
    when it is killed. The run resumes a copy of the workdir `start`, or is new.
    """
    home = bench.base / "kills"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    workdir = home / "run"
    copy = home / "state"
    seen = set()
    if start:
        shutil.copytree(start, workdir)
    (events, out), (replies, reply) = os.pipe(), os.pipe()
    arguments = bench.arguments(workdir, "--resume")
    program = ["-m", "benchmarks.faults.pausing", str(out), str(replies), *arguments]
    output = open(home / "output", "w")  # noqa: SIM115 - closed below
    process = bench.process(*program, pass_fds=(out, replies), stdout=output, stderr=output)
    os.close(out)
    os.close(replies)
    with output, process:
        try:
            while True:
                ready, _, _ = select.select([events], [], [], draw.random() * MAX_PAUSE)
                if ready and not os.read(events, 1):
                    break
                if workdir.exists() and _copied(process, workdir, copy, seen):
                    yield copy
                if ready:
                    os.write(reply, b".")
        finally:
            os.close(events)
            os.close(reply)
            process.kill()
    if differences(workdir, bench.reference, steps=False):
        raise RuntimeError(f"the run itself failed: {(home / 'output').read_text()}")


def _copied(process: subprocess.Popen, workdir: Path, copy: Path, seen: set[str]) -> bool:
    """Copy the workdir of a stopped run unless its state was seen before; return whether."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):  # it has ended
            process.returncode = os.waitstatus_to_exitcode(status)
            return False
        state = fingerprint(workdir)
        if state in seen:
            return False
        seen.add(state)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(workdir, copy, symlinks=True)
        return True
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGCONT)


def at_random_moments(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Kill runs with SIGKILL, at random moments after they opened their workdir, and resume them."""
    for i in range(5):
        workdir = bench.base / f"killed_{i}"
        shutil.rmtree(workdir, ignore_errors=True)
        bench.kill("workdir", draw.random() * 4, "-m", "lm.train", *bench.arguments(workdir))
        yield resumed(bench, workdir, "SIGKILL at a random moment", bench.reference)
