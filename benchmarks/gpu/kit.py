"""What all items share: where results go, and how much time is left."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Kit:
    """The folder of results and the end of an item.

    Attributes:
        out: the folder. Each line of its results.jsonl is a measurement, written at once: what is
            there when the machine is gone is what was measured.
        ends: when the item has to end, by `time.monotonic`; by default in an hour.
        tiny: measure the smallest models, to test the kit itself on a CPU.
    """

    out: Path
    ends: float = dataclasses.field(default_factory=lambda: time.monotonic() + 3600)
    tiny: bool = False

    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self.ends - time.monotonic())

    def record(self, item: str, name: str, **measured) -> None:
        """Write a measurement, and show it."""
        line = json.dumps({"item": item, "name": name, **measured})
        with open(self.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line[:600], flush=True)

    def folder(self, name: str) -> Path:
        """Return an empty folder for working files."""
        path = self.out / "work" / f"{name}-{time.monotonic_ns()}"
        path.mkdir(parents=True)
        return path


def started(program: list[str], log: Path, **env: str) -> subprocess.Popen:
    """Start a Python program that shares the device with others; its output goes to a file."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with open(log, "w", encoding="utf-8") as file:
        return subprocess.Popen(
            [sys.executable, *program], cwd=ROOT, env=environment | env, stdout=file, stderr=file
        )


def ended(process: subprocess.Popen, seconds: float) -> int | None:
    """Wait for a process and return its exit status; None if it was killed after `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def write_text(path: Path) -> Path:
    """Write a small English text to train on, and return its path."""
    draw = random.Random(0)
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "ran", "far", "home")
    path.write_text("".join(draw.choice(words) + draw.choice("  \n") for _ in range(20_000)))
    return path


def gpu_state() -> dict[str, float]:
    """Return the clock in MHz, the power in watts and the bytes in use of the GPU; {} without."""
    query = "nvidia-smi --query-gpu=clocks.sm,power.draw,memory.used --format=csv,noheader,nounits"
    try:
        found = subprocess.run(query.split(), capture_output=True, text=True, timeout=5)
        clock, watts, mib = map(float, found.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return {}
    return {"clock_mhz": clock, "watts": watts, "used_bytes": mib * 2**20}
