"""Run the campaign: python -m benchmarks.faults --rounds 2 --publish"""

import argparse
import collections
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import faults
from benchmarks.faults import (
    caches,
    configs,
    disks,
    inputs,
    kills,
    mirrors,
    processes,
    sweeps,
    workdirs,
)
from benchmarks.faults.judge import VERDICTS, Trial
from benchmarks.faults.runs import ROOT, Bench
from benchmarks.page import fill
from lm.system.text_tables import markdown_table

PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"

# What is injected: its description in the table, and a function that injects and judges.
KINDS: dict[str, tuple[str, Callable[[Bench, random.Random], Iterator[Trial]]]] = {
    "kill_new": (
        "a new run killed before each operation on a file, and at random moments",
        kills.before_each_operation,
    ),
    "kill_resumed": ("a resumed run killed likewise", kills.before_each_operation_after_resuming),
    "sigkill": ("a run killed by SIGKILL in a process of its own", kills.at_random_moments),
    "files": ("each file of a workdir damaged in six ways", workdirs.damaged_files),
    "directories": ("each directory of a workdir deleted or emptied", workdirs.damaged_directories),
    "generate": (
        "each file of a workdir damaged in six ways, then `lm.generate`",
        workdirs.damaged_for_generation,
    ),
    "hostile": ("links, pipes and other entries in a workdir", workdirs.hostile_entries),
    "mirror_files": (
        "each file of a mirror damaged in six ways, then an empty workdir",
        mirrors.damaged,
    ),
    "mirror_kill": (
        "a run killed by SIGKILL, and its workdir deleted, with a mirror",
        mirrors.killed,
    ),
    "token_cache": ("each file of a token cache damaged in six ways", caches.damaged_tokens),
    "program_cache": ("a cached program of JAX damaged", caches.damaged_programs),
    "full_disk": ("a disk that is full or read-only", disks.full),
    "configs": ("random values of config keys", configs.random_values),
    "config_files": ("config files with random changes", configs.random_files),
    "texts": ("random bytes as a text", inputs.random_texts),
    "shards": ("each file of a folder of token shards damaged in six ways", inputs.damaged_shards),
    "tokenizers": ("a tokenizer.json with random changes", inputs.random_tokenizers),
    "sweep_report": (
        "each file of a sweep damaged in six ways, then its report",
        sweeps.damaged_for_report,
    ),
    "sweep_files": (
        "each file of a sweep damaged in one of six ways, then rerun",
        sweeps.damaged_files,
    ),
    "sweep_kill": ("a sweep killed at random moments", sweeps.killed),
    "processes": ("processes that share a workdir or a cache", processes.sharing),
}


def main() -> int:
    a = parse_arguments()
    counts = {kind: collections.Counter() for kind in a.kinds}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        bench = Bench(Path(directory))
        for kind, number in itertools.product(a.kinds, range(a.seed, a.seed + a.rounds)):
            trials = KINDS[kind][1](bench, random.Random(f"{number} {kind}"))
            for trial in itertools.islice(trials, a.limit):
                counts[kind][trial.verdict] += 1
                if trial.verdict != "survived":
                    text = f"{kind}: {trial.fault}: {trial.verdict}: {trial.reason}"
                    print(text.replace(directory, "BASE"), flush=True)
            print(
                f"round {number}: {kind}: {dict(counts[kind])}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            if a.publish:
                publish({kind: counts[kind]})
    print(table(counts))
    return int(any(count.total() > count["survived"] for count in counts.values()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=faults.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="number of times to inject all faults (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the first round (%(default)s)"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="inject at most N faults of each kind in each round"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        metavar="KIND",
        help=", ".join(KINDS),
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="replace the rows of these kinds in the table of docs/reliability.md",
    )
    return parser.parse_args()


def table(counts: dict[str, collections.Counter]) -> str:
    """Return the counts as a Markdown table, with a last row of totals."""
    rows = {kind: counts[kind] for kind in KINDS if kind in counts and counts[kind].total()}
    cells = [[KINDS[kind][0], *_numbers(counter)] for kind, counter in rows.items()]
    total = sum(rows.values(), collections.Counter())
    return markdown_table(["fault", "tried", *VERDICTS], [*cells, ["all", *_numbers(total)]])


def _numbers(counter: collections.Counter) -> list[str]:
    return [f"{n:,}" for n in (counter.total(), *(counter[verdict] for verdict in VERDICTS))]


def publish(counts: dict[str, collections.Counter]) -> None:
    """Replace the rows of these kinds in benchmarks/results/faults.json and docs/reliability.md."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows |= {
        kind: {verdict: counter[verdict] for verdict in VERDICTS}
        for kind, counter in counts.items()
    }
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    text = table({kind: collections.Counter(counter) for kind, counter in rows.items()})
    fill(PAGE, "faults", text)


if __name__ == "__main__":
    sys.exit(main())
