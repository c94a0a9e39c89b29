"""Training steps a second beside transformers in torch: python -m benchmarks.train_speed S G H --pin

Both sides start from the same values and are checked to make the same losses; then they take turns. A ratio above 1
says that we are faster. --pin gives each one core, where CPU seconds are what a shared machine cannot disturb.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import ROOT, Worker, given, in_turns, markdown, options, publish, ratio, shown
from benchmarks.shapes import BEST, SHAPES, config_of, named, write_tokens

CHECKED = 3  # steps whose losses must agree


def main() -> int:
    parser = options("train_speed", __doc__)
    parser.add_argument(
        "shapes", nargs="+", metavar="SHAPE", help=f"{', '.join(SHAPES)}, or with another batch size, G@64"
    )
    parser.add_argument("--settings", nargs="+", default=["default", "best"], choices=["default", "best"])
    parser.add_argument(
        "--peer", default="eager", choices=["eager", "compiled"], help="torch as it is, or torch.compile"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of both sides' products")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn, about")
    a = given(parser)
    with tempfile.TemporaryDirectory() as directory:
        peak = measured_peak()
        rows = [row(name, setting, a, Path(directory), peak) for name in a.shapes for setting in a.settings]
    clock = "CPU" if a.pin else "wall"
    header = [
        "shape",
        "setting",
        f"ms a step ({clock})",
        "torch",
        "torch / ours",
        "peak memory",
        "torch",
        "of measured peak",
    ]
    cells = [
        [
            r["shape"], r["setting"], f"{r['ours_ms']:.1f}", f"{r['theirs_ms']:.1f}",
            shown(r["ratio"]),
            f"{r['ours_bytes'] / 2**20:.0f} MiB", f"{r['theirs_bytes'] / 2**20:.0f} MiB", f"{r['of_peak']:.0%}",
        ]
        for r in rows
    ]  # fmt: skip
    publish("train_speed", rows, markdown(header, cells), a.readme)
    return 0


def row(name: str, setting: str, a, directory: Path, peak: dict) -> dict:
    """One comparison: the same losses first, then times in turns."""
    data = directory / name
    if not data.exists():
        write_tokens(data, named(name))
    overrides = (BEST[name.partition("@")[0]] if setting == "best" else {}) | {"model.compute_dtype": a.dtype}
    job = {"shape": name, "data": str(data), "dtype": a.dtype, "compiled": a.peer == "compiled"}
    job |= {"overrides": overrides, "params": str(directory / "params.npz")}

    def started(side: str) -> Worker:
        workdir = directory / f"{name}-{setting}-{side}"
        workdir.mkdir()
        return Worker(job | {"side": side, "workdir": str(workdir)})

    ours = started("ours")
    ours.ask(save=job["params"])
    workers = ours, theirs = ours, started("theirs")
    losses = [worker.ask(losses=CHECKED)["losses"] for worker in workers]
    np.testing.assert_allclose(*losses, rtol=0, atol=2e-5 if a.dtype == "float32" else 3e-2)
    steps = [n_steps(worker, a.seconds) for worker in workers]
    clock = "cpu" if a.pin else "wall"
    turns = in_turns(a.rounds, lambda: ours.ask(run=steps[0]), lambda: theirs.ask(run=steps[1]))
    seconds = [[turn[clock] / n for turn in side] for side, n in zip(turns, steps, strict=True)]
    sizes = [worker.ask(facts=True)["peak_bytes"] for worker in workers]
    for worker in workers:
        worker.end()
    found = ratio(*seconds)
    config = config_of(name, str(data), overrides)
    ours_s, theirs_s = (float(np.median(s)) for s in seconds)
    counts = {square: flops_per_step(config, square) for square in (False, True)}
    flops = counts[False]
    print(f"{name} {setting}: {shown(found)}", file=sys.stderr, flush=True)
    return {
        "shape": name, "what": named(name).what, "setting": setting, "overrides": overrides, "peer": a.peer,
        "dtype": a.dtype, "clock": clock, "steps_a_turn": steps, "ratio": found,
        "ours_ms": 1e3 * ours_s, "theirs_ms": 1e3 * theirs_s, "ours_bytes": sizes[0], "theirs_bytes": sizes[1],
        "losses": losses, "flops_per_step": flops,
        "tokens_per_second": config.train.batch_size * config.train.seq_len / ours_s,
        "mfu": vendors_share(flops / ours_s, peak["device"], a.dtype),
        "mfu_full_square": vendors_share(counts[True] / ours_s, peak["device"], a.dtype),
        "of_peak": flops / ours_s / peak["flops"][a.dtype], "peak": peak,
    }  # fmt: skip


def flops_per_step(config, full_square: bool) -> float:
    from lm import flops, parameters

    model, t = parameters.resolve(config, config.model.vocab_size).model, config.train
    return flops.flops_per_token(model, t.seq_len, full_square=full_square) * t.batch_size * t.seq_len


def vendors_share(flops_per_second: float, device: str, dtype: str) -> float | None:
    """Of the peak that the device's vendor gives, where that is known."""
    from lm.flops import peak_flops

    peak = peak_flops(device, dtype)
    return flops_per_second / peak if peak else None


def n_steps(worker: Worker, seconds: float) -> int:
    """How many steps fill a turn; a multiple of 10, so that each turn logs as often, where that is not too many."""
    worker.ask(run=10)  # not timed: compilation, memory, caches
    speed = 10 / worker.ask(run=10)["wall"]
    n = seconds * speed
    return max(10, round(n / 10) * 10)


def measured_peak() -> dict:
    """FLOPs a second of large matrix products by dtype, and bytes a second of a copy, on this machine."""
    command = [sys.executable, "-m", "benchmarks.peak"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
