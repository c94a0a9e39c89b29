"""Compare the time from the command to the first step with PyTorch's.

    python -m benchmarks.startup --pin

Measures CPU and wall seconds until the first step is logged: of `python -m lm.train`, with a warm
and with an empty compilation cache, and of PyTorch's GPT-2 of the same shape in a script that does
nothing else (benchmarks/peers.py). Also measures imports alone.
"""

import re
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import (
    alternate,
    argument_parser,
    format_ratio,
    parse_arguments,
    publish,
    ratio,
    timed,
)
from benchmarks.shapes import (
    CONFIG,
    SHAPES,
    config_of,
    named,
    transformers_fields,
    values_of,
    write_tokens,
)
from lm.system.errors import with_exit_code
from lm.system.text_tables import markdown_table

IMPORTS = ("torch", "torch, transformers.models.gpt2.modeling_gpt2", "jax")


@with_exit_code
def main() -> int:
    parser = argument_parser("startup", __doc__)
    parser.add_argument(
        "--shape", default="S", choices=list(SHAPES), help="see benchmarks/shapes.py [%(default)s]"
    )
    a = parse_arguments(parser)
    rows = []
    fields = transformers_fields(config_of(a.shape, "unread", {}))
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        write_tokens(data, named(a.shape))
        theirs = [sys.executable, "-m", "benchmarks.peers", a.shape, str(data), fields]
        for cache in ("warm", "empty"):
            runs = (Path(directory) / f"{cache}{i}" for i in range(100))

            def ours(cache=cache, runs=runs):
                run = next(runs)
                where = run if cache == "empty" else directory
                return first_step(our_command(a.shape, data, run, Path(where) / "cache"))

            ours()  # fills the compilation cache and the system's file cache
            rows.append(row(cache, *alternate(a.rounds, ours, lambda: first_step(theirs))))
        # no cleanup
        alone = {
            name: [sys.executable, "-c", f"import os, {name}; os._exit(0)"] for name in IMPORTS
        }
        imports = {
            n: statistics.median(timed(c)["cpu"] for _ in range(a.rounds)) for n, c in alone.items()
        }
    results = {"shape": a.shape, "caches": rows, "imports_cpu": imports}
    publish(a, results, table(results))
    return 0


def table(results: dict) -> str:
    header = [
        "compilation cache",
        "CPU s",
        "torch",
        "torch / ours",
        "wall s",
        "torch",
        "torch / ours",
    ]
    header += ["peak memory", "torch"]
    cells = [
        [
            r["cache"],
            *(f"{s:.1f}" for s in r["cpu"]),
            format_ratio(r["ratio_cpu"]),
            *(f"{s:.1f}" for s in r["wall"]),
            format_ratio(r["ratio_wall"]),
            *(f"{b / 2**20:.0f} MiB" for b in r["peak_bytes"]),
        ]
        for r in results["caches"]
    ]
    imports = ", ".join(
        f"`import {name}` {seconds:.1f}" for name, seconds in results["imports_cpu"].items()
    )
    return markdown_table(header, cells) + f"\n\nCPU seconds of imports alone: {imports}."


def our_command(shape: str, data: Path, workdir: Path, cache: Path) -> list[str]:
    """Return the command that trains a shape for 10 steps, with a compilation cache."""
    keys = values_of(shape, str(data)) | {
        "train.steps": 10,
        "log.every": 1,
        "data.cache_dir": cache,
    }
    return [
        sys.executable,
        "-m",
        "lm.train",
        "--config",
        str(CONFIG),
        "--workdir",
        str(workdir),
        *(f"--config.{key}={value}" for key, value in keys.items()),
    ]


def first_step(command: list[str]) -> dict:
    """Run a command until it prints its first step; returns its seconds and bytes, see `timed`."""
    measured = timed(command, until=re.compile(r"step +1\b").match)
    return {key: measured[key] for key in ("wall", "cpu", "peak_bytes")}


def row(cache: str, ours: list[dict], theirs: list[dict]) -> dict:
    """Return medians and ratios of the rounds, with a "warm" or "empty" cache."""
    row = {"cache": cache, "turns": [ours, theirs]}
    for key in ("cpu", "wall", "peak_bytes"):
        row[key] = [statistics.median(turn[key] for turn in side) for side in (ours, theirs)]
    for clock in ("cpu", "wall"):
        row[f"ratio_{clock}"] = ratio([t[clock] for t in ours], [t[clock] for t in theirs])
    return row


if __name__ == "__main__":
    sys.exit(main())
