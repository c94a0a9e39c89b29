"""How cost grows: python -m benchmarks.growth

One training step of a small Llama-like model while one number of it changes: parameters, context, vocabulary, layers,
simulated devices. Each point is a process of its own and compiles anew: CPU seconds to compile, seconds a step (the
median of several), bytes of the program's arguments and temporaries as XLA lays them out beside the formula of
lm/cost/memory.py. Writes results/growth.json and results/growth.png.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.compare import RESULTS, ROOT, machine

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
    parser.add_argument("--point", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.point:
        print(json.dumps(point(json.loads(a.point))))
        return 0
    rows = []
    for axis, changes in AXES.items():
        for change in changes:
            command = [sys.executable, "-m", "benchmarks.growth", "--point", json.dumps(change)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr[-3000:])
            found = json.loads(done.stdout.splitlines()[-1])
            at = found["n_params"] if axis == "parameters" else next(iter(change.values()))
            rows.append({"axis": axis, "at": at, "change": change} | found)
            print(rows[-1], flush=True)
    found = {"command": "python -m benchmarks.growth", "machine": machine(), "base": BASE, "rows": rows}
    (RESULTS / "growth.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(rows)
    return 0


def point(change: dict) -> dict:
    """What a step costs with this change of BASE."""
    n_devices = change.pop("devices", 1)
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}"}
    from benchmarks.shapes import CONFIG
    from lm.config.loading import load_values
    from lm.runtime import retain_freed_memory

    retain_freed_memory()
    import functools

    import jax
    import numpy as np

    from lm import parameters
    from lm.parallel import sharding
    from lm.parallel.mesh import check_mesh, current_mesh, use_mesh
    from lm.step import init_state, train_step

    config = load_values(str(CONFIG), BASE | change)
    config = parameters.resolve(config, config.model.vocab_size)
    t = config.train
    with use_mesh(check_mesh(config, n_devices)):
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
    return {
        "n_params": parameters.count(table), "compile_s": compile_seconds, "step_s": statistics.median(seconds[2:]),
        "bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes, "formula_bytes": formula(config, n_devices),
    }  # fmt: skip


def formula(config, n_devices: int) -> float:
    """Bytes on each device by lm/cost/memory.py: parameters, two moments, gradients; activations, logits twice."""
    from lm import parameters
    from lm.cost.devices import DEVICES
    from lm.cost.memory import activation_bytes, logit_bytes
    from lm.parallel.mesh import check_mesh

    sizes = check_mesh(config, n_devices)
    device = DEVICES["h100"]  # float32, for which it too has no fused attention
    state = 4 * 4 * parameters.count(parameters.parameter_table(config.model))
    return state + activation_bytes(config, device, sizes) + logit_bytes(config, sizes)


def draw(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = (
        ("step_s", "seconds a step", 1),
        ("compile_s", "CPU seconds to compile", 1),
        ("bytes", "MiB a device", 2**20),
    )
    groups = ("parameters", "context", "vocabulary", "layers", "devices")
    figure, axes = plt.subplots(len(columns), len(groups), figsize=(15, 8), sharex="col", layout="constrained")
    for j, group in enumerate(groups):
        for i, (key, label, unit) in enumerate(columns):
            ax = axes[i, j]
            for color, name in enumerate(sorted({r["axis"] for r in rows if r["axis"].split(",")[0] == group})):
                mine = [r for r in rows if r["axis"] == name]
                at = [r["at"] for r in mine]
                ax.plot(at, [r[key] / unit for r in mine], "o-", color=f"C{color}", label=name)
                if key == "bytes":
                    ax.plot(at, [r["formula_bytes"] / unit for r in mine], "--", color=f"C{color}", label="formula")
            ax.set_xscale("log", base=2)
            ax.set_ylim(bottom=0)
            ax.grid(alpha=0.3)
            if j == 0:
                ax.set_ylabel(label)
            if i == 0:
                ax.set_title(group)
            if i == len(columns) - 1:
                ax.legend(fontsize=8)
    figure.savefig(RESULTS / "growth.png", dpi=100)


if __name__ == "__main__":
    sys.exit(main())
