"""CPU seconds to nanoGPT's loss on Tiny Shakespeare: python -m benchmarks.time_to_loss --text PATH

Whole processes, from the command to the final score: python -m lm.train --config benchmarks/speedrun.py, with caches of
compiled programs and tokens, beside nanoGPT's README run for CPUs (2000 steps of batch 12, context 64, our size) on
transformers' GPT-2 or on nanoGPT itself, without its evaluations. Both are scored over the last tenth of the text:
every character once, in consecutive windows.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare import ROOT, given, in_turns, markdown, options, publish, ratio, shown

TARGET = 1.88  # what nanoGPT's README gives for its run


def main() -> int:
    parser = options("time_to_loss", __doc__)
    parser.add_argument("--text", required=True, type=Path, help="tiny_shakespeare's input.txt")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to stand in for transformers' GPT-2")
    a = given(parser)
    with tempfile.TemporaryDirectory() as directory:
        seeds = iter(range(100)), iter(range(100))

        def ours():
            return our_run(a.text, Path(directory), next(seeds[0]))

        ours()  # fills the cache
        turns = in_turns(a.rounds, ours, lambda: their_run(a.text, next(seeds[1]), a.nanogpt))
    rows = [{"target": TARGET, "beside": a.nanogpt and "nanoGPT", "ours": turns[0], "theirs": turns[1]}]
    for clock in ("cpu", "wall"):
        rows[0][f"ratio_{clock}"] = ratio(*([t[clock] for t in side] for side in turns))
    publish(a, rows, table(rows[0]))
    return 0


def table(r: dict) -> str:
    def median(side: str, key: str) -> float:
        return statistics.median(turn[key] for turn in r[side])

    def losses(side: str, key: str) -> str:
        found = [turn[key] for turn in r[side]]
        return f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"

    def costs(side: str) -> list[str]:
        return [
            *(f"{median(side, key):.1f}" for key in ("cpu", "wall")),
            f"{median(side, 'peak_bytes') / 2**20:.0f} MiB",
        ]

    header = ["", "loss (range)", "at context 64", "CPU s", "wall s", "peak memory", "characters seen", "parameters"]
    ours = ["ours", losses("ours", "loss"), losses("ours", "loss_64"), *costs("ours")]
    ours += [f"{r['ours'][0]['tokens']:,}", f"{r['ours'][0]['n_params']:,}"]
    theirs = [f"nanoGPT's run, on {r['beside'] or 'transformers'}", losses("theirs", "loss"), "the same"]
    theirs += [*costs("theirs"), f"{2000 * 12 * 64:,}", "809,856"]
    last = ["times sooner", "", "", shown(r["ratio_cpu"]), shown(r["ratio_wall"]), "", "", ""]
    missed = sum(turn["loss_64"] > TARGET for turn in r["ours"])
    said = f"Of {len(r['ours'])} seeds of ours {missed} end above {TARGET} at context 64."
    return markdown(header, [ours, theirs, last]) + f"\n\n{said}"


def timed(command: list[str]) -> dict:
    """Seconds and output of a whole process."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(output[-3000:])
    wall = time.perf_counter() - began
    return {
        "wall": wall, "cpu": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024, "output": output,
    }  # fmt: skip


def our_run(text: Path, directory: Path, seed: int) -> dict:
    run = directory / f"run{seed}-{time.monotonic_ns()}"
    common = [
        sys.executable,
        "-m",
        "lm.train",
        "--config",
        "benchmarks/speedrun.py",
        f"--config.data.source=text:{text}",
    ]
    common += [f"--config.data.cache_dir={directory / 'cache'}"]
    found = timed([*common, "--workdir", str(run), f"--config.train.seed={seed}"])
    summary = json.loads((run / "summary.json").read_text())
    again = directory / f"{run.name}-64"
    keys = {"init_from": run, "train.steps": 0, "train.seq_len": 64, "train.batch_size": 64}
    timed([*common, "--workdir", str(again), *(f"--config.{key}={value}" for key, value in keys.items())])
    at_64 = json.loads((again / "summary.json").read_text())
    del found["output"]
    return found | {
        "seed": seed, "loss": summary["losses"]["validation+test"],
        "loss_64": at_64["losses"]["validation+test"], "tokens": summary["tokens"], "n_params": summary["n_params"],
    }  # fmt: skip


def their_run(text: Path, seed: int, nanogpt: str | None) -> dict:
    command = [sys.executable, "-m", "benchmarks.peers", "shakespeare", str(text), "--seed", str(seed)]
    found = timed(command + (["--nanogpt", nanogpt] if nanogpt else []))
    return found | {"seed": seed, "loss": float(re.search(r"loss ([\d.]+)", found.pop("output"))[1])}


if __name__ == "__main__":
    sys.exit(main())
