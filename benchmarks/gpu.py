"""All that is to be known of a GPU, with one command: python -m benchmarks.gpu

The quick tests; training beside transformers + torch.compile (G at batch 64, 124M and 1B at the largest batch at which
both fit at once); the wall time of configs/shakespeare_gpu.py to a validation loss of 1.47 over the last tenth of the
text, as nanoGPT has it; five seeds as one program beside five runs. Each part that fails says so in the table, and the
others go on; without a GPU in both jax and torch nothing is begun. Writes results/gpu.json, or gpu-PARTS.json of some.
Not tried: no GPU was at hand. Needs

    pip install -e '.[test,bench,cuda]'
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare import RESULTS, ROOT, machine, markdown, shown, started_as

BATCHES = {"124M": (128, 64, 48, 32, 24, 16, 8), "1B": (16, 8, 4, 2, 1), "G": (64,)}
AT_LEAST = {"124M": {"mfu": 0.45, "ratio": 1.1}, "G": {"ratio": 1.5}, "1B": {}}
NO_MEMORY = ("out of memory", "Out of memory", "RESOURCE_EXHAUSTED", "CUBLAS_STATUS_ALLOC_FAILED")
TARGET = 1.47


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="[all, in this order]")
    parser.add_argument("--text", metavar="PATH", help="Tiny Shakespeare's input.txt, where it is not to be downloaded")
    a = parser.parse_args()
    if missing := no_gpu():
        print(f"benchmarks.gpu: {missing}", file=sys.stderr)
        return 2
    rows, some = [], a.parts if a.parts != list(PARTS) else []
    for name in a.parts:
        what, part = PARTS[name]
        began = time.monotonic()
        try:
            found = part(a)
        except Exception as error:  # a part that fails must not take the others with it
            found = {"result": f"FAILED: {type(error).__name__}: {str(error)[-400:]}"}
        rows.append({"what": what, "seconds": round(time.monotonic() - began), **found})
        print(f"{what}: {rows[-1]['result']}", flush=True)
        report = {"command": started_as(), "machine": machine(), "rows": rows}
        (RESULTS / f"{'-'.join(['gpu', *some])}.json").write_text(json.dumps(report, indent=1) + "\n")
    cells = [[r["what"], r["result"].replace("|", "/"), r.get("targets", "-")] for r in rows]
    print(markdown(["what", "result", "targets"], cells))
    return int(any(r["result"].startswith("FAILED") for r in rows))


def no_gpu() -> str | None:
    """Why this machine will not do."""
    checks = {
        "jax": "import jax; assert jax.default_backend() == 'gpu', jax.default_backend()",
        "torch": "import torch; assert torch.cuda.is_available(), torch.version.cuda",
        "transformers": "import transformers",
    }
    for name, check in checks.items():
        done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return f"{name} is not installed, or has no GPU here: {(done.stderr.strip() or 'killed').splitlines()[-1]}"
    return None


def run(*command: str, **env: str) -> str:
    """The output of a Python module; raises RuntimeError with what it said where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, env=os.environ | env
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def tests(a) -> dict:
    """All but the slow ones. Equal bits need deterministic kernels, and several processes a GPU that none fills."""
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
    env["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # of the processes that tests start as well
    return {"result": run("pytest", **env).strip().splitlines()[-1]}


def speed(name: str) -> dict:
    """At the largest batch at which both sides fit at once: the first that does not fail for want of memory."""
    options = ["--peer", "compiled", "--dtype", "bfloat16", "--settings", "best", "--name", f"train_speed-gpu-{name}"]
    for batch in BATCHES[name]:
        try:
            run("benchmarks.train_speed", f"{name}@{batch}", *options)
            break
        except RuntimeError as error:
            if not any(sign in str(error) for sign in NO_MEMORY):
                raise
    else:
        raise RuntimeError("no batch fits")
    row = json.loads((RESULTS / f"train_speed-gpu-{name}.json").read_text())["rows"][0]
    if row["attention"] != "cudnn":
        raise RuntimeError(f"attention was {row['attention']}, not cudnn's")
    tokens, found = row["tokens_per_second"], {"mfu": row["mfu"], "ratio": row["ratio"]["wall"]["median"]}
    mfu = "".join(
        f", {row[key]:.1%} MFU{note}" for key, note in (("mfu", ""), ("mfu_full_square", " (full square)")) if row[key]
    )
    targets = [
        f"{what} {least}: " + ("not known" if found[what] is None else "reached" if found[what] >= least else "MISSED")
        for what, least in AT_LEAST[name].items()
    ]
    result = f"batch {batch}: {tokens:,.0f} tokens/s{mfu}; torch / ours {shown(row['ratio']['wall'])}"
    return {"result": result, "targets": ", ".join(targets) or "-", "row": row}


def time_to_loss(a) -> dict:
    """From the start of the process, nothing compiled before, to the first validation at or below the target.

    Where the text is downloaded, that counts.
    """
    with tempfile.TemporaryDirectory() as directory:
        keys = [f"--config.data.cache_dir={directory}/cache", "--config.data.splits=0.9,0.1,0.0"]
        keys += [f"--config.data.source=text:{Path(a.text).resolve()}"] if a.text else []
        command = [sys.executable, "-m", "lm.train", "--config", "configs/shakespeare_gpu.py", *keys]
        command += ["--workdir", directory + "/run"]
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
import json
from benchmarks.shapes import config_of, named, write_tokens
from lm import data
from lm.sweeps.throughput import Runs, measure
from lm.runtime import start_jax
from lm.training.run import resolve_config
from pathlib import Path
import tempfile
with tempfile.TemporaryDirectory() as directory:
    write_tokens(Path(directory) / "data", named("G"))
    options = {"train.steps_per_dispatch": 10, "model.compute_dtype": "bfloat16"}
    config = config_of("G@64", directory + "/data", options)
    start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
    corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=lambda text: None)
    config = resolve_config(config, corpus)
    found = measure({"one": Runs(config, corpus, 1, 1), "five": Runs(config, corpus, 5, 1)})
print(json.dumps(found))
"""


def five_seeds(a) -> dict:
    """Tokens a second of five runs in one program, over those of one run alone."""
    done = subprocess.run([sys.executable, "-c", SEEDS], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return {"result": f"{found['five'] / found['one']:.2f} times as fast as one after another", "row": found}


PARTS = {
    "tests": ("tests", tests),
    "G": ("G, bfloat16, beside torch.compile", lambda a: speed("G")),
    "124M": ("124M, bfloat16, beside torch.compile", lambda a: speed("124M")),
    "seeds": ("5 seeds of G in one program", five_seeds),
    "loss": (f"shakespeare_gpu to validation loss {TARGET}", time_to_loss),
    "1B": ("1B, bfloat16, beside torch.compile", lambda a: speed("1B")),
}

if __name__ == "__main__":
    sys.exit(main())
