"""Compare single layers, forward and backward, with PyTorch's.

    python -m benchmarks.layers --pin
    python -m benchmarks.layers --pin --only columns --name layernorm_columns    # LayerNorm beside a loop over columns

Ours are compiled by jit, PyTorch's run eagerly, in float32, in alternation. Both share one process, so the peak memory
of each side is unknown; the column "arrays" counts arguments, results and temporaries of our compiled program.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.compare import alternate, argument_parser, format_ratio, parse_arguments, publish, ratio
from lm.text_tables import markdown_table

GROUPS = ("norms", "columns", "attention", "head", "ffn")  # the keys of CASES in benchmarks/layer_cases.py


def main() -> int:
    parser = argument_parser("layers", __doc__)
    parser.add_argument("--only", choices=GROUPS, help="time these layers alone [all but columns]")
    a = parse_arguments(parser, packages=("torch",))
    os.environ["JAX_PLATFORMS"] = "cpu"  # PyTorch's layers run on the CPU too; must be set before jax is imported
    import torch

    from benchmarks.layer_cases import CASES
    from lm.malloc import retain_freed_memory

    retain_freed_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    names = [a.only] if a.only else [name for name in GROUPS if name != "columns"]
    rows = [compare(*case, a.rounds) for name in names for case in CASES[name]()]
    publish(a, rows, table(rows, "cpu" if a.pin else "wall"))
    return 0


def table(rows: list[dict], clock: str) -> str:
    header = ["layer", f"ms ({clock})", "beside", "beside / ours", "by wall time", "arrays"]
    cells = [
        [
            r["layer"], *(f"{r[side][clock]:.2f}" for side in ("ours_ms", "theirs_ms")),
            format_ratio(r["ratio"][clock]), f"{r['ratio']['wall']['median']:.2f}",
            f"{r['program_bytes'] / 2**20:.0f} MiB",
        ]
        for r in rows
    ]  # fmt: skip
    return markdown_table(header, cells)


def compare(name: str, ours: tuple[Callable, int], theirs: Callable, n_rounds: int) -> dict:
    """Time one case of benchmarks/layer_cases.py in alternating rounds; the first three arguments are a `Case`."""
    run, program_bytes = ours
    rounds = alternate(n_rounds, timer(run), timer(theirs))
    seconds = {clock: [[once[clock] for once in side] for side in rounds] for clock in ("cpu", "wall")}
    medians = [{clock: 1e3 * statistics.median(sides[k]) for clock, sides in seconds.items()} for k in (0, 1)]
    found = {"layer": name, "ours_ms": medians[0], "theirs_ms": medians[1], "program_bytes": program_bytes}
    return found | {"ratio": {clock: ratio(*sides) for clock, sides in seconds.items()}}


def timer(f: Callable) -> Callable[[], dict]:
    """Return a function that returns the mean CPU and wall seconds of a call of f, over about 0.1 s of calls."""
    f()  # warm up
    began = time.perf_counter()
    f()
    n = max(1, round(0.1 / (time.perf_counter() - began)))

    def seconds() -> dict:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(n):
            f()
        return {"cpu": (time.process_time() - cpu) / n, "wall": (time.perf_counter() - wall) / n}

    return seconds


if __name__ == "__main__":
    sys.exit(main())
