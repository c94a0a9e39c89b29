"""All that is to be known of a GPU, with one command: python -m benchmarks.gpu

The tests; training beside transformers + torch.compile (G at batch 64, 124M at the largest batch that fits both, 1B);
the wall time of configs/shakespeare_gpu.py to a validation loss of 1.47; five seeds as one program beside five runs.
Each part that fails says so in the table, and the others go on. Writes results/gpu.json.
"""

import json
import subprocess
import sys
import tempfile
import time

from benchmarks.compare import RESULTS, ROOT, machine, markdown, shown

BATCHES = {"124M": (64, 48, 32, 24, 16, 8), "1B": (16, 8, 4, 2, 1), "G": (64,)}
TARGET = 1.47


def main() -> int:
    rows = []
    for what, part in PARTS.items():
        began = time.monotonic()
        try:
            found = part()
        except Exception as error:  # a part that fails must not take the others with it
            found = {"result": f"FAILED: {type(error).__name__}: {str(error)[-200:]}"}
        rows.append({"what": what, "seconds": round(time.monotonic() - began), **found})
        print(f"{what}: {rows[-1]['result']}", flush=True)
        report = {"command": "python -m benchmarks.gpu", "machine": machine(), "rows": rows}
        (RESULTS / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(["what", "result"], [[r["what"], r["result"].replace("|", "/")] for r in rows]))
    return int(any(r["result"].startswith("FAILED") for r in rows))


def run(*command: str) -> str:
    """The output of a Python module; raises RuntimeError with its end where it fails."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return done.stdout


def tests() -> dict:
    return {"result": run("pytest").strip().splitlines()[-1]}


def speed(name: str) -> dict:
    """At the largest batch that fits both sides: the first that does not fail."""
    for batch in BATCHES[name]:
        try:
            run(
                "benchmarks.train_speed",
                f"{name}@{batch}",
                "--peer",
                "compiled",
                "--dtype",
                "bfloat16",
                "--settings",
                "best",
            )
            break
        except RuntimeError as error:
            if "out of memory" not in str(error).lower() and "RESOURCE_EXHAUSTED" not in str(error):
                raise
    else:
        raise RuntimeError("no batch fits")
    row = json.loads((RESULTS / "train_speed.json").read_text())["rows"][0]
    tokens = row["tokens_per_second"]
    mfu = "".join(
        f", {row[key]:.1%} MFU{note}" for key, note in (("mfu", ""), ("mfu_full_square", " (full square)")) if row[key]
    )
    return {"result": f"batch {batch}: {tokens:,.0f} tokens/s{mfu}; torch / ours {shown(row['ratio'])}", "row": row}


def time_to_loss() -> dict:
    """From the start of the process to the first validation at or below the target."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "lm.train",
            "--config",
            "configs/shakespeare_gpu.py",
            "--workdir",
            directory + "/run",
        ]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        last = ""
        for last in process.stdout:
            if "validation: loss" in last and float(last.split("validation: loss")[1].split()[0]) <= TARGET:
                seconds = time.monotonic() - began
                process.kill()
                process.wait()
                return {"result": f"{seconds:.0f} s, {last.split('validation')[0].strip()}"}
    raise RuntimeError(f"never: {last}")


SEEDS = """
import dataclasses, json, jax
from benchmarks.shapes import config_of, named, write_tokens
from lm import data
from lm.sweeps.speed import Runs, measure
from lm.train import check_with_data, start_jax
from pathlib import Path
import tempfile
with tempfile.TemporaryDirectory() as directory:
    write_tokens(Path(directory) / "data", named("G"))
    options = {"train.steps_per_dispatch": 10, "model.compute_dtype": "bfloat16"}
    config = config_of("G@64", directory + "/data", options)
    start_jax(config)
    corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=lambda text: None)
    config = check_with_data(config, corpus)
    found = measure({"one": Runs(config, corpus, 1, 1), "five": Runs(config, corpus, 5, 1)})
print(json.dumps(found))
"""


def five_seeds() -> dict:
    """Tokens a second of five runs in one program, over those of one run alone."""
    done = subprocess.run([sys.executable, "-c", SEEDS], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return {"result": f"{found['five'] / found['one']:.2f} times as fast as one after another", "row": found}


PARTS = {
    "tests": tests,
    "G, bfloat16, beside torch.compile": lambda: speed("G"),
    "124M, bfloat16, beside torch.compile": lambda: speed("124M"),
    "5 seeds of G in one program": five_seeds,
    f"shakespeare_gpu to validation loss {TARGET}": time_to_loss,
    "1B, bfloat16, beside torch.compile": lambda: speed("1B"),
}

if __name__ == "__main__":
    sys.exit(main())
