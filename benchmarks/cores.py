"""Measure what more than one core gains in training: for one device, for one device per core, and for PyTorch.

    python -m benchmarks.cores S M G L

Sides take turns and are compared by wall time. All sides of a shape start from the same parameters and must compute the
same losses.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import Worker, alternate, argument_parser, format_ratio, parse_arguments, publish, ratio
from benchmarks.shapes import SHAPES, named, write_tokens
from benchmarks.train_speed import CHECKED_STEPS, TOLERANCES, steps_per_round
from lm.text_tables import markdown_table


def main() -> int:
    parser = argument_parser("cores", __doc__, pin=False)
    parser.add_argument("shapes", nargs="+", metavar="SHAPE", help=f"{', '.join(SHAPES)}; G@64 is G with batch size 64")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of a round, roughly [%(default)s]")
    a = parse_arguments(parser)
    n_cores = len(os.sched_getaffinity(0))
    if n_cores < 2:
        parser.error("this process may use one core only")
    try:
        for name in a.shapes:
            named(name)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as directory:
        rows = [row(name, n_cores, a, Path(directory) / name) for name in a.shapes]
    publish(a, rows, table(rows))
    return 0


def sides_of(n_cores: int) -> dict[str, dict]:
    """Return by name the arguments of a worker (benchmarks/worker.py): the side, and how many cores and devices."""
    return {
        "ours, 1 core": {"side": "ours", "cores": 1},
        "ours": {"side": "ours", "cores": n_cores},
        "ours, a device per core": {"side": "ours", "cores": n_cores, "devices": n_cores},
        "torch, 1 core": {"side": "theirs", "cores": 1},
        "torch": {"side": "theirs", "cores": n_cores},
    }


def row(name: str, n_cores: int, a, directory: Path) -> dict:
    """Compare all sides at one shape.

    Args:
        name: see benchmarks/shapes.py.
        n_cores: the number of cores of the sides that are not limited to one.
        a: the command line.
        directory: for tokens, parameters and logs.

    Raises:
        AssertionError: if losses differ.
    """
    directory.mkdir()
    data, params = directory / "data", str(directory / "params.npz")
    write_tokens(data, named(name))
    job = {"shape": name, "data": str(data), "params": params, "dtype": "float32", "compiled": False, "nanogpt": None}
    workers = {}
    try:
        for side, about in sides_of(n_cores).items():
            workdir = directory / side
            workdir.mkdir()
            # A cache for each: a program that was compiled for one core may not use a second one.
            own = {"overrides": {"data.cache_dir": str(workdir / "cache")}, "workdir": str(workdir)}
            workers[side] = Worker(job | about | own)
            if len(workers) == 1:
                workers[side].ask(save=params)
        losses = {side: worker.ask(losses=CHECKED_STEPS)["losses"] for side, worker in workers.items()}
        for side, found in losses.items():
            np.testing.assert_allclose(found, losses["ours"], rtol=0, atol=TOLERANCES["float32"], err_msg=side)
        steps = {side: steps_per_round(worker, a.seconds, 1) for side, worker in workers.items()}
        asks = [lambda side=side: workers[side].ask(run=steps[side])["wall"] / steps[side] for side in workers]
        seconds = dict(zip(workers, alternate(a.rounds, *asks), strict=True))
    finally:
        for worker in workers.values():
            worker.close()
    print(f"{name}: {format_ratio(ratio(seconds['ours'], seconds['ours, 1 core']))}", file=sys.stderr, flush=True)
    return {"shape": name, "what": named(name).what, "cores": n_cores, "steps_a_turn": steps, "seconds": seconds}


def table(rows: list[dict]) -> str:
    """Return the Markdown table of all rows; ratios above 1 mean that the side after "/" is faster."""
    n = rows[0]["cores"]
    pairs = [
        ("ours, 1 core", "ours"),
        ("torch, 1 core", "torch"),
        ("ours", "ours, a device per core"),
        ("torch", "ours"),
        ("torch", "ours, a device per core"),
    ]
    sides = list(sides_of(n))
    header = ["shape", *(f"ms a step: {side}" for side in sides), *(f"{a} / {b}" for a, b in pairs)]
    cells = [
        [
            r["shape"],
            *(f"{1e3 * statistics.median(r['seconds'][side]):.1f}" for side in sides),
            *(format_ratio(ratio(r["seconds"][b], r["seconds"][a])) for a, b in pairs),
        ]
        for r in rows
    ]
    return markdown_table(header, cells) + f"\n\nWall time. Sides that are not limited to 1 core use {n}."


if __name__ == "__main__":
    sys.exit(main())
