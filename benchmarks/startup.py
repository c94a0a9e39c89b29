"""From the command to the first step: python -m benchmarks.startup

python -m lm.train, all of it, and torch's GPT-2 of the same shape (which makes one step and no more), each until the
first step is told of: CPU seconds and wall seconds, with a warm compilation cache and with an empty one. Beside them
what imports alone take: transformers' is a part of the other side's that nanoGPT does without.
"""

import os
import re
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
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to stand in for transformers' GPT-2")
    a = given(parser)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        write_tokens(data, named(a.shape))
        theirs = [sys.executable, "-m", "benchmarks.peers", a.shape, str(data)]
        theirs += ["--nanogpt", a.nanogpt] if a.nanogpt else []
        for cache in ("warm", "empty"):
            runs = (Path(directory) / f"{cache}{i}" for i in range(100))

            def ours(cache=cache, runs=runs):
                run = next(runs)
                where = run if cache == "empty" else directory
                return first_step(our_command(a.shape, data, run, Path(where) / "cache"))

            ours()  # fills the cache, and the system's own
            turns = in_turns(a.rounds, ours, lambda: first_step(theirs))
            rows.append(row(cache, *turns))
        imports = {what: statistics.median(imported(what) for _ in range(a.rounds)) for what in IMPORTS}
    beside = "nanoGPT" if a.nanogpt else "torch"
    header = ["compilation cache", "CPU s", beside, f"{beside} / ours", "wall s", beside, f"{beside} / ours"]
    header += ["peak memory", beside]
    cells = [
        [
            r["cache"], *(f"{s:.1f}" for s in r["cpu"]), shown(r["ratio_cpu"]), *(f"{s:.1f}" for s in r["wall"]),
            shown(r["ratio_wall"]), *(f"{b / 2**20:.0f} MiB" for b in r["peak_bytes"]),
        ]
        for r in rows
    ]  # fmt: skip
    note = ", ".join(f"`import {what}` {seconds:.1f}" for what, seconds in imports.items())
    publish(
        a,
        {"shape": a.shape, "beside": beside, "caches": rows, "imports_cpu": imports},
        markdown(header, cells) + f"\n\nCPU seconds of imports alone: {note}.",
    )
    return 0


IMPORTS = ("torch", "torch, transformers.models.gpt2.modeling_gpt2", "jax")


def imported(what: str) -> float:
    """CPU seconds of a process that imports this and ends at once, without taking down what it imported."""
    before = os.times()
    subprocess.run([sys.executable, "-c", f"import os, {what}; os._exit(0)"], cwd=ROOT, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


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
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
            status = Path(f"/proc/{process.pid}/status").read_text()
            process.kill()
            process.wait()
            cpu = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")  # its own and its children's
            return {"wall": wall, "cpu": cpu, "peak_bytes": int(re.search(r"VmHWM:\s*(\d+)", status)[1]) * 1024}
    raise RuntimeError("".join(lines[-20:]))


def row(cache: str, ours: list[dict], theirs: list[dict]) -> dict:
    found = {"cache": cache, "turns": [ours, theirs]}
    for key in ("cpu", "wall", "peak_bytes"):
        found[key] = [statistics.median(turn[key] for turn in side) for side in (ours, theirs)]
    for clock in ("cpu", "wall"):
        found[f"ratio_{clock}"] = ratio([t[clock] for t in ours], [t[clock] for t in theirs])
    return found


if __name__ == "__main__":
    sys.exit(main())
