"""Time the training of a config to the loss of a track, and log the result beside the config.

    python3 -m benchmarks.speedrun --track nanogpt-cpu --config benchmarks/speedrun/records/NAME/config.py --tune
    python3 -m benchmarks.speedrun --track nanogpt-cpu --config benchmarks/speedrun/records/NAME/config.py --runs 5

With --tune, trains on Python's documentation and appends the results to tuning.json. Without it, trains on Tiny
Shakespeare and appends them to log.json. README.md has the rules.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import machine, use_cores
from benchmarks.speedrun import records, table, tracks
from benchmarks.speedrun.runs import train_and_score
from lm.errors import with_exit_code
from lm.workdir.provenance import format_command


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return speedrun(*parse_arguments(argv))


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments, and the changes of the config, each "train.steps=20"."""
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.speedrun", description=__doc__.split("\n")[0],
        epilog="with --tune, --config.KEY=VALUE changes a value of the config",
    )  # fmt: skip
    add = parser.add_argument
    add("--track", required=True, choices=list(tracks.TRACKS))
    add("--config", required=True, metavar="FILE", help="the config of the record")
    add("--runs", type=int, metavar="N", help="number of runs, with seeds 0 to N - 1 (5; with --tune 1)")
    add("--text", type=Path, metavar="PATH", help="Tiny Shakespeare's input.txt (by default that of TFDS)")
    add("--tune", action="store_true", help="train and score on Python's documentation")
    add("--caveat", metavar="TEXT", help="why the result is not a record, for a reason that the command cannot check")
    add("--log", type=Path, metavar="PATH", help="log to append to (log.json, or tuning.json, beside the config)")
    a, rest = parser.parse_known_args(argv)
    if unknown := [word for word in rest if not word.startswith("--config.")]:
        parser.error(f"unknown argument {unknown[0]}")
    if rest and not a.tune:
        parser.error(f"{rest[0]}: only --tune accepts changes of the config; change the file, or add --tune")
    if a.runs is None:
        a.runs = 1 if a.tune else 5
    if a.runs < 1:
        parser.error(f"--runs must be at least 1, not {a.runs}")
    return a, [word.removeprefix("--config.") for word in rest]


def speedrun(a: argparse.Namespace, overrides: list[str]) -> int:
    """Run all seeds, append the result to the log and print it; return the exit code."""
    config = tracks.load_config(a.config, overrides)
    text = tracks.tuning_text() if a.tune else tracks.scored_text(a.text)
    use_cores(tracks.CORES)
    attempt = {
        "track": a.track, "command": format_command("benchmarks.speedrun", sys.argv[1:]),
        "text": tracks.sha256(text), "config": tracks.describe(config), "overrides": overrides, "caveat": a.caveat,
        "machine": machine(), "runs": [],
    }  # fmt: skip
    log = a.log or Path(a.config).parent / ("tuning.json" if a.tune else "log.json")
    try:
        for seed in range(a.runs):
            with tempfile.TemporaryDirectory() as directory:
                run = train_and_score(str(Path(a.config).resolve()), overrides, text, seed, Path(directory))
            attempt["runs"].append(run)
            print("seed {seed}: loss {loss:.4f}, {cpu:.1f} CPU s, {wall:.1f} s, load {load}".format(**run), flush=True)
    finally:  # a log has every attempt, also one with a run that failed
        if attempt["runs"]:
            records.append_attempt(log, attempt)
    print("mean loss {:.4f}, {:.1f} CPU s, {:.1f} s".format(*(
        statistics.mean(records.column(attempt, key)) for key in ("loss", "cpu", "wall"))))  # fmt: skip
    if not a.tune:
        found = list(records.problems(attempt, records.read_attempts(Path(a.config).parent / "tuning.json")))
        print(f"not a record: {'; '.join(found)}" if found else "a record")
        table.update()
    return 0


if __name__ == "__main__":
    sys.exit(main())
