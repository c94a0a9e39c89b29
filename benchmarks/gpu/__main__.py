"""Measure on a GPU that is lent for minutes.

    python -m benchmarks.gpu ITEM ... --out DIR      items: speed, tests, exact, stacked, decoding
    python -m benchmarks.gpu tables --out DIR        the tables of the results in DIR

Each item ends by itself within its seconds, and writes each result to DIR/results.jsonl at once.
"""

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.compare import machine
from benchmarks.gpu.kit import ROOT, Kit
from benchmarks.gpu.tables import tables
from lm.system.errors import UserError, with_exit_code

# In the order of value, with the seconds that each may take. Each is a module of this folder.
SECONDS = {"speed": 200, "tests": 120, "exact": 100, "stacked": 120, "decoding": 60}
GRACE = 5  # seconds after which an item that did not end itself is killed


@with_exit_code
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "items", nargs="+", choices=[*SECONDS, "tables"], metavar="ITEM",
        help=f"{', '.join(f'{item} ({n} s)' for item, n in SECONDS.items())}, or tables",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument("--seconds", type=float, help="of each item, in place of its own")
    parser.add_argument(
        "--tiny", action="store_true", help="the smallest models, to test the kit on a CPU"
    )
    a = parser.parse_args()
    if a.items == ["tables"]:
        print(tables(a.out / "results.jsonl"))
        return 0
    if "tables" in a.items:
        raise UserError("tables: measures nothing, so it is given alone")
    a.out = a.out.absolute()
    a.out.mkdir(parents=True, exist_ok=True)
    Kit(a.out).record("machine", "machine", **machine())
    # Not only the first error matters: what comes next may still work.
    return max(run(item, a.out, a.seconds or SECONDS[item], tiny=a.tiny) for item in a.items)


def run(item: str, out: Path, seconds: float, *, tiny: bool) -> int:
    """Run an item in processes of its own, which are killed after its seconds; 0 if it ended."""
    code = (
        f"from benchmarks.gpu.__main__ import measure; measure(*{(item, str(out), seconds, tiny)})"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        status = process.wait(seconds + GRACE)
    except subprocess.TimeoutExpired:
        status = 1
        print(f"{item}: stopped after {seconds:.0f} s; its results are in {out}", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return int(status != 0)


def measure(item: str, out: str, seconds: float, tiny: bool) -> None:
    """Measure an item in this process."""
    module = importlib.import_module(f"benchmarks.gpu.{item}")
    module.measure(Kit(Path(out), time.monotonic() + seconds, tiny))


if __name__ == "__main__":
    sys.exit(main())
