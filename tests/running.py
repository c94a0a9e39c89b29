"""Run commands in processes of their own for tests, and read what a run wrote."""

import atexit
import contextlib
import fcntl
import importlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from multiprocessing import forkserver, reduction
from pathlib import Path

import numpy as np
import pytest

from lm.system.files import write_text
from lm.workdir.metrics import read_metrics


def slow(*values):
    """Return a case of a parametrized test that runs with -m slow only; it repeats what a fast case
    proves.
    """
    return pytest.param(*values, marks=pytest.mark.slow)


ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "tests" / "configs" / "tiny.py"


# ---- Processes -----------------------------------------------------------------------------------

# Imported once per worker, by the process that all others are forked from. That halves the CPU time
# of a short run.
PRELOADED = ["lm.train", "lm.training.job", "lm.training.branch", "matplotlib.pyplot"]


class Command:
    """A command in a process of its own, with the interface of subprocess.Popen.

    Args:
        module: the module of the command's main(); "at_moment ACTION MOMENT COUNT" for lm.train
            under at_moment.py.
        arguments: of the command line.
        cwd: the working directory.
        env: the environment; None: that of this process. JAX reads only JAX_PLATFORMS and
            JAX_NUM_CPU_DEVICES from it.
        stdout: a file; None: a pipe, readable as `stdout`.
        stderr: a file; None: the same as stdout.
    """

    def __init__(
        self, module: str, arguments: list[str], *, cwd: Path, env=None, stdout=None, stderr=None
    ):
        self.stdout = None
        if stdout is None:
            end, write = os.pipe()
            self.stdout, stdout = open(end, errors="replace"), open(write, "w")  # noqa: SIM115 - closed by the caller
        context = multiprocessing.get_context("forkserver")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
            # A process that is killed leaves semaphores, which are then removed with a warning.
            patch.setenv("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
            context.set_forkserver_preload(PRELOADED)
            forkserver.ensure_running()
            # pytest is not imported
            patch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
            files = [reduction.DupFd(file.fileno()) for file in (stdout, stderr or stdout)]
            values = (
                module,
                [str(a) for a in arguments],
                str(cwd),
                dict(os.environ if env is None else env),
                files,
            )
            self._process = context.Process(target=_run, args=values)
            self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill
        if self.stdout:
            stdout.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_) -> None:
        if self.stdout:
            self.stdout.close()
        self.wait()


def _run(module: str, arguments: list[str], cwd: str, env: dict[str, str], files) -> None:
    """Run a command in a process that was forked for it."""
    for number, file in enumerate(files, 1):
        os.dup2(file.detach(), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)  # noqa: SIM115 - to the end
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    import jax

    for name in {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"} & env.keys():
        value = env[name]
        jax.config.update(name.lower(), int(value) if value.isdigit() else value)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, *before = module.split()
    sys.argv = [importlib.import_module(module).__file__, *arguments]
    main = importlib.import_module(module).main
    try:
        code = main(*before, *arguments) if before else main(arguments)
    finally:
        atexit._run_exitfuncs()
        if jax.distributed.is_initialized():  # a fork server of Python 3.13 forgets JAX's own exit
            jax.distributed.shutdown()
    sys.exit(code)  # multiprocessing flushes stdout and stderr


def completed(
    module: str, arguments: list[str], *, cwd: Path, env=None
) -> subprocess.CompletedProcess:
    """Run a command in a process of its own to its end."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        code = Command(module, arguments, cwd=cwd, env=env, stdout=stdout, stderr=stderr).wait(
            timeout=900
        )
        outputs = [(file.seek(0), file.read())[1] for file in (stdout, stderr)]
        return subprocess.CompletedProcess([module, *arguments], code, *outputs)


def python(script: str, *arguments: object, **environment: str) -> str:
    """Return the output of a Python script in a process of its own, on CPU devices, to its end."""
    env = (
        os.environ
        | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
        | environment
    )
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def on_devices(
    directory: Path, n: int, cases: list[dict], **environment: str
) -> tuple[list[dict], list[str]]:
    """Run the cases of tests/on_devices.py on n devices; returns a dict of arrays and an HLO text
    for each case.
    """
    out = directory / f"on_{n}.npz"
    job = json.dumps({"devices": n, "cases": cases})
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    done = completed("on_devices", [job, out], cwd=directory, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [{} for _ in cases]
    with np.load(out) as arrays:
        for name, array in arrays.items():
            i, _, rest = name.partition("/")
            found[int(i)][rest] = array
    texts = [out.with_suffix(f".{i}.hlo") for i in range(len(cases))]
    return found, [text.read_text() if text.exists() else "" for text in texts]


class Bench:
    """A directory that all tests of a session share: a text, caches, and one finished reference
    run.
    """

    def __init__(self, base: Path):
        self.base, self.text = base, base / "text.txt"
        base.mkdir(exist_ok=True)
        draw = random.Random(0)
        words = ("the", "cat", "sat", "on", "a", "mat", "and", "ran", "far", "home")
        write_text(self.text, "".join(draw.choice(words) + draw.choice("  \n") for _ in range(800)))
        self.env = os.environ | {"XDG_CACHE_HOME": str(base / "cache"), "PYTHONPATH": str(ROOT)}

    def arguments(self, workdir: Path | None, *more: str) -> list[str]:
        """Return the arguments for the tiny config on the bench's text; those in `more` stand in
        their place.
        """
        first = [f"--config={CONFIG}", f"--config.data.source=text:{self.text}"]
        if workdir:
            first.append(f"--workdir={workdir}")
        names = {argument.partition("=")[0] for argument in more}
        if "--config.data.mixture" in names:
            names.add("--config.data.source")
        return [*(argument for argument in first if argument.partition("=")[0] not in names), *more]

    def start(self, workdir: Path, *more: str, at: str | None = None, **options) -> Command:
        """Start a run; with at = "KILL log 3" under tests/at_moment.py. Options: see `Command`."""
        options = {"cwd": self.base, "env": self.env} | options
        return Command(
            f"at_moment {at}" if at else "lm.train", self.arguments(workdir, *more), **options
        )

    def train(
        self, workdir: Path, *more: str, at: str | None = None
    ) -> subprocess.CompletedProcess:
        """Run lm.train in a process of its own to its end; `at`: see `start`."""
        module = f"at_moment {at}" if at else "lm.train"
        return completed(module, self.arguments(workdir, *more), cwd=self.base, env=self.env)

    def reference(self) -> Path:
        """Return the workdir of an uninterrupted run, which is trained once per session; its output
        is beside it.
        """
        workdir, log = self.base / "reference", self.base / "reference.txt"
        with open(self.base / "reference.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another worker may be training it
            if not log.exists():
                done = self.train(
                    workdir, "--config.log.tensorboard=true", "--config.eval.sample_tokens=10"
                )
                assert done.returncode == 0, done.stderr
                log.write_text(done.stdout + done.stderr)
        return workdir


@contextlib.contextmanager
def small_disk(directory: Path, size: str = "200k"):
    """A file system of this size, mounted in a directory; the test is skipped where mounting is not
    possible.
    """
    disk = directory / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def free_ports(n: int) -> list[int]:
    """Return n TCP ports that no process uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in sockets]


@contextlib.contextmanager
def several(
    bench: Bench, workdir: Path, n: int, *more: str, ids=None, at: dict[int, str] | None = None
):
    """Start processes of one run, and kill them on exit. Process i writes its output to
    WORKDIR.i.log.

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
        address = (
            "--coordinator_address",
            f"127.0.0.1:{port}",
            "--num_processes",
            str(n),
            "--process_id",
            str(i),
        )
        own = (word.replace("{i}", str(i)) for word in more)
        with open(workdir.parent / f"{workdir.name}.{place}.log", "w") as output:
            # one GPU cannot be shared by processes of one run
            env = bench.env | {"JAX_PLATFORMS": "cpu"}
            words = (*own, *(address if n > 1 else ()))
            running.append(
                bench.start(workdir, *words, at=(at or {}).get(i), env=env, stdout=output)
            )
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def metrics_of(workdir: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without the timing fields."""
    return read_metrics(workdir / "metrics.jsonl", timing=False)


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def summary_of(workdir: Path) -> dict:
    """Return summary.json."""
    return json.loads((workdir / "summary.json").read_text())


def checkpoint_steps(workdir: Path) -> list[int]:
    """Return the steps of the checkpoints on disk, in ascending order."""
    return sorted(
        int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()
    )


def checksums(workdir: Path, step: int) -> dict[str, str]:
    """Return the checksum of every leaf of a checkpoint (parameters, moments, counters), by path."""
    record = json.loads((workdir / "checkpoints" / str(step) / "meta" / "metadata").read_text())
    return {path: leaf["checksum"] for path, leaf in record["leaves"].items()}


def assert_same_run(workdir: Path, reference: Path, step: int = 12) -> None:
    """Assert that two runs ended in the same state, bit for bit, and logged the same lines, each
    once.
    """
    assert checksums(workdir, step) == checksums(reference, step)
    for ours, theirs in itertools.zip_longest(metrics_of(workdir), metrics_of(reference)):
        assert ours == theirs, f"{ours}\n{theirs}"
