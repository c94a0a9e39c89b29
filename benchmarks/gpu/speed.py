"""Variants of a training step of GPT-2 124M, beside nanoGPT's compiled step.

All compile at once on the cores of the host. Then each is timed alone, and the fastest of ours is
profiled.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from benchmarks.compare import Worker
from benchmarks.gpu.kernels import table
from benchmarks.gpu.kit import Kit, gpu_state
from benchmarks.shapes import config_of, named, write_tokens
from benchmarks.train_speed import flops_per_step

ROUNDS = 3
SECONDS = 1.5  # of a round, roughly
COMPILING = 0.6  # the share of the time after which the variants that still compile are given up
PROFILED = 4  # steps; a trace of more is tens of megabytes
TRITON = "--xla_gpu_enable_triton_gemm=true --xla_gpu_experimental_enable_fusion_autotuner=true"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A training step: overrides of config keys, and for "nanogpt" none."""

    name: str
    shape: str = "124M@16"
    overrides: dict = dataclasses.field(default_factory=dict)
    env: dict = dataclasses.field(default_factory=dict)
    side: str = "ours"


VARIANTS = [
    Variant("default"),
    Variant("nanoGPT, compiled", side="nanogpt"),
    Variant("6 heads of 128", overrides={"model.n_heads": 6}),
    Variant("logits at once", overrides={"train.loss_chunk": 0}),
    Variant("rounded logits", overrides={"model.round_logits": True}),
    Variant("batch 32", "124M@32"),
    Variant("batch 64", "124M@64"),
    Variant("scanned", overrides={"model.scan_layers": True}),
    Variant("padded vocabulary", overrides={"model.vocab_size": 50_304}),
    Variant("joined q, k, v", overrides={
        "train.compiler_options": ("xla_gpu_dot_merger_threshold_mb=32",)}),
    Variant("products by Triton", env={"XLA_FLAGS": TRITON}),
    Variant("heads of 128, rounded logits at once, batch 32", "124M@32",
            {"model.n_heads": 6, "model.round_logits": True, "train.loss_chunk": 0}),
]  # fmt: skip
TINY = [
    Variant("default", "tiny"),
    Variant("nanoGPT, compiled", "tiny", side="nanogpt"),
    Variant("1 head", "tiny", {"model.n_heads": 1}),
    Variant("fails", "tiny", {"model.n_heads": 3}),
]


def measure(kit: Kit) -> None:
    """Time all variants and profile the fastest of ours."""
    fastest = None
    # Only the fastest stays in the memory of the device.
    for variant, worker, row in race(kit, TINY if kit.tiny else VARIANTS):
        kit.record("speed", variant.name, shape=variant.shape, side=variant.side, **row)
        if variant.side != "ours" or "tokens_per_second" not in row:
            worker.close()
        elif fastest is None or row["tokens_per_second"] > fastest[2]["tokens_per_second"]:
            if fastest is not None:
                fastest[1].close()
            fastest = variant, worker, row
        else:
            worker.close()
    if fastest is None or kit.left() < 10:
        return
    variant, worker, _ = fastest
    found = worker.ask(profile=str(kit.folder("profile")), steps=PROFILED)
    text = table(Path(found["trace"]), Path(found["program"])) if found["trace"] else "no trace"
    (kit.out / "profile.txt").write_text(f"{variant.name}, {PROFILED} steps\n\n{text}\n")
    kit.record("profile", variant.name, lines=text.splitlines()[:12])
    worker.close()


def race(kit: Kit, variants: list[Variant]) -> Iterator[tuple[Variant, Worker, dict]]:
    """Yield each variant with its worker and what was measured, or an error."""
    data = kit.folder("data")
    workers = {}
    for i, variant in enumerate(variants):
        tokens = data / variant.shape.partition("@")[0]
        if not tokens.exists():
            write_tokens(tokens, named(variant.shape))
        workdir = kit.folder(f"side{i}")
        job = job_of(variant, tokens, workdir, kit)
        workers[variant.name] = Worker(job, variant.env)
    with ThreadPoolExecutor(len(workers)) as pool:
        ready = {name: pool.submit(worker.ask, facts=True) for name, worker in workers.items()}
        wait(ready.values(), timeout=COMPILING * kit.left())
        for name, facts in ready.items():
            if not facts.done():  # its compilation would disturb the others
                workers[name].process.kill()
    for variant in variants:
        worker = workers[variant.name]
        try:
            row = {"device": None} | ready[variant.name].result()
            if kit.left() < 10:
                row["error"] = "not reached"
            else:
                row |= timed(worker) | gpu_state() | worker.ask(facts=True)
                row |= derived(variant, row)
        except RuntimeError as error:
            row = {"error": str(error)[-500:]}
        yield variant, worker, row


def job_of(variant: Variant, tokens: Path, workdir: Path, kit: Kit) -> dict:
    """Return the job of a worker process for a variant."""
    dtype = "float32" if kit.tiny else "bfloat16"
    # A cache of its own: programs of an earlier code, or of another variant, are not read.
    overrides = {"model.compute_dtype": dtype, "data.cache_dir": str(workdir / "cache")}
    return {
        "side": variant.side,
        "shape": variant.shape,
        "overrides": overrides | variant.overrides,
        "data": str(tokens),
        "workdir": str(workdir),
        "dtype": dtype,
        "compiled": not kit.tiny,
    }


def timed(worker: Worker) -> dict:
    """Return the milliseconds of a step in each round."""
    warm = 3
    worker.ask(run=warm)
    n = max(3, round(SECONDS * warm / worker.ask(run=warm)["wall"]))
    rounds = [1e3 * worker.ask(run=n)["wall"] / n for _ in range(ROUNDS)]
    return {"ms": statistics.median(rounds), "rounds": rounds, "steps": n}


def derived(variant: Variant, row: dict) -> dict:
    """Return tokens/s, and the share of the device's peak by both counts of attention's FLOPs."""
    from lm.cost.devices import peak_flops
    from lm.cost.flops import mfu

    config = config_of(variant.shape, "unread", variant.overrides)
    per_second = 1e3 / row["ms"]
    found = {"tokens_per_second": per_second * config.train.batch_size * config.train.seq_len}
    peak = peak_flops(row["device"] or "", "bfloat16")
    for name, full_square in (("mfu", False), ("mfu_full_square", True)):
        flops = flops_per_step(config, full_square=full_square)
        found[name] = mfu(per_second, flops, 1, peak)
    return found
