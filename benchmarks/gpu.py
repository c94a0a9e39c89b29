"""Run every check and benchmark that needs a GPU.

    pip install -e '.[test,bench,cuda]'
    python -m benchmarks.gpu

The parts:

    tests         the fast tests
    G, 124M, 1B   training speed in bfloat16 beside transformers with torch.compile: G at batch 64, the others at the
                  largest batch at which both sides fit together
    loss          time of configs/shakespeare_gpu.py to the validation loss that nanoGPT's README gives, 1.47

A part that fails is reported as FAILED and the next one runs. Exits with code 2 at once unless both jax and torch see
a GPU. Writes results/gpu.json, or results/gpu-PARTS.json for some of the parts. It was never run on a GPU.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare import RESULTS, format_ratio, timed, write_results
from lm.errors import UserError, with_exit_code
from lm.text_tables import markdown_table

BATCHES = {"124M": (128, 64, 48, 32, 24, 16, 8), "1B": (16, 8, 4, 2, 1), "G": (64,)}
OUT_OF_MEMORY = ("out of memory", "Out of memory", "RESOURCE_EXHAUSTED", "CUBLAS_STATUS_ALLOC_FAILED")
NANOGPT_LOSS = 1.47  # of the GPU run on Tiny Shakespeare in nanoGPT's README


@with_exit_code
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="parts to run [all]")
    parser.add_argument("--text", metavar="PATH", help="Tiny Shakespeare's input.txt [default: download it]")
    a = parser.parse_args()
    require_gpu()
    name = "-".join(["gpu", *(a.parts if a.parts != list(PARTS) else [])])
    parts = {PARTS[part][0]: lambda part=part: PARTS[part][1](a) for part in a.parts}
    rows = run_parts(parts, RESULTS / f"{name}.json")
    print(markdown_table(["what", "result"], [[row["what"], row["result"]] for row in rows]))
    return int(any(row["failed"] for row in rows))


def run_parts(parts: dict[str, Callable[[], dict]], path: Path) -> list[dict]:
    """Run each part, by its description, print its result, and write all results so far to a JSON file.

    A part returns {"result": text, ...} or raises. Returns one row per part: {"what", "seconds", "failed", "result",
    ...}; the result of a failed part is its error.
    """
    rows = []
    for what, part in parts.items():
        began = time.monotonic()
        try:
            found = {"failed": False} | part()
        except Exception as error:  # the next part may still succeed
            found = {"failed": True, "result": f"FAILED: {type(error).__name__}: {str(error)[-400:]}"}
        rows.append({"what": what, "seconds": round(time.monotonic() - began), **found})
        print(f"{what}: {found['result']}", flush=True)
        write_results(path, rows)
    return rows


def require_gpu() -> None:
    """Raise UserError if jax or torch is not installed or sees no GPU. They are imported in another process."""
    check = (
        "import jax; assert jax.default_backend() == 'gpu', 'jax sees no GPU'; "
        "import torch, transformers; assert torch.cuda.is_available(), 'torch sees no GPU'"
    )
    try:
        timed([sys.executable, "-c", check])
    except RuntimeError as error:
        last = str(error).strip().splitlines()[-1]
        raise UserError(f"{last}; on a machine with a GPU run: pip install -e '.[test,bench,cuda]'") from None


def run(*command: str, **env: str) -> list[str]:
    """Run `python -m COMMAND` and return the lines of its output. Raises RuntimeError with their end if it fails."""
    return timed([sys.executable, "-m", *command], os.environ | env)["output"]


def tests(a) -> dict:
    """Run the fast tests, with deterministic kernels and full float32: some compare bits or have tight tolerances."""
    env = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes share the GPU
        "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # also for the processes that tests start
    }
    return {"result": run("pytest", **env)[-1]}


def speed(shape: str) -> dict:
    """Run benchmarks/train_speed.py in bfloat16 at the largest batch at which both sides fit together."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "row.json"
        options = ["--peer", "compiled", "--dtype", "bfloat16", "--json", str(found)]
        batch = largest_batch(BATCHES[shape], lambda batch: run("benchmarks.train_speed", f"{shape}@{batch}", *options))
        row = json.loads(found.read_text())["rows"][0]
    return {"result": f"batch {batch}: {describe(row)}", "row": row}


def largest_batch(batches: tuple[int, ...], train: Callable[[int], object]) -> int:
    """Return the first of these batch sizes that trains without running out of memory; RuntimeError if none does."""
    for batch in batches:
        try:
            train(batch)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in OUT_OF_MEMORY):
                raise
        else:
            return batch
    raise RuntimeError(f"out of memory at every batch size of {', '.join(map(str, batches))}")


def describe(row: dict) -> str:
    """Summarize a row of benchmarks/train_speed.py. Raises RuntimeError if ours did not use cuDNN's attention."""
    if row["attention"] != "cudnn":
        raise RuntimeError(f"attention was {row['attention']}, not cudnn's")
    mfu = f", {row['mfu']:.1%} MFU ({row['mfu_full_square']:.1%} with masked scores)" if row["mfu"] else ""
    return f"{row['tokens_per_second']:,.0f} tokens/s{mfu}; torch / ours {format_ratio(row['ratio']['wall'])}"


def time_to_loss(a) -> dict:
    """Time configs/shakespeare_gpu.py with empty caches, until a validation loss is at most NANOGPT_LOSS.

    Without --text the time includes the download.
    """
    with tempfile.TemporaryDirectory() as directory:
        keys = [f"--config.data.cache_dir={directory}/cache", "--config.data.splits=0.9,0.1,0.0"]
        keys += [f"--config.data.source=text:{Path(a.text).resolve()}"] if a.text else []
        command = [sys.executable, "-m", "lm.train", "--config", "configs/shakespeare_gpu.py", *keys]
        command += ["--workdir", directory + "/run"]
        found = timed(command, until=lambda line: validation_loss(line) <= NANOGPT_LOSS)
    return {"result": f"{found['wall']:.0f} s, {found['output'][-1].split('validation')[0].strip()}"}


def validation_loss(line: str) -> float:
    """Return the validation loss in a line of the log, infinity if it has none.

    >>> validation_loss("step 250  validation: loss 1.5021 (best)"), validation_loss("compiled")
    (1.5021, inf)
    """
    found = re.search(r"validation: loss (\S+)", line)
    return float(found[1]) if found else math.inf


PARTS = {
    "tests": ("tests", tests),
    "G": ("G, bfloat16, beside torch.compile", lambda a: speed("G")),
    "124M": ("124M, bfloat16, beside torch.compile", lambda a: speed("124M")),
    "loss": (f"shakespeare_gpu to validation loss {NANOGPT_LOSS}", time_to_loss),
    "1B": ("1B, bfloat16, beside torch.compile", lambda a: speed("1B")),
}

if __name__ == "__main__":
    sys.exit(main())
