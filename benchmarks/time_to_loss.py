"""Compare the time to nanoGPT's CPU loss on Tiny Shakespeare.

    python -m benchmarks.time_to_loss --text PATH --pin

Times whole processes, from the command to the final evaluation: `python -m lm.train` with a config of
benchmarks/speedrun and warm caches of compiled programs and tokens, and the CPU run of nanoGPT's README (2000 steps,
batch 12, context 64) without its evaluations, on transformers' GPT-2 or on nanoGPT itself. Both are evaluated on every
character of the last tenth of the text once, in consecutive windows.
"""

import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare import (
    add_nanogpt,
    alternate,
    argument_parser,
    format_ratio,
    parse_arguments,
    publish,
    ratio,
    timed,
)
from lm.text_tables import markdown_table

CONFIG = "benchmarks/speedrun/records/tuned_on_docs/config.py"
NANOGPT_LOSS = 1.88  # of the CPU run in nanoGPT's README


def main() -> int:
    parser = argument_parser("time_to_loss", __doc__)
    parser.add_argument("--text", required=True, type=Path, help="Tiny Shakespeare's input.txt")
    add_nanogpt(parser)
    a = parse_arguments(parser)
    if not a.text.is_file():
        parser.error(f"--text {a.text}: no such file")
    with tempfile.TemporaryDirectory() as directory:
        seeds = iter(range(100)), iter(range(100))

        def ours():
            return our_run(a.text, Path(directory), next(seeds[0]))

        ours()  # fills the caches
        rounds = alternate(a.rounds, ours, lambda: their_run(a.text, next(seeds[1]), a.nanogpt))
    rows = [{"nanogpt_loss": NANOGPT_LOSS, "beside": a.nanogpt and "nanoGPT", "ours": rounds[0], "theirs": rounds[1]}]
    for clock in ("cpu", "wall"):
        rows[0][f"ratio_{clock}"] = ratio(*([t[clock] for t in side] for side in rounds))
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
    last = ["times sooner", "", "", format_ratio(r["ratio_cpu"]), format_ratio(r["ratio_wall"]), "", "", ""]
    above = sum(turn["loss_64"] > NANOGPT_LOSS for turn in r["ours"])
    seeds = f"Of {len(r['ours'])} seeds of ours {above} end above {NANOGPT_LOSS} at context 64."
    return markdown_table(header, [ours, theirs, last]) + f"\n\n{seeds}"


def our_run(text: Path, directory: Path, seed: int) -> dict:
    """Train with CONFIG, timed; then evaluate the result with nanoGPT's context of 64, not timed."""
    run = directory / f"run{seed}-{time.monotonic_ns()}"
    values = {"data.source": f"text:{text}", "data.cache_dir": directory / "cache"}
    values["eval.final_splits"] = "validation+test"
    common = [sys.executable, "-m", "lm.train", "--config", CONFIG]
    common += [f"--config.{key}={value}" for key, value in values.items()]
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
    """Run nanoGPT's CPU training in a process of its own, timed; see `benchmarks.peers.shakespeare`."""
    command = [sys.executable, "-m", "benchmarks.peers", "shakespeare", str(text), "--seed", str(seed)]
    found = timed(command + (["--nanogpt", nanogpt] if nanogpt else []))
    return found | {"seed": seed, "loss": float(re.search(r"loss ([\d.]+)", found.pop("output"))[1])}


if __name__ == "__main__":
    sys.exit(main())
