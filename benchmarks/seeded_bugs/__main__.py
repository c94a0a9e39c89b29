"""Put each fault into a copy of `lm` and check it: python -m benchmarks.seeded_bugs

Rows are added to a CSV file as they are measured. Those that it has are not measured again.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.seeded_bugs.faults import CONTROLS, FAULTS, HINTS, Fault

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "seeded_bugs.csv"
COLUMNS = ("fault", "kind", "found", "by", "seconds")
CONFIG = "configs/shakespeare_small.py"
TIMEOUT = 600  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.seeded_bugs", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="the CSV file")
    parser.add_argument("--only", metavar="WORDS", help="faults whose names or kinds have a word")
    parser.add_argument(
        "--part", default="0/1", metavar="I/N", help="every Nth fault, from the Ith"
    )
    parser.add_argument("--again", action="store_true", help="measure again what was not found")
    parser.add_argument("--show", action="store_true", help="print the output of each check")
    parser.add_argument("--apply", action="store_true", help="only apply the patches")
    a = parser.parse_args()
    rows = _read(a.out)
    if a.again:
        rows = {name: row for name, row in rows.items() if row["found"] != "no"}
    words = a.only.split(",") if a.only else [""]
    first, step = map(int, a.part.split("/"))
    every = (*FAULTS, *CONTROLS)
    for fault in (*every[::2], *every[1::2])[first::step]:  # half of all kinds first
        chosen = any(word in f"{fault.name}, {fault.kind}" for word in words)
        if chosen and a.apply:
            _patched(fault)
        elif chosen and (a.only or fault.name not in rows):
            rows[fault.name] = _measure(fault, a.show)
            print(*rows[fault.name].values(), sep=" | ", flush=True)
            _write(a.out, rows)
    _summarize(rows)
    return 0


def _patched(fault: Fault) -> str:
    """Return the text of the fault's file with the fault."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: {fault.file} has {text.count(fault.old)} times {fault.old!r}"
        )
    return text.replace(fault.old, fault.new)


def _measure(fault: Fault, show: bool) -> dict:
    begin = time.monotonic()
    by = ""
    with tempfile.TemporaryDirectory() as directory:
        for folder in ("lm", "configs"):
            shutil.copytree(ROOT / folder, Path(directory) / folder)
        if fault.file:
            (Path(directory) / fault.file).write_text(_patched(fault), encoding="utf-8")
        if fault.kind in HINTS:
            by = _check(fault, directory, ["--first", "--only", HINTS[fault.kind]], show)
        by = by or _check(fault, directory, ["--first"], show)
    seconds = time.monotonic() - begin
    found = "yes" if by else "no"
    return dict(zip(COLUMNS, (fault.name, fault.kind, found, by, f"{seconds:.0f}"), strict=True))


def _check(fault: Fault, directory: str, options: list[str], show: bool) -> str:
    """Return the name of the property that fails; "": all hold."""
    keys = [f"--config.{key}" for key in fault.keys.split()]
    command = [sys.executable, "-m", "lm.check", "--config", CONFIG, *keys, *options]
    environment = os.environ | {"PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "timeout"
    output = done.stdout + done.stderr
    if show:
        print(output)
    if done.returncode not in (0, 2):
        raise RuntimeError(f"{fault.name}: exit code {done.returncode}: {output[-2000:]}")
    broken = [line for line in output.splitlines() if line.startswith("BROKEN")]
    if broken:
        return broken[0][8:50].strip()
    return "refused" if done.returncode else ""


def _read(path: Path) -> dict[str, dict]:
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["fault"]: row for row in csv.DictReader(file)}


def _write(path: Path, rows: dict[str, dict]) -> None:
    order = {fault.name: i for i, fault in enumerate((*FAULTS, *CONTROLS))}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            row
            for name, row in sorted(rows.items(), key=lambda x: order.get(x[0], 0))
            if name in order
        )


def _summarize(rows: dict[str, dict]) -> None:
    """Print how many faults of each kind were found."""
    faults = {fault.name: fault for fault in FAULTS}
    measured = [row for name, row in rows.items() if name in faults]
    found = [row for row in measured if row["found"] == "yes"]
    by_kind = Counter(row["kind"] for row in found)
    for kind, n in Counter(row["kind"] for row in measured).items():
        print(f"{kind:<28} {by_kind[kind]} of {n}")
    print(f"found {len(found)} of {len(measured)}; not measured: {len(faults) - len(measured)}")
    controls = {fault.name for fault in CONTROLS}
    accused = [name for name in rows if name in controls and rows[name]["found"] == "yes"]
    print(f"accused controls: {', '.join(accused) or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
