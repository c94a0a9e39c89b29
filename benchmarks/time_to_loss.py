"""CPU seconds to nanoGPT's loss on Tiny Shakespeare: python -m benchmarks.time_to_loss --text PATH

Whole processes, from the command to the final score: python -m lm.train --config benchmarks/speedrun.py, with caches of
compiled programs and tokens, beside nanoGPT's README run for CPUs (2000 steps of batch 12, context 64, our size) on
transformers' GPT-2, without its evaluations. Both are scored over the last tenth of the text: every character once, in
consecutive windows.
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


def main() -> int:
    parser = options("time_to_loss", __doc__)
    parser.add_argument("--text", required=True, type=Path, help="tiny_shakespeare's input.txt")
    a = given(parser)
    with tempfile.TemporaryDirectory() as directory:
        seeds = iter(range(100))

        def ours():
            return our_run(a.text, Path(directory), next(seeds))

        ours()  # fills the cache
        turns = in_turns(a.rounds, ours, lambda: their_run(a.text))
    rows = [{"ours": turns[0], "theirs": turns[1]}]
    for clock in ("cpu", "wall"):
        rows[0][f"ratio_{clock}"] = ratio(*([t[clock] for t in side] for side in turns))
    publish("time_to_loss", rows, table(rows[0]), a.readme)
    return 0


def table(r: dict) -> str:
    def median(side: str, key: str) -> float:
        return statistics.median(turn[key] for turn in r[side])

    losses = sorted(turn["loss"] for turn in r["ours"])
    header = ["", "loss (range)", "at context 64", "CPU s", "wall s", "characters seen", "parameters"]
    ours = ["ours", f"{median('ours', 'loss'):.3f} ({losses[0]:.3f} to {losses[-1]:.3f})"]
    ours += [f"{median('ours', 'loss_64'):.3f}", f"{median('ours', 'cpu'):.1f}", f"{median('ours', 'wall'):.1f}"]
    ours += [f"{r['ours'][0]['tokens']:,}", f"{r['ours'][0]['n_params']:,}"]
    theirs = ["nanoGPT's run, on transformers", f"{median('theirs', 'loss'):.3f}", f"{median('theirs', 'loss'):.3f}"]
    theirs += [f"{median('theirs', 'cpu'):.1f}", f"{median('theirs', 'wall'):.1f}", f"{2000 * 12 * 64:,}", "809,856"]
    last = ["times sooner", "", "", shown(r["ratio_cpu"]), shown(r["ratio_wall"]), "", ""]
    return markdown(header, [ours, theirs, last])


def timed(command: list[str]) -> dict:
    """Seconds and output of a whole process."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(output[-3000:])
    return {"wall": time.perf_counter() - began, "cpu": usage.ru_utime + usage.ru_stime, "output": output}


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
    if at_64["losses"]["validation+test"] > 1.88:
        raise RuntimeError(f"seed {seed} ends at {at_64['losses']['validation+test']:.4f}, which is not nanoGPT's 1.88")
    return {
        "seed": seed, "cpu": found["cpu"], "wall": found["wall"], "loss": summary["losses"]["validation+test"],
        "loss_64": at_64["losses"]["validation+test"], "tokens": summary["tokens"], "n_params": summary["n_params"],
    }  # fmt: skip


def their_run(text: Path) -> dict:
    found = timed([sys.executable, "-m", "benchmarks.peers", "shakespeare", str(text)])
    return {"cpu": found["cpu"], "wall": found["wall"], "loss": float(re.search(r"loss ([\d.]+)", found["output"])[1])}


if __name__ == "__main__":
    sys.exit(main())
