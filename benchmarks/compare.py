"""Shared parts of the comparisons: arguments, workers, alternating rounds, ratios, tables.

"Ours" is this codebase, "theirs" is transformers in PyTorch.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.page import fill, marked
from lm.system.errors import UserError
from lm.system.git import git_state
from lm.workdir.provenance import PACKAGES, format_command, processor, versions

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "performance.md"


def argument_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """Return the parser of `benchmarks.NAME` with the arguments that all comparisons share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc.split("\n")[0]
    )
    parser.add_argument(
        "--pin", action="store_true", help="run each side on one core and compare CPU seconds"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="how many times each side is timed [%(default)s]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there")
    parser.add_argument(
        "--publish", action="store_true", help="write results/NAME.json and docs/performance.md"
    )
    parser.add_argument(
        "--name", default=name, help=f"of the results and of the marks of their table [{name}]"
    )
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and check what would otherwise fail after minutes of measuring.

    Pins this process to one core if --pin is given. Raises UserError if PyTorch or transformers is
    missing, or if --publish is given and docs/performance.md has no marks for the table.
    """
    a = parser.parse_args()
    if a.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {a.rounds}")
    if missing := [
        name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None
    ]:
        raise UserError(f"{' and '.join(missing)} not installed; run: pip install -e '.[bench]'")
    if a.publish:
        marked(PAGE, a.name)
    if a.pin:
        with contextlib.suppress(AttributeError):  # macOS
            # this process, and every process that it starts
            os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    return a


class Worker:
    """One side of a comparison: a process of benchmarks/worker.py with a job, driven by JSON lines.

    Its standard error goes to WORKDIR/SIDE.log.

    Args:
        job: see benchmarks/worker.py.
        env: more variables of its environment.
    """

    def __init__(self, job: dict, env: dict[str, str] | None = None):
        arguments = [sys.executable, "-m", "benchmarks.worker", json.dumps(job)]
        # Both sides share one GPU, so JAX must not preallocate most of its memory.
        shared = {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment = os.environ | shared | (env or {})
        self.log = open(Path(job["workdir"]) / f"{job['side']}.log", "w+")  # noqa: SIM115 - closed in close()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(arguments, env=environment, text=True, **pipes)

    def ask(self, **question) -> dict:
        """Send a question and return the answer; RuntimeError with the log if the worker died."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            self.log.seek(0)
            raise RuntimeError(f"a worker process failed: {self.log.read()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the worker has already exited
            self.process.stdin.close()
        self.process.wait()
        self.log.close()


def alternate(rounds: int, *sides: Callable[[], Any]) -> tuple[list, ...]:
    """Call all functions once per round, in turns A B C, C B A, ..., so that drift affects all.

    Returns the results of each side, one per round.
    """
    results = tuple([] for _ in sides)
    for i in range(rounds):
        for k in range(len(sides))[:: -1 if i % 2 else 1]:
            results[k].append(sides[k]())
    return results


def ratio(denominators: list[float], numerators: list[float]) -> dict:
    """Return the median, range and quartiles of the ratios of all rounds, and the number of rounds.

    With our seconds as denominators and theirs as numerators, a ratio above 1 means that we are
    faster.

    >>> ratio([1.0, 2.0, 1.0], [2.0, 3.0, 1.0])
    {'median': 1.5, 'low': 1.0, 'high': 2.0, 'quartiles': [1.25, 1.75], 'rounds': 3}
    """
    ratios = [b / a for a, b in zip(denominators, numerators, strict=True)]
    spread = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    q1, _, q3 = statistics.quantiles(ratios * 2 if len(ratios) == 1 else ratios, method="inclusive")
    return spread | {"quartiles": [q1, q3], "rounds": len(ratios)}


def timed(
    command: list[str],
    env: dict[str, str] | None = None,
    until: Callable[[str], bool] | None = None,
) -> dict:
    """Run a command to its end, or kill it after a line of its output.

    Args:
        command: the program and its arguments, run in the root of the repository.
        env: its environment; None: that of this process.
        until: whether a line is the last one that is awaited; None: the command runs to its end.

    Returns:
        {"wall", "cpu": seconds, of it and its children; "peak_bytes": largest resident size;
        "output": lines}

    Raises RuntimeError with the end of the output if the command fails, or ends before that line.
    """
    began = time.perf_counter()
    lines = []
    reached = False
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=env, **pipes)
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if until and (reached := until(line)):
            wall = time.perf_counter() - began
            process.kill()
            break
    _, status, usage = os.wait4(process.pid, 0)
    if not reached:
        wall = time.perf_counter() - began
        if status or until:
            raise RuntimeError("\n".join(lines)[-3000:])
    cpu = usage.ru_utime + usage.ru_stime
    return {"wall": wall, "cpu": cpu, "peak_bytes": usage.ru_maxrss * 1024, "output": lines}


def publish(a: argparse.Namespace, rows: list | dict, table: str) -> None:
    """Print the table of these measurements, and write both where the command line says."""
    print(table)
    if a.json:
        write_results(a.json, rows)
    if a.publish:
        results = write_results(RESULTS / f"{a.name}.json", rows)
        fill(PAGE, a.name, f"{table}\n\n{where_and_when(results['machine'])}")


def write_results(path: Path, rows: list | dict) -> dict:
    """Write a JSON file and return it: the rows, this process's command, and the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = format_command(f"benchmarks.{Path(sys.argv[0]).stem}", sys.argv[1:])
    results = {"command": command, "machine": machine(), "rows": rows}
    path.write_text(json.dumps(results, indent=1) + "\n")
    return results


def where_and_when(machine: dict) -> str:
    """Return a sentence with the date, the device, the versions and the commit of a result.

    >>> about = {"date": "2026-11-25", "cpu": "A Processor", "cores": 2, "cores_used": 1, "gpu": None}
    >>> about |= {"versions": {"jax": "0.10.2", "torch": None}, "git": {"commit": "2cb06c9af3", "dirty": True}}
    >>> where_and_when(about)
    'Measured 2026-11-25 on 1 of 2 cores of A Processor; jax 0.10.2; commit 2cb06c9 with uncommitted files.'
    """
    shown = {name: machine["versions"].get(name) for name in ("jax", "torch", "transformers")}
    packages = ", ".join(f"{name} {version}" for name, version in shown.items() if version)
    cores = f"{machine['cores_used']} of {machine['cores']} cores of {machine['cpu']}"
    device = machine["gpu"] or cores
    commit = ""
    if git := machine["git"]:  # None outside a checkout
        commit = f"; commit {git['commit'][:7]}" + " with uncommitted files" * git["dirty"]
    return f"Measured {machine['date']} on {device}; {packages}{commit}."


def format_ratio(ratio: dict) -> str:
    return "**{median:.2f}** ({low:.2f} to {high:.2f})".format(**ratio)


def machine() -> dict:
    """Describe this machine: date, CPU and number of cores, GPU, versions of packages, git commit."""
    query = "nvidia-smi --query-gpu=name --format=csv,noheader"
    gpu = subprocess.run(query, shell=True, capture_output=True, text=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "gpu": gpu.stdout.strip() or None,
        "versions": versions((*PACKAGES, "torch", "transformers")),
        "git": git_state(),
    }
