"""Compare training speed with transformers in PyTorch.

    python -m benchmarks.train_speed S M G L H G:bfloat16 --pin

Both sides start from the same parameters and must compute the same losses; then they are timed in
alternation. A ratio above 1 means that we are faster. --pin runs each side on one core and compares
CPU seconds, which other processes on a shared machine disturb less than wall time.
"""

import argparse
import functools
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import (
    Worker,
    alternate,
    argument_parser,
    format_ratio,
    parse_arguments,
    publish,
    ratio,
)
from benchmarks.shapes import (
    SHAPES,
    config_of,
    less_memory,
    named,
    transformers_fields,
    write_tokens,
)
from lm.system.errors import UserError, with_exit_code
from lm.system.text_tables import markdown_table

CHECKED_STEPS = 3  # whose losses must agree
DTYPES = ("float32", "bfloat16")
TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}  # between the losses of both sides


@with_exit_code
def main() -> int:
    parser = argument_parser("train_speed", __doc__)
    shapes_help = (
        f"{', '.join(SHAPES)}; G@64 is G with batch size 64, G:bfloat16 is G with --dtype bfloat16"
    )
    parser.add_argument("shapes", nargs="+", metavar="SHAPE", help=shapes_help)
    parser.add_argument(
        "--peer", default="eager", choices=["eager", "compiled"], help="torch, or torch.compile"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=DTYPES, help="our compute dtype [%(default)s]"
    )
    parser.add_argument(
        "--peer-dtype", choices=DTYPES, help="torch's compute dtype [the same as ours]"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="duration of a round, roughly [%(default)s]"
    )
    a = parse_arguments(parser)
    cases = [case(text, a) for text in a.shapes]
    if len({(name, one.dtype) for name, one in cases}) < len(cases):
        raise UserError("a shape is given twice with the same dtype")
    with tempfile.TemporaryDirectory() as directory:
        rows = [row(name, one, Path(directory)) for name, one in cases]
    publish(a, rows, table(rows))
    return 0


def case(text: str, a) -> tuple[str, argparse.Namespace]:
    """Split SHAPE:DTYPE into a shape and the arguments with both sides' dtypes there."""
    name, _, dtype = text.partition(":")
    named(name)
    dtype = dtype or a.dtype
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype in {text[:80]!r}; use one of {', '.join(DTYPES)}")
    return name, argparse.Namespace(
        **vars(a) | {"dtype": dtype, "peer_dtype": a.peer_dtype or dtype}
    )


def peer_name(a) -> str:
    """Return the name of the other side in tables."""
    name = "torch.compile" if a.peer == "compiled" else "torch"
    return name + (f" {a.peer_dtype}" if a.peer_dtype != a.dtype else "")


def table(rows: list[dict]) -> str:
    """Return the Markdown table of all rows, with a line on FLOPs below."""
    clock = rows[0]["clock"]
    other = rows[0]["beside"]
    header = ["shape", f"ms a step ({clock})", other, f"{other} / ours", "by wall time"]
    header += ["peak memory", other, "arrays of a step"]
    several_dtypes = len({r["dtype"] for r in rows}) > 1
    cells = [
        [
            r["shape"] + f", {r['dtype']}" * several_dtypes,
            f"{r['ours_ms'][clock]:.1f}",
            f"{r['theirs_ms'][clock]:.1f}",
            format_ratio(r["ratio"][clock]),
            f"{r['ratio']['wall']['median']:.2f}",
            *(
                f"{r[key] / 2**20:.0f} MiB"
                for key in ("ours_bytes", "theirs_bytes", "program_bytes")
            ),
        ]
        for r in rows
    ]
    counts = {r["shape"]: r["flops_per_step"] for r in rows}
    flops = ", ".join(f"{name} {count / 1e9:,.1f}" for name, count in counts.items())
    return markdown_table(header, cells) + f"\n\nGFLOPs a step: {flops}."


def row(name: str, a, directory: Path) -> dict:
    """Compare both sides at one shape; `a` is of `case`, and shapes share a directory."""
    from lm.cost.devices import peak_flops
    from lm.cost.flops import mfu

    data = directory / name
    if not data.exists():
        write_tokens(data, named(name))
    overrides = {"model.compute_dtype": a.dtype}
    config = config_of(name, str(data), overrides)
    job = {
        "shape": name,
        "data": str(data),
        "dtype": a.peer_dtype,
        "compiled": a.peer == "compiled",
    }
    job["fields"] = transformers_fields(config)
    job |= {"overrides": overrides, "params": str(directory / "params.npz")}
    seconds, measured = both_sides(
        job, directory / f"{name}-{a.dtype}", config.train.steps_per_dispatch, a
    )
    clock = "cpu" if a.pin else "wall"
    ratios = {clock: ratio(*sides) for clock, sides in seconds.items()}
    medians = [
        {clock: 1e3 * float(np.median(sides[k])) for clock, sides in seconds.items()}
        for k in (0, 1)
    ]
    flops = flops_per_step(config, full_square=False)
    ours_s = medians[0][clock] / 1e3
    peak = peak_flops(measured["device"], a.dtype)
    print(f"{name} {a.dtype}: {format_ratio(ratios[clock])}", file=sys.stderr, flush=True)
    return measured | {
        "shape": name,
        "what": named(name).what,
        "overrides": less_memory(name) | overrides,
        "beside": peer_name(a),
        "peer": a.peer,
        "dtype": a.dtype,
        "peer_dtype": a.peer_dtype,
        "clock": clock,
        "ratio": ratios,
        "seconds": seconds,
        "ours_ms": medians[0],
        "theirs_ms": medians[1],
        "flops_per_step": flops,
        "tokens_per_second": config.train.batch_size * config.train.seq_len / ours_s,
        "mfu": mfu(1 / ours_s, flops, 1, peak),
        "mfu_full_square": mfu(1 / ours_s, flops_per_step(config, full_square=True), 1, peak),
    }


def both_sides(job: dict, directory: Path, per_dispatch: int, a) -> tuple[dict, dict]:
    """Check that both sides compute the same losses for a job, then time them in turns.

    A round of ours has at least per_dispatch steps. Returns (seconds per step by clock, [ours,
    theirs], each one number per round; memory, losses and steps per round). Raises AssertionError
    if losses differ.
    """
    workers = []
    try:
        for side in ("ours", "theirs"):
            workdir = directory / side
            workdir.mkdir(parents=True)
            # An empty cache for each, so that peak memory includes compilation in every row.
            own = {"overrides": job["overrides"] | {"data.cache_dir": str(workdir / "cache")}}
            workers.append(Worker(job | own | {"side": side, "workdir": str(workdir)}))
            if side == "ours":
                workers[0].ask(save=job["params"])
        losses = [worker.ask(losses=CHECKED_STEPS)["losses"] for worker in workers]
        tolerance = max(TOLERANCES[a.dtype], TOLERANCES[a.peer_dtype])
        np.testing.assert_allclose(
            *losses, rtol=0, atol=tolerance, err_msg="our losses and the peer's differ"
        )
        steps = [
            steps_per_round(w, a.seconds, k)
            for w, k in zip(workers, (per_dispatch, 1), strict=True)
        ]
        rounds = alternate(
            a.rounds,
            *(functools.partial(w.ask, run=n) for w, n in zip(workers, steps, strict=True)),
        )
        ours, theirs = (worker.ask(facts=True) for worker in workers)
    finally:
        for worker in workers:
            worker.close()
    seconds = {
        clock: [[turn[clock] / n for turn in side] for side, n in zip(rounds, steps, strict=True)]
        for clock in ("cpu", "wall")
    }
    sizes = {"ours_bytes": ours["peak_bytes"], "theirs_bytes": theirs["peak_bytes"]}
    sizes |= {name: ours[name] for name in ("program_bytes", "attention", "device")}
    return seconds, sizes | {"steps_a_turn": steps, "losses": losses}


def flops_per_step(config, *, full_square: bool) -> float:
    """Return the FLOPs of a step; full_square counts masked scores too, as some papers do."""
    from lm.cost import flops

    t = config.train
    return (
        flops.flops_per_token(config.model, t.seq_len, full_square=full_square)
        * t.batch_size
        * t.seq_len
    )


def steps_per_round(worker: Worker, seconds: float, at_least: int) -> int:
    """Return how many steps take about `seconds`; from 10 on a multiple of 10 (the log's)."""
    tried = max(at_least, 3)
    worker.ask(run=tried)  # warm up: compilation, memory, caches
    n = seconds * tried / worker.ask(run=tried)["wall"]
    return max(at_least, round(n / 10) * 10 if n >= 10 else round(n))


if __name__ == "__main__":
    sys.exit(main())
