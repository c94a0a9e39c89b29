"""Training steps a second beside transformers in torch, or nanoGPT: python -m benchmarks.train_speed S G H --pin

Both sides start from the same values and are checked to make the same losses; then they take turns. A ratio above 1
says that we are faster. --pin gives each one core, where CPU seconds are what a shared machine cannot disturb.
"""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import ROOT, Worker, given, in_turns, markdown, options, publish, ratio, shown
from benchmarks.shapes import BEST, SHAPES, config_of, named, write_tokens

CHECKED = 3  # steps whose losses must agree
DTYPES = ("float32", "bfloat16")


def main() -> int:
    parser = options("train_speed", __doc__)
    parser.add_argument(
        "shapes", nargs="+", metavar="SHAPE", help=f"{', '.join(SHAPES)}, or with another batch size, G@64"
    )
    parser.add_argument("--settings", nargs="+", default=["default", "best"], choices=["default", "best"])
    parser.add_argument(
        "--peer", default="eager", choices=["eager", "compiled"], help="torch as it is, or torch.compile"
    )
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of our products")
    parser.add_argument("--peer-dtype", choices=DTYPES, help="of torch's products [the same]")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to stand in for transformers' GPT-2")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn, about")
    a = given(parser)
    a.peer_dtype = a.peer_dtype or a.dtype
    try:
        check(a)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as directory:
        peak = measured_peak()
        rows = [row(name, setting, a, Path(directory), peak) for name in a.shapes for setting in a.settings]
    publish(a, rows, table(rows, peak))
    return 0


def check(a) -> None:
    """Raises ValueError for a shape that there is not, or not in nanoGPT, before anything is measured."""
    for name in a.shapes:
        shape = named(name)
        if a.nanogpt and (shape.family != "gpt2" or shape.d_ff != 4 * shape.d_model):
            raise ValueError(f"nanoGPT has no {name}: only GPT-2's with a hidden width of 4 d")


def beside(a) -> str:
    """What a table calls the other side."""
    name = "nanoGPT" if a.nanogpt else "torch"
    name += ".compile" if a.peer == "compiled" else ""
    return name + (f" {a.peer_dtype}" if a.peer_dtype != a.dtype else "")


def table(rows: list[dict], peak: dict) -> str:
    clock, other = rows[0]["clock"], rows[0]["beside"]
    header = ["shape", "setting", f"ms a step ({clock})", other, f"{other} / ours", "by wall time"]
    header += ["peak memory", other, "arrays of a step", "of measured peak", "of vendor's"]
    cells = [
        [
            r["shape"], r["setting"], f"{r['ours_ms'][clock]:.1f}", f"{r['theirs_ms'][clock]:.1f}",
            shown(r["ratio"][clock]), f"{r['ratio']['wall']['median']:.2f}",
            *(f"{r[key] / 2**20:.0f} MiB" for key in ("ours_bytes", "theirs_bytes", "program_bytes")),
            f"{r['of_peak']:.0%}", f"{r['mfu']:.1%}" if r["mfu"] else "-",
        ]
        for r in rows
    ]  # fmt: skip
    flops = ", ".join(
        f"{name} {count / 1e9:,.1f}" for name, count in {r["shape"]: r["flops_per_step"] for r in rows}.items()
    )
    can = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in peak["flops"].items())
    copy = f"{peak['copy_bytes'] / 1e9:,.0f} GB/s read and written"
    return markdown(header, cells) + f"\n\nGFLOPs a step: {flops}. Measured peak of the machine: {can}, {copy}."


def row(name: str, setting: str, a, directory: Path, peak: dict) -> dict:
    """One comparison."""
    data = directory / name
    if not data.exists():
        write_tokens(data, named(name))
    overrides = (BEST[name.partition("@")[0]] if setting == "best" else {}) | {"model.compute_dtype": a.dtype}
    if a.nanogpt:
        overrides |= {"model.activation": "gelu"}
    config = config_of(name, str(data), overrides)
    job = {"shape": name, "data": str(data), "dtype": a.peer_dtype, "compiled": a.peer == "compiled"}
    job |= {"overrides": overrides, "params": str(directory / "params.npz"), "nanogpt": a.nanogpt}
    seconds, measured = both_sides(job, directory / f"{name}-{setting}", config.train.steps_per_dispatch, a)
    clock = "cpu" if a.pin else "wall"
    found = {clock: ratio(*sides) for clock, sides in seconds.items()}
    medians = [{clock: 1e3 * float(np.median(sides[k])) for clock, sides in seconds.items()} for k in (0, 1)]
    counts = {square: flops_per_step(config, square) for square in (False, True)}
    flops, ours_s = counts[False], medians[0][clock] / 1e3
    print(f"{name} {setting}: {shown(found[clock])}", file=sys.stderr, flush=True)
    return measured | {
        "shape": name, "what": named(name).what, "setting": setting, "overrides": overrides,
        "beside": beside(a), "nanogpt": a.nanogpt, "peer": a.peer, "dtype": a.dtype, "peer_dtype": a.peer_dtype,
        "clock": clock, "ratio": found, "seconds": seconds, "ours_ms": medians[0], "theirs_ms": medians[1],
        "flops_per_step": flops, "tokens_per_second": config.train.batch_size * config.train.seq_len / ours_s,
        "mfu": vendors_share(flops / ours_s, peak["device"], a.dtype),
        "mfu_full_square": vendors_share(counts[True] / ours_s, peak["device"], a.dtype),
        "of_peak": flops / ours_s / peak["flops"][a.dtype], "peak": peak,
    }  # fmt: skip


def both_sides(job: dict, directory: Path, per_dispatch: int, a) -> tuple[dict, dict]:
    """(seconds a step by clock: of ours and of theirs in each turn; what else is known). The same losses first."""
    workers = []
    try:
        for side in ("ours", "theirs"):
            workdir = directory / side
            workdir.mkdir(parents=True)
            # A cache of its own: what compiling takes counts in every row.
            own = {"overrides": job["overrides"] | {"data.cache_dir": str(workdir / "cache")}}
            workers.append(Worker(job | own | {"side": side, "workdir": str(workdir)}))
            if side == "ours":
                workers[0].ask(save=job["params"])
        losses = [worker.ask(losses=CHECKED)["losses"] for worker in workers]
        same = {a.dtype, a.peer_dtype} == {"float32"}
        np.testing.assert_allclose(*losses, rtol=0, atol=2e-5 if same else 3e-2)
        steps = [n_steps(w, a.seconds, k) for w, k in zip(workers, (per_dispatch, 1), strict=True)]
        turns = in_turns(a.rounds, *(functools.partial(w.ask, run=n) for w, n in zip(workers, steps, strict=True)))
        ours, theirs = (worker.ask(facts=True) for worker in workers)
    finally:
        for worker in workers:
            worker.end()
    seconds = {
        clock: [[turn[clock] / n for turn in side] for side, n in zip(turns, steps, strict=True)]
        for clock in ("cpu", "wall")
    }
    sizes = {"ours_bytes": ours["peak_bytes"], "theirs_bytes": theirs["peak_bytes"]}
    sizes |= {"program_bytes": ours["program_bytes"], "attention": ours["attention"]}
    return seconds, sizes | {"steps_a_turn": steps, "losses": losses}


def flops_per_step(config, full_square: bool) -> float:
    from lm import parameters
    from lm.cost import flops

    model, t = parameters.resolve(config, config.model.vocab_size).model, config.train
    return flops.flops_per_token(model, t.seq_len, full_square=full_square) * t.batch_size * t.seq_len


def vendors_share(flops_per_second: float, device: str, dtype: str) -> float | None:
    """Of the peak that the device's vendor gives, where that is known."""
    from lm.cost.devices import peak_flops

    peak = peak_flops(device, dtype)
    return flops_per_second / peak if peak else None


def n_steps(worker: Worker, seconds: float, at_least: int) -> int:
    """How many steps fill a turn; from 10 on a multiple of it, so that each turn logs as often."""
    tried = max(at_least, 3)
    worker.ask(run=tried)  # not timed: compilation, memory, caches
    n = seconds * tried / worker.ask(run=tried)["wall"]
    return max(at_least, round(n / 10) * 10 if n >= 10 else round(n))


def measured_peak() -> dict:
    """FLOPs a second of large matrix products by dtype, and bytes a second of a copy, on this machine."""
    command = [sys.executable, "-m", "benchmarks.peak"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
