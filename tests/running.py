"""Run lm.train for tests, as subprocesses, and read what a run wrote."""

import contextlib
import fcntl
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lm.files import write_text
from lm.workdir.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "tests" / "configs" / "tiny.py"


class Bench:
    """A directory that all tests of a session share: a text, caches, and one finished reference run."""

    def __init__(self, base: Path):
        self.base, self.text = base, base / "text.txt"
        base.mkdir(exist_ok=True)
        draw = random.Random(0)
        words = ("the", "cat", "sat", "on", "a", "mat", "and", "ran", "far", "home")
        write_text(self.text, "".join(draw.choice(words) + draw.choice("  \n") for _ in range(800)))
        self.env = os.environ | {"XDG_CACHE_HOME": str(base / "cache"), "PYTHONPATH": str(ROOT)}

    def arguments(self, workdir: Path | None, *more: str) -> list[str]:
        """Return the arguments for the tiny config on the bench's text; later arguments override earlier ones."""
        into = [f"--workdir={workdir}"] if workdir else []
        return [f"--config={CONFIG}", f"--config.data.source=text:{self.text}", *into, *more]

    def command(self, workdir: Path, *more: str, at: str | None = None) -> list[str]:
        """Return the command of a run; with at = "KILL log 3" it runs under tests/at_moment.py."""
        program = ["-m", "lm.train"] if at is None else [str(ROOT / "tests" / "at_moment.py"), *at.split()]
        return [sys.executable, *program, *self.arguments(workdir, *more)]

    def train(self, workdir: Path, *more: str, at: str | None = None) -> subprocess.CompletedProcess:
        """Run the command to its end."""
        command = self.command(workdir, *more, at=at)
        return subprocess.run(command, cwd=self.base, env=self.env, capture_output=True, text=True, timeout=600)

    def without_jax(self) -> Path:
        """Return a directory that makes `import jax` fail if it comes first in PYTHONPATH."""
        directory = self.base / "without_jax"
        directory.mkdir(exist_ok=True)
        (directory / "jax.py").write_text("raise ImportError('jax was imported')\n")
        return directory

    def reference(self) -> Path:
        """Return the workdir of an uninterrupted run, which is trained once per session; its output is beside it."""
        workdir, log = self.base / "reference", self.base / "reference.txt"
        with open(self.base / "reference.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another worker may be training it
            if not log.exists():
                done = self.train(workdir, "--config.log.tensorboard=true", "--config.eval.sample_tokens=10")
                assert done.returncode == 0, done.stderr
                log.write_text(done.stdout + done.stderr)
        return workdir


@contextlib.contextmanager
def small_disk(directory: Path, size: str = "200k"):
    """A file system of this size, mounted in a directory; the test is skipped where mounting is not possible."""
    disk = directory / "disk"
    disk.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a file system is not permitted")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def free_ports(n: int) -> list[int]:
    """Return n TCP ports that no process uses."""
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@contextlib.contextmanager
def several(bench: Bench, workdir: Path, n: int, *more: str, ids=None, at: dict[int, str] | None = None):
    """Start processes of one run, and kill them on exit. Process i writes its output to WORKDIR.i.log.

    Args:
        bench: the directory to run in.
        workdir: the workdir of the run.
        n: the number of processes of the run.
        *more: further arguments; {i} is replaced by the id of the process.
        ids: the ids of the processes to start; None: 0 to n - 1.
        at: an action and its moment for some ids; see tests/at_moment.py.
    """
    (port,), running = free_ports(1), []
    for place, i in enumerate(range(n) if ids is None else ids):
        address = ("--coordinator_address", f"127.0.0.1:{port}", "--num_processes", str(n), "--process_id", str(i))
        own = (word.replace("{i}", str(i)) for word in more)
        command = bench.command(workdir, *own, at=(at or {}).get(i)) + (list(address) if n > 1 else [])
        with open(workdir.parent / f"{workdir.name}.{place}.log", "w") as output:
            env = bench.env | {"JAX_PLATFORMS": "cpu"}  # one GPU cannot be shared by processes of one run
            running.append(subprocess.Popen(command, cwd=bench.base, env=env, stdout=output, stderr=output))
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def metrics_of(workdir: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without the timing fields."""
    return read_metrics(workdir / "metrics.jsonl", timing=False)


def summary_of(workdir: Path) -> dict:
    """Return summary.json."""
    return json.loads((workdir / "summary.json").read_text())


def checkpoint_steps(workdir: Path) -> list[int]:
    """Return the steps of the checkpoints on disk, in ascending order."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def checksums(workdir: Path, step: int) -> dict[str, str]:
    """Return the checksum of every leaf of a checkpoint (parameters, moments, counters), by path."""
    record = json.loads((workdir / "checkpoints" / str(step) / "meta" / "metadata").read_text())
    return {path: leaf["checksum"] for path, leaf in record["leaves"].items()}


def assert_same_run(workdir: Path, reference: Path, step: int = 12) -> None:
    """Assert that two runs ended in the same state, bit for bit, and logged the same lines, each once."""
    assert checksums(workdir, step) == checksums(reference, step)
    for ours, theirs in itertools.zip_longest(metrics_of(workdir), metrics_of(reference)):
        assert ours == theirs, f"{ours}\n{theirs}"
