"""Two sides that take turns, what their times come to, and where that is written."""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lm.training.workdir import format_command, git_state, processor, versions

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def options(name: str, what: str) -> argparse.ArgumentParser:
    """The command line of benchmarks.NAME, with what all comparisons have; `given` reads it."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=what.split("\n")[0])
    parser.add_argument("--pin", action="store_true", help="one core for each side, and CPU seconds where both are had")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    parser.add_argument("--name", default=name, help=f"of results/NAME.json and of README's place [{name}]")
    return parser


def given(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, carried out: this process on one core, and a README that has a place for the table."""
    a = parser.parse_args()
    if a.readme and place(a.name).search((ROOT / "README.md").read_text()) is None:
        parser.error(f"README.md has no place for the table: <!-- {a.name} --> and <!-- end -->")
    if a.pin:
        pin()
    return a


def pin() -> None:
    """This process, and those it starts, to one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def place(name: str) -> re.Pattern:
    """What is between README's marks of a table, and the marks."""
    return re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)


class Worker:
    """A process of benchmarks/worker.py."""

    def __init__(self, job: dict):
        words = [sys.executable, "-m", "benchmarks.worker", json.dumps(job)]
        # Both sides are there at once: JAX must not take most of a GPU's memory before it needs it.
        env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.log = open(Path(job["workdir"]) / f"{job['side']}.log", "w+")  # noqa: SIM115 - closed in end()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(words, env=env, text=True, **pipes)

    def ask(self, **question) -> dict:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            self.log.seek(0)
            raise RuntimeError(f"a side of the comparison ended: {self.log.read()[-3000:]}")
        return json.loads(line)

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # a side that failed has gone
            self.process.stdin.close()
        self.process.wait()
        self.log.close()


def ratio(ours: list[float], theirs: list[float]) -> dict:
    """The other side's seconds over ours, round by round: above 1 we are faster."""
    found = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(found), "low": min(found), "high": max(found), "rounds": len(found)}


def shown(found: dict) -> str:
    return "**{median:.2f}** ({low:.2f} to {high:.2f})".format(**found)


def in_turns(rounds: int, ours, theirs) -> tuple[list, list]:
    """What both give in each round, in the order A B, B A, A B, ... against drift."""
    found = [], []
    for i in range(rounds):
        for k in (0, 1) if i % 2 == 0 else (1, 0):
            found[k].append((ours, theirs)[k]())
    return found


def machine() -> dict:
    """Where this ran, and with what."""
    gpu = subprocess.run(
        "nvidia-smi --query-gpu=name --format=csv,noheader", shell=True, capture_output=True, text=True
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "gpu": gpu.stdout.strip() or None,
        "versions": versions() | peers(),
        "git": git_state(),
    }


def peers() -> dict:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def started_as() -> str:
    """What this process was started with."""
    return format_command(f"benchmarks.{Path(sys.argv[0]).stem}", sys.argv[1:])


def publish(a: argparse.Namespace, rows: list | dict, table: str) -> None:
    """Write results/NAME.json, print the table, and put it between README's marks of that name if asked to."""
    RESULTS.mkdir(exist_ok=True)
    found = {"command": started_as(), "machine": machine(), "rows": rows}
    (RESULTS / f"{a.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table)
    if a.readme:
        path = ROOT / "README.md"
        path.write_text(place(a.name).sub(lambda m: m[1] + table + "\n" + m[2], path.read_text()))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])
