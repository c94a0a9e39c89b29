"""Measure how the cost of a training step grows with the size of the model.

    python -m benchmarks.growth
    python -m benchmarks.growth --redraw

Varies one size of a small Llama-like model at a time: parameters (by width), context, vocabulary, layers, simulated
devices. Each point runs in a process of its own and compiles from scratch. Measures CPU seconds to compile, the median
seconds per step, and the bytes of the program's arguments and temporaries, beside the estimate that
`--plan` uses. Writes results/growth.json and docs/growth.png.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time

from benchmarks.compare import RESULTS, ROOT, timed, write_results

BASE = {
    "model.d_model": 128, "model.n_layers": 4, "model.n_heads": 4, "model.vocab_size": 256, "train.seq_len": 128,
    "train.batch_size": 8, "data.source": "tokens:unread",
}  # fmt: skip
AXES = {
    "parameters": [{"model.d_model": d} for d in (64, 128, 256, 512)],
    "context": [{"train.seq_len": t} for t in (64, 128, 256, 512, 1024)],
    "vocabulary": [{"model.vocab_size": v} for v in (256, 1024, 4096, 16_384)],
    "vocabulary, chunks of 128": [{"model.vocab_size": v, "train.loss_chunk": 128} for v in (256, 1024, 4096, 16_384)],
    "layers": [{"model.n_layers": n} for n in (2, 4, 8, 16)],
    "layers, scanned": [{"model.n_layers": n, "model.scan_layers": True} for n in (2, 4, 8, 16)],
    "devices": [{"devices": n} for n in (1, 2, 4, 8)],
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.split("\n")[0])
    parser.add_argument("--redraw", action="store_true", help="measure nothing; draw results/growth.json again")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.point:
        print(json.dumps(point(json.loads(a.point))))
        return 0
    if not a.redraw:
        write_results(RESULTS / "growth.json", measure(), base=BASE)
    figure = draw(json.loads((RESULTS / "growth.json").read_text())["rows"])
    figure.savefig(ROOT / "docs" / "growth.png", dpi=100)
    return 0


def measure() -> list[dict]:
    """Measure every point of AXES, each in a process of its own."""
    rows = []
    for axis, changes in AXES.items():
        for change in changes:
            command = [sys.executable, "-m", "benchmarks.growth", "--point", json.dumps(change)]
            found = json.loads(timed(command)["output"][-1])
            at = found["n_params"] if axis == "parameters" else next(iter(change.values()))
            rows.append({"axis": axis, "at": at, "change": change} | found)
            print(rows[-1], flush=True)
    return rows


def point(change: dict) -> dict:
    """Measure one training step with these changes of BASE.

    Args:
        change: config values by key, and "devices", the number of simulated devices.

    Returns:
        {"n_params", "compile_s", "step_s", "bytes", "formula_bytes"}; bytes are those of one device.
    """
    n_devices = change.pop("devices", 1)
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}"}
    from benchmarks.shapes import CONFIG
    from lm.command_line.loading import load_values
    from lm.malloc import retain_freed_memory

    retain_freed_memory()
    import functools

    import jax
    import numpy as np

    from lm import parameters
    from lm.cost.devices import DEVICES
    from lm.cost.memory import memory_per_device
    from lm.parallel import sharding
    from lm.parallel.mesh import check_mesh, current_mesh, use_mesh
    from lm.step import init_state, train_step

    config = load_values(str(CONFIG), BASE | change)
    config = parameters.resolve(config, config.model.vocab_size)
    t = config.train
    sizes = check_mesh(config, n_devices)
    with use_mesh(sizes):
        init = functools.partial(init_state, config)
        table = parameters.parameter_table(config.model)
        shardings = jax.tree.map(lambda a: a.sharding, sharding.shard_state(jax.eval_shape(init, 0), table))
        state = jax.jit(init, out_shardings=shardings)(0)
        tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (t.batch_size, t.seq_len + 1), np.int32)
        batch = {"tokens": sharding.shard_examples(current_mesh(), tokens.shape, 0, tokens.__getitem__)}
        jitted = jax.jit(train_step, static_argnames="config", donate_argnames="state", out_shardings=(shardings, None))
        lowered = jitted.lower(state, batch, config)
        began = time.process_time()
        compiled = lowered.compile()
        compile_seconds = time.process_time() - began
        seconds = []
        for _ in range(12):
            began = time.perf_counter()
            state, out = compiled(state, batch)
            jax.block_until_ready(out)
            seconds.append(time.perf_counter() - began)
    memory = compiled.memory_analysis()
    formula = memory_per_device(config, DEVICES["h100"], sizes)  # like a CPU, it has no fused attention in float32
    return {
        "n_params": parameters.count(table), "compile_s": compile_seconds, "step_s": statistics.median(seconds[2:]),
        "bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes, "formula_bytes": formula.total,
    }  # fmt: skip


# ---- Picture ---------------------------------------------------------------------------------------------------------

COLUMNS = {"parameters": "parameters", "context": "context length", "vocabulary": "vocabulary", "layers": "layers",
           "devices": "simulated devices"}  # fmt: skip
COSTS = {"step_s": "seconds per step", "compile_s": "CPU seconds to compile", "bytes": "MiB per device"}


def slope(at: list[float], costs: list[float]) -> float:
    """Return the exponent of the power law through these points: the slope of a least-squares line in log-log axes.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    x, y = [math.log(v) for v in at], [math.log(v) for v in costs]
    return statistics.linear_regression(x, y).slope


def draw(rows: list[dict]):
    """Draw each cost over each size in log-log axes, with the fitted slope beside each line; the estimate is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, panels = plt.subplots(len(COSTS), len(COLUMNS), figsize=(16, 9), sharex="col", sharey="row")
    for i, (cost, label) in enumerate(COSTS.items()):
        panels[i, 0].set_ylabel(label)
        for j, (group, title) in enumerate(COLUMNS.items()):
            axes = panels[i, j]
            draw_panel(axes, [r for r in rows if r["axis"].split(",")[0] == group], cost)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.margins(y=0.1)
            if i == 0:
                axes.set_title(title)
    figure.suptitle("Cost of a training step, both axes logarithmic; beside each line: its slope (1: proportional)")
    figure.tight_layout()
    return figure


def unit_of(cost: str) -> int:
    return 2**20 if cost == "bytes" else 1


def draw_panel(axes, rows: list[dict], cost: str) -> None:
    """Draw one cost over one size into a panel.

    Args:
        axes: the panel.
        rows: what `measure` returned for this size; a line for each variant of its axis.
        cost: a key of COSTS.
    """
    unit = unit_of(cost)
    axes.set(xscale="log", yscale="log")
    by_variant = {}
    for r in rows:
        by_variant.setdefault(r["axis"].partition(", ")[2] or "default", []).append(r)
    highest = max(by_variant.values(), key=lambda mine: mine[-1][cost])
    for i, (name, mine) in enumerate(by_variant.items()):
        at, costs = [r["at"] for r in mine], [r[cost] / unit for r in mine]
        axes.plot(at, costs, "os"[i] + "-", color=f"C{i}", label=name)
        if cost == "bytes":
            label = "estimate" if mine is by_variant["default"] else None
            axes.plot(at, [r["formula_bytes"] / unit for r in mine], "k--", label=label, linewidth=1, zorder=3)
        # Right of the last point; of two labels one is moved up and the other down.
        rise = 0 if len(by_variant) == 1 else 6 if mine is highest else -6
        label = f"{slope(at, costs):.2f}"
        axes.annotate(label, (at[-1], costs[-1]), (9, rise), textcoords="offset points", va="center", color=f"C{i}")
    sizes = [r["at"] for r in highest]
    axes.set_xticks(sizes, [short(size) for size in sizes])
    span = sizes[-1] / sizes[0]
    axes.set_xlim(sizes[0] / span**0.06, sizes[-1] * span**0.3)
    axes.grid(alpha=0.3)
    if len(by_variant) > 1 or cost == "bytes":
        axes.legend(fontsize=9, frameon=False, loc="upper left")


def short(n: int) -> str:
    """Format a size for an axis.

    >>> short(512), short(16_384), short(12_835_072)
    ('512', '16k', '12.8M')
    """
    return f"{n / 1e6:.1f}M" if n >= 1e6 else f"{n / 1e3:.0f}k" if n >= 10_000 else str(n)


if __name__ == "__main__":
    sys.exit(main())
