"""List the runs in a directory: python -m lm.runs runs"""

import argparse
import collections
import contextlib
import sys
from pathlib import Path

from lm.config import flatten
from lm.config.values import path_argument, show
from lm.cost.units import si
from lm.errors import UserError, with_exit_code
from lm.files import files_below, read_json
from lm.text_tables import table
from lm.workdir.metrics import best_step, read_metrics, validation_losses
from lm.workdir.saved_run import SavedRun, read_run

HEADER = ("run", "status", "steps", "best", "at", "size", "differs in")


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.runs",
        description="List the runs in a directory: their status, steps, best validation loss and its step, size, and "
        "the keys in which they differ from most of the others.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", nargs="?", default="runs", type=path_argument, metavar="DIR", help="default: runs")
    directory = Path(parser.parse_args(argv).directory)
    found = sorted(path.parent for path in directory.glob("*/config.json"))
    if not found:
        raise UserError(f"{directory} holds no runs; give the directory in which the workdirs are")
    print(table([HEADER, *rows(found)], right=[2, 3, 4, 5]))
    return 0


def rows(workdirs: list[Path]) -> list[tuple[str, ...]]:
    """Return the cells of the table, a row for each run; a run that cannot be read says why."""
    runs: dict[Path, tuple[SavedRun, list[dict]] | str] = {}
    for path in workdirs:
        try:
            run = read_run(path)
            metrics = path / "metrics.jsonl"
            runs[path] = run, read_metrics(metrics) if metrics.exists() else []
        except (UserError, OSError) as error:
            runs[path] = str(error)
    configs = {path: flatten(found[0].config) for path, found in runs.items() if not isinstance(found, str)}
    usual = _most_common(list(configs.values()))
    return [
        (path.name, *[""] * 5, found) if isinstance(found, str) else _row(path, *found, configs[path], usual)
        for path, found in runs.items()
    ]


def _row(path: Path, run, lines: list[dict], config: dict, usual: dict) -> tuple[str, ...]:
    losses, status = validation_losses(lines), "not finished"
    with contextlib.suppress(OSError, UserError):
        status = read_json(path / "summary.json", {"status": str})["status"]
    best = best_step(losses, losses)
    steps = max((line["step"] for line in lines), default=0)
    size = sum(file.stat().st_size for file in files_below(path) if file.exists())
    keys = [key for key in sorted(config) if key not in ("name", "notes") and config[key] != usual.get(key)]
    return (
        path.name,
        status,
        f"{steps:,}",
        "" if best is None else f"{losses[best]:.4f}",
        "" if best is None else f"{best:,}",
        si(size, "B"),
        "  ".join(f"{key}={show(config[key])}" for key in keys),
    )


def _most_common(configs: list[dict]) -> dict:
    """Return the most common value of each key.

    >>> _most_common([{"train.seed": 1, "model.d_ff": None}, {"train.seed": 1, "model.d_ff": 64}, {"train.seed": 2}])
    {'model.d_ff': None, 'train.seed': 1}
    """
    keys = sorted({key for config in configs for key in config})
    values = {key: [repr(config[key]) for config in configs if key in config] for key in keys}
    common = {key: collections.Counter(found).most_common(1)[0][0] for key, found in values.items()}
    return {key: next(c[key] for c in configs if key in c and repr(c[key]) == common[key]) for key in keys}


if __name__ == "__main__":
    sys.exit(main())
