"""Equal numbers: losses as on the CPU, and the same bits after a kill and beside another process."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.compare import Worker
from benchmarks.gpu.kit import Kit, ended, started, write_text
from benchmarks.shapes import named, write_tokens

N_LOSSES = 20
# GPUs would compute float32 products in TF32
EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def measure(kit: Kit) -> None:
    """Compare losses with those of the CPU, and meanwhile three runs with one another."""
    with ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(losses, kit), pool.submit(runs, kit)]
    for part in parts:
        part.result()


def losses(kit: Kit) -> None:
    """Record the losses of float32 training on the device, and on the CPU of the same machine."""
    shape = "tiny" if kit.tiny else "S"
    tokens = kit.folder("data") / "tokens"
    write_tokens(tokens, named(shape))
    sides = {"device": {}, "cpu": {"JAX_PLATFORMS": "cpu"}}
    workers = {}
    for name, env in sides.items():
        workdir = kit.folder(name)
        overrides = {"data.cache_dir": str(workdir / "cache"), "train.deterministic": True}
        job = {"side": "ours", "shape": shape, "overrides": overrides}
        job |= {"data": str(tokens), "workdir": str(workdir)}
        workers[name] = Worker(job, EXACT | env)
    with ThreadPoolExecutor() as pool:
        asked = {name: pool.submit(worker.ask, losses=N_LOSSES) for name, worker in workers.items()}
        found = {name: answer.result()["losses"] for name, answer in asked.items()}
    pairs = zip(found["device"], found["cpu"], strict=True)
    largest = max(abs(a - b) for a, b in pairs)
    kind = workers["device"].ask(facts=True)["device"]
    kit.record(
        "exact", f"{N_LOSSES} losses", shape=shape, kind=kind, largest_difference=largest,
        **found,
    )  # fmt: skip
    for worker in workers.values():
        worker.close()


def runs(kit: Kit) -> None:
    """Train two runs at once, and a third that is killed and resumed; compare their last states."""
    base = kit.folder("runs")
    text = write_text(base / "text.txt")
    alone, beside, killed = (base / name for name in ("alone", "beside", "killed"))
    first = train(kit, text, alone)
    second = train(kit, text, beside)
    third = train(kit, text, killed)
    while not list(killed.glob("checkpoints/[0-9]*")) and third.poll() is None and kit.left() > 1:
        time.sleep(0.05)
    third.send_signal(signal.SIGKILL)
    third.wait()
    resumed = train(kit, text, killed, "--resume")
    status = [ended(process, kit.left()) for process in (first, second, resumed)]
    kit.record("exact", "two processes at once", **equal(alone, beside, status))
    kit.record("exact", "killed and resumed", **equal(alone, killed, status))


def train(kit: Kit, text: Path, workdir: Path, *more: str):
    """Start lm.train on a text with deterministic kernels."""
    config = "tests/configs/tiny.py" if kit.tiny else "configs/shakespeare_small.py"
    keys = {"data.source": f"text:{text}", "data.cache_dir": text.parent / "cache"}
    keys |= {"train.deterministic": True, "train.steps": 12 if kit.tiny else 60}
    if not kit.tiny:
        keys |= {"checkpoint.every": 20, "eval.every": 20, "model.compute_dtype": "bfloat16"}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    log = workdir.parent / f"{workdir.name}{len(more)}.log"
    program = ["-m", "lm.train", f"--config={config}", f"--workdir={workdir}", *flags, *more]
    return started(program, log)


def equal(expected: Path, workdir: Path, status: list) -> dict:
    """Return how two runs differ; equal checksums of the last states mean equal bits."""
    from benchmarks.faults.runs import differences

    return {"status": status, "differences": differences(workdir, expected, steps=False)}
