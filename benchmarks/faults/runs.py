"""Run commands in this process, which compiles each program once, and compare the results of runs."""

import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.faults.damage import WAYS, damage, files_below, fingerprint
from benchmarks.faults.judge import Outcome, Trial, judge

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "configs" / "tiny.py"
LAST_STEP = 12
SECONDS = 120  # after which a command counts as hung
COMPILING = 600  # for the first commands, which compile


class Bench:
    """A directory with a text, caches and runs. A run is trained when it is first needed.

    Attributes:
        base: the directory.
        text: the text that runs train on.
    """

    def __init__(self, base: Path):
        self.base = base
        self.text = base / "text.txt"
        base.mkdir(parents=True, exist_ok=True)
        draw = random.Random(0)
        words = ("the", "cat", "sat", "on", "a", "mat", "and", "ran", "far", "home")
        self.text.write_text("".join(draw.choice(words) + draw.choice("  \n") for _ in range(800)))
        os.environ["XDG_CACHE_HOME"] = str(base / "cache")
        self._n_copies = 0

    @functools.cached_property
    def reference(self) -> Path:
        """Train a run that is never disturbed; returns its workdir."""
        assert self.train(self.base / "reference", seconds=COMPILING).code == 0
        return self.base / "reference"

    @functools.cached_property
    def interrupted(self) -> Path:
        """Train a run that SIGTERM stops at step 10, with checkpoints of steps 8 and 10."""
        # step 10 is sent to the device before step 9 is logged
        keys = ("--config.train.steps_per_dispatch=1",)
        with stopped_at(9):
            outcome = self.train(self.base / "interrupted", *keys, seconds=COMPILING)
        assert outcome.code == 128 + signal.SIGTERM, outcome.output
        return self.base / "interrupted"

    @functools.cached_property
    def resumed(self) -> Path:
        """Resume a copy of the interrupted run without a fault; returns its workdir."""
        shutil.copytree(self.interrupted, self.base / "resumed")
        assert self.train(self.base / "resumed", "--resume", seconds=COMPILING).code == 0
        assert not differences(self.base / "resumed", self.reference, steps=False)
        return self.base / "resumed"

    def arguments(self, workdir: Path, *more: str) -> list[str]:
        """Return the arguments of lm.train for the tiny config on the text of this directory."""
        return [
            f"--config={CONFIG}",
            f"--config.data.source=text:{self.text}",
            f"--workdir={workdir}",
            *more,
        ]

    def train(self, workdir: Path, *more: str, seconds: int = SECONDS) -> Outcome:
        """Run lm.train in this process."""
        from lm import train
        from lm.training import finish

        # Drawing the figure would take half of the time of such a short run.
        with mock.patch.object(finish, "to_png", return_value=b"figure"):
            return call(train.main, self.arguments(workdir, *more), seconds)

    def process(self, *program: str, **options) -> subprocess.Popen:
        """Start a Python program in a new process; by default its output is a pipe."""
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
        return subprocess.Popen([sys.executable, *program], cwd=self.base, env=env, **options)

    def run(self, *program: str) -> Outcome:
        """Run a Python program in a new process."""
        process = self.process(*program)
        output, _ = process.communicate(timeout=3600)
        return Outcome(process.returncode, output)

    def kill(self, start: str, seconds: float, *program: str) -> None:
        """Run a Python program, and kill it some seconds after a line that begins with `start`."""
        with self.process(*program) as process:
            for line in process.stdout:
                if line.startswith(start):
                    time.sleep(seconds)
                    break
            process.kill()

    @contextlib.contextmanager
    def copy(self, source: Path) -> Iterator[Path]:
        """Copy a directory for one trial; the copy is deleted afterwards."""
        self._n_copies += 1
        target = self.base / "trials" / str(self._n_copies)
        shutil.copytree(source, target, symlinks=True)
        try:
            yield target
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def trial(
        self,
        fault: str,
        name: Path,
        injure: Callable[[Path], object],
        losses: Callable[[Outcome], list[str]] = lambda outcome: [],
    ) -> Trial:
        """Injure an entry of a copy of the interrupted run, resume it, and judge the result.

        An error must name the entry, whose `name` is relative to the workdir, or the checkpoints.
        """
        with self.copy(self.interrupted) as workdir:
            expected = self.resumed
            injure(workdir / name)
            gone = []
            for step in checkpoint_steps(self.interrupted):
                checkpoint = Path("checkpoints", str(step))
                if fingerprint(self.interrupted / checkpoint) != fingerprint(workdir / checkpoint):
                    gone.append(step)

            def differ(injured: Outcome | None) -> list[str]:
                excused = {"output": injured.output, "gone": gone} if injured else {}
                return differences(workdir, expected, **excused)

            def undo() -> None:
                remove(workdir / name)
                original = self.interrupted / name
                if original.is_dir():
                    shutil.copytree(original, workdir / name)
                elif original.exists():
                    shutil.copy2(original, workdir / name)

            def resume() -> Outcome:
                return self.train(workdir, "--resume")

            names = (name.name, "checkpoints")
            return judge_and_undo(fault, resume, differ, undo, names, losses)

    def damaged(self, whole: Path, draw: random.Random) -> Iterator[tuple[str, Path, Path]]:
        """Damage every file of a directory in every way, each in a copy, in random order.

        Yields a description, the damaged or deleted file, and the copy.
        """
        for file, way in shuffled(itertools.product(files_below(whole), WAYS), draw):
            with self.copy(whole) as copy:
                name = file.relative_to(whole)
                damage(copy / name, way, draw)
                yield f"{name} {way}", copy / name, copy

    def damaged_and_read(
        self,
        what: str,
        whole: Path,
        draw: random.Random,
        read: Callable[[Path], tuple[Outcome, Any]],
        *names: str,
    ) -> Iterator[Trial]:
        """Damage every file of a directory in every way, and read it by an innocent command.

        Args:
            what: what is read, for the description of the fault.
            read: maps a directory to an outcome, and to what must be the same as from the undamaged
                directory.
            names: an error must contain one of these, or the name of the file or the directory.
        """
        _, expected = read(whole)
        for fault, file, copy in self.damaged(whole, draw):
            outcome, content = read(copy)
            changed = [] if content == expected else [f"another {what}"]
            yield judge(f"{fault}: {what}", outcome, changed, names=(file.name, str(copy), *names))


def judge_and_undo(
    fault: str,
    run: Callable[[], Outcome],
    differ: Callable[[Outcome | None], list[str]],
    undo: Callable[[], object],
    names: tuple[str, ...],
    losses: Callable[[Outcome], list[str]] = lambda outcome: [],
) -> Trial:
    """Run a command after a fault, and judge its result.

    After an error, undo the fault and run it again. If the result then differs, something intact
    was lost.

    Args:
        differ: how the result differs from the undisturbed one; called with the outcome, or None
            with the fault undone.
        names: an error must contain one of these.
        losses: called after the first outcome; returns what was lost elsewhere.
    """
    outcome = run()
    changes = differ(outcome) if outcome.code == 0 else []
    lost = losses(outcome)
    if outcome.code in (1, 2):
        undo()
        again = run()
        texts = [f"exit code {again.code}: {again.last_line}"] if again.code else differ(None)
        lost = lost + [f"with the fault undone: {text}" for text in texts]
    return judge(fault, outcome, changes, lost, names)


def judge_after_kill(fault: str, outcome: Outcome, differ: Callable[[], list[str]]) -> Trial:
    """Judge a command that continues one that was killed: it must succeed."""
    if outcome.code == 0:
        return judge(fault, outcome, differ())
    return judge(fault, outcome, losses=[f"it cannot be resumed: {outcome.last_line}"])


def remove(path: Path) -> None:
    """Delete a file, a link or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def shuffled(items: Iterable, draw: random.Random) -> list:
    """Return the items in a random order, so that the first ones are a sample."""
    items = list(items)
    draw.shuffle(items)
    return items


@contextlib.contextmanager
def stopped_at(step: int) -> Iterator[None]:
    """Send SIGTERM to this process before the metrics of a step are written."""
    from lm.workdir.metrics import MetricsWriter

    write = MetricsWriter.write

    def writing(self, line: dict) -> None:
        if line["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        write(self, line)

    with mock.patch.object(MetricsWriter, "write", writing):
        yield


def call(main: Callable[[list[str]], int], arguments: list[str], seconds: int = SECONDS) -> Outcome:
    """Call a command's main function and capture what is printed; hung after `seconds`."""

    def hung(*_):
        raise TimeoutError(f"the command hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, hung)
    with tempfile.TemporaryFile("w+", errors="replace", buffering=1) as file:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            signal.alarm(seconds)
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                code = _exit_code(main, arguments)
        finally:
            signal.alarm(0)
            os.dup2(stderr, 2)
            os.close(stderr)
            signal.signal(signal.SIGALRM, before)
        file.seek(0)
        return Outcome(code, file.read())


def _exit_code(main, arguments) -> int | None:
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return None


def differences(
    workdir: Path, expected: Path, output: str = "", *, steps: bool = True, gone=()
) -> list[str]:
    """Return how the results of two runs differ, without times; [] if they are equal.

    Args:
        workdir: the run. It may have older checkpoints than the other one: a kill can prevent their
            deletion.
        expected: the workdir of the undisturbed run.
        output: what the run printed; if it warned that metrics.jsonl is corrupted, only the new
            lines must be equal.
        steps: whether it must have all checkpoints of the other one.
        gone: steps of checkpoints that the fault deleted or damaged.
    """
    from lm.workdir.metrics import read_metrics

    changes = []
    resumed_at = 0
    if "metrics.jsonl is corrupted" in output:
        resumed_at = int(re.search(r"resuming at step (\d+)", output)[1])

    def metrics(path: Path) -> list[dict]:
        lines = read_metrics(path / "metrics.jsonl", timing=False)
        return [line for line in lines if line["step"] > resumed_at]

    for name, read in {
        "the last state": _last_checksums,
        "summary.json": _summary,
        "config.json": lambda path: (path / "config.json").read_text(),
        "tokenizer.json": lambda path: (path / "tokenizer.json").read_text(),
    }.items():
        try:
            if read(workdir) != read(expected):
                changes.append(f"{name} differs")
        except (OSError, ValueError, KeyError) as error:
            changes.append(f"{name}: {error!r}")
    if metrics(workdir) != metrics(expected):
        changes.append("metrics.jsonl differs")
    missing = {*checkpoint_steps(expected)} - {*checkpoint_steps(workdir), *gone}
    if steps and missing:
        changes.append(f"the checkpoints of steps {sorted(missing)} are missing")
    return changes


def checkpoint_steps(workdir: Path) -> list[int]:
    """Return the steps of the checkpoints on disk, in ascending order."""
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    return sorted(int(name) for name in names if name.isdigit())


def _last_checksums(workdir: Path) -> dict:
    path = workdir / "checkpoints" / str(LAST_STEP) / "meta" / "metadata"
    record = json.loads(path.read_text())
    return {path: leaf["checksum"] for path, leaf in record["leaves"].items()}


def _summary(workdir: Path) -> dict:
    summary = json.loads((workdir / "summary.json").read_text())
    for key in ("wall_seconds", "goodput", "crc32"):  # they differ from run to run
        summary.pop(key, None)
    return summary
