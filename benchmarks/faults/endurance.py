"""Measure memory, open files and threads during a long run: python -m benchmarks.faults.endurance --steps 20000"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

from benchmarks.faults.runs import Bench
from lm.text_tables import markdown_table

N_ROWS = 10
# Many evaluations, checkpoints and lines of metrics, because each may leak memory or files.
KEYS = ("eval.every=200", "checkpoint.every=200", "log.every=20", "log.tensorboard=true", "train.steps_per_dispatch=20")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.endurance", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="length of the run (%(default)s)")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as directory:
        rows = list(measure(Bench(Path(directory)), steps))
    print(markdown_table(["step", "resident MiB", "open files", "threads", "loss"], rows))
    return 0


def measure(bench: Bench, steps: int):
    """Yield (step, resident MiB, open files, threads, loss) ten times during a run, from /proc of its process."""
    keys = [f"--config.{key}" for key in (*KEYS, f"train.steps={steps}")]
    arguments = bench.arguments(bench.base / "run", *keys)
    with bench.process("-m", "lm.train", *arguments) as process:
        for line in process.stdout:
            found = re.match(r"step +(\d+)/\d+  loss (\S+)", line)
            if found and int(found[1]) % (steps // N_ROWS) == 0:
                status = Path(f"/proc/{process.pid}/status").read_text()
                n_threads, resident = (re.search(rf"{name}:\s*(\d+)", status)[1] for name in ("Threads", "VmRSS"))
                n_files = len(os.listdir(f"/proc/{process.pid}/fd"))
                yield [f"{int(found[1]):,}", f"{int(resident) / 1024:.0f}", str(n_files), n_threads, found[2]]
    if process.returncode:
        raise RuntimeError(f"the run ended with exit code {process.returncode}: {line}")


if __name__ == "__main__":
    sys.exit(main())
