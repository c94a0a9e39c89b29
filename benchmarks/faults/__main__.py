"""Run the campaign: python -m benchmarks.faults --rounds 2 --publish"""

import argparse
import collections
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import faults
from benchmarks.faults import caches, configs, disks, inputs, kills, processes, sweeps, workdirs
from benchmarks.faults.judge import VERDICTS, Trial
from benchmarks.faults.runs import ROOT, Bench
from lm.text import markdown_table

PAGE = ROOT / "docs" / "reliability.md"

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
    "sample": ("each file of a workdir damaged in six ways, then `lm.sample`", workdirs.damaged_for_sampling),
    "hostile": ("links, pipes and other entries in a workdir", workdirs.hostile_entries),
    "token_cache": ("each file of a token cache damaged in six ways", caches.damaged_tokens),
    "program_cache": ("a cached program of JAX damaged", caches.damaged_programs),
    "full_disk": ("a disk that is full or read-only", disks.full),
    "configs": ("random values of config keys", configs.random_values),
    "config_files": ("config files with random changes", configs.random_files),
    "texts": ("random bytes as a text", inputs.random_texts),
    "shards": ("each file of a folder of token shards damaged in six ways", inputs.damaged_shards),
    "tokenizers": ("a tokenizer.json with random changes", inputs.random_tokenizers),
    "sweep_files": ("each file of a sweep damaged in six ways", sweeps.damaged_files),
    "sweep_kill": ("a sweep killed at random moments", sweeps.killed),
    "processes": ("processes that share a workdir or a cache", processes.sharing),
}


def main() -> int:
    a = parse_arguments()
    counts, reasons = {kind: collections.Counter() for kind in a.kinds}, []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        bench = Bench(Path(directory))
        for number in range(a.rounds):
            for kind in a.kinds:
                trials = KINDS[kind][1](bench, random.Random(f"{a.seed + number} {kind}"))
                for trial in trials:
                    counts[kind][trial.verdict] += 1
                    if trial.verdict != "survived":
                        reasons.append(f"{kind}: {trial.fault}: {trial.verdict}: {trial.reason}")
                        print(reasons[-1].replace(directory, "BASE"), flush=True)
                print(f"round {number}: {kind}: {dict(counts[kind])}, {time.monotonic() - began:.0f} s", flush=True)
    print(table(counts))
    if a.publish:
        publish(table(counts))
    return int(any(count["silent"] or count["traceback"] or count["lost"] for count in counts.values()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=faults.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="how often to inject all kinds of faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; decides random faults (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--publish", action="store_true", help="write the table into docs/reliability.md")
    return parser.parse_args()


def table(counts: dict[str, collections.Counter]) -> str:
    """Return the counts as a Markdown table, with a last row of totals."""
    rows = [
        [KINDS[kind][0], f"{found.total():,}", *(f"{found[verdict]:,}" for verdict in VERDICTS)]
        for kind, found in counts.items()
        if found.total()
    ]
    total = sum(counts.values(), collections.Counter())
    rows.append(["all", f"{total.total():,}", *(f"{total[verdict]:,}" for verdict in VERDICTS)])
    return markdown_table(["fault", "tried", *VERDICTS], rows)


def publish(text: str) -> None:
    """Write the table between the marks of docs/reliability.md."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(r"(<!-- faults -->\n).*?(<!-- end -->)", lambda m: m[1] + text + "\n" + m[2], page, flags=re.S)
    )


if __name__ == "__main__":
    sys.exit(main())
