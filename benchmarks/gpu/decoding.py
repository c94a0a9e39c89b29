"""Generating text at 124M beside transformers, and the memory of 1.2 billion parameters."""

import json
from pathlib import Path

from benchmarks.compare import Worker
from benchmarks.gpu.kit import Kit, ended, gpu_state, started
from benchmarks.shapes import config_of, named, write_tokens


def measure(kit: Kit) -> None:
    """Compile the large model while text is generated, then train it for a few steps."""
    shape = "tiny" if kit.tiny else "1B@4"
    tokens = kit.folder("data") / "tokens"
    write_tokens(tokens, named(shape))
    workdir = kit.folder("memory")
    overrides = {"data.cache_dir": str(workdir / "cache")}
    if not kit.tiny:
        overrides["model.compute_dtype"] = "bfloat16"
    job = {"side": "ours", "shape": shape, "overrides": overrides}
    worker = Worker(job | {"data": str(tokens), "workdir": str(workdir)})
    generation(kit)
    memory(kit, worker, shape, overrides)


def generation(kit: Kit) -> None:
    """Record the rows of benchmarks/generation.py."""
    found = kit.folder("generation") / "rows.json"
    shape = "tiny" if kit.tiny else "124M"
    options = ["--shape", shape, "--rounds", "1", "--json", str(found)]
    log = kit.out / "generation.log"
    process = started(["-m", "benchmarks.generation", "--accelerator", *options], log)
    status = ended(process, 0.6 * kit.left())
    if status != 0:
        reason = "not finished" if status is None else log.read_text()[-500:]
        kit.record("decoding", f"generation of {shape}", error=reason)
        return
    for row in json.loads(Path(found).read_text())["rows"]:
        speed = row["tokens_per_second"]
        name = f"{row['side']}, {row['batch']} texts"
        kit.record("decoding", name, shape=shape, batch=row["batch"], tokens_per_second=speed)


def memory(kit: Kit, worker: Worker, shape: str, overrides: dict) -> None:
    """Record the memory of a training step: planned, by the compiler, and at its peak."""
    from lm.config import MESH_AXES
    from lm.cost.devices import DEVICES
    from lm.cost.memory import memory_per_device

    config = config_of(shape, "unread", overrides)
    try:
        worker.ask(run=3)
        found = worker.ask(run=3) | worker.ask(facts=True)
    except RuntimeError as error:
        kit.record("memory", shape, error=str(error)[-500:])
        return
    planned = memory_per_device(config, DEVICES["h200"], dict.fromkeys(MESH_AXES, 1)).total
    tokens = 3 * config.train.batch_size * config.train.seq_len
    kit.record(
        "memory", shape, planned_bytes=planned, tokens_per_second=tokens / found["wall"],
        **{name: found[name] for name in ("program_bytes", "peak_bytes", "device")}, **gpu_state(),
    )  # fmt: skip
    worker.close()
