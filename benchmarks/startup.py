"""From the command to the first step: python -m benchmarks.startup

python -m lm.train, all of it, and torch's GPT-2 of the same shape (which makes one step and no more), each until the
first step is told of: CPU seconds and wall seconds, with a warm compilation cache and with an empty one.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare import ROOT, given, in_turns, markdown, options, publish, ratio, shown
from benchmarks.shapes import CONFIG, named, values_of, write_tokens


def main() -> int:
    parser = options("startup", __doc__)
    parser.add_argument("--shape", default="S")
    a = given(parser)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        write_tokens(data, named(a.shape))
        theirs = [sys.executable, "-m", "benchmarks.peers", a.shape, str(data)]
        for cache, rounds in (("warm", a.rounds), ("empty", 3)):
            runs = (Path(directory) / f"{cache}{i}" for i in range(100))

            def ours(cache=cache, runs=runs):
                run = next(runs)
                where = run if cache == "empty" else directory
                return first_step(our_command(a.shape, data, run, Path(where) / "cache"))

            ours()  # fills the cache, and the system's own
            turns = in_turns(rounds, ours, lambda: first_step(theirs))
            rows.append(row(cache, *turns))
    header = ["compilation cache", "CPU s", "torch", "torch / ours", "wall s", "torch"]
    cells = [
        [r["cache"], f"{r['cpu'][0]:.1f}", f"{r['cpu'][1]:.1f}", shown(r["ratio"]), *(f"{s:.1f}" for s in r["wall"])]
        for r in rows
    ]
    publish("startup", rows, markdown(header, cells), a.readme)
    return 0


def our_command(shape: str, data: Path, workdir: Path, cache: Path) -> list[str]:
    keys = values_of(shape, str(data)) | {"train.steps": 10, "log.every": 1, "data.cache_dir": cache}
    return [
        sys.executable, "-m", "lm.train", "--config", str(CONFIG), "--workdir", str(workdir),
        *(f"--config.{key}={value}" for key, value in keys.items()),
    ]  # fmt: skip


def first_step(command: list[str]) -> dict:
    """Seconds of a command until it tells of its first step; then it is killed."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step ") and line.split()[1].split("/")[0] == "1":
            wall = time.perf_counter() - began
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            process.kill()
            process.wait()
            return {"wall": wall, "cpu": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")}
    raise RuntimeError("".join(lines[-20:]))


def row(cache: str, ours: list[dict], theirs: list[dict]) -> dict:
    found = {"cache": cache}
    for clock in ("cpu", "wall"):
        found[clock] = [statistics.median(turn[clock] for turn in side) for side in (ours, theirs)]
    found["ratio"] = ratio([t["cpu"] for t in ours], [t["cpu"] for t in theirs])
    return found


if __name__ == "__main__":
    sys.exit(main())
