"""List the runs in a directory: python -m lm.runs runs"""

import sys
from pathlib import Path

from lm.config.values import path_argument, show
from lm.cost.units import si
from lm.errors import UserError, with_exit_code
from lm.huggingface.config_files import is_checkpoint
from lm.parser import Parser
from lm.text_tables import table
from lm.workdir.overview import Overview, differing_keys, read_overview

HEADER = ("run", "status", "steps", "best", "at", "size", "goodput", "differs in")


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(
        "runs",
        "List the runs in a directory: their status, steps, best validation loss and its step, size, "
        "goodput (the share of its time in steps), and the keys in which they differ. python -m lm.compare shows two "
        "side by side.",
    )
    parser.add_argument("directory", nargs="?", default="runs", type=path_argument, metavar="DIR", help="default: runs")
    directory = Path(parser.parse_args(argv).directory)
    found = sorted(path.parent for path in directory.glob("*/config.json") if not is_checkpoint(path.parent))
    if not found:
        raise UserError(f"{directory} holds no runs; give the directory in which the workdirs are")
    print(table([HEADER, *rows(found)], right=[2, 3, 4, 5, 6]))
    return 0


def rows(workdirs: list[Path]) -> list[tuple[str, ...]]:
    """Return the cells of the table, a row for each run; a run that cannot be read says why."""
    runs: dict[Path, Overview | str] = {}
    for path in workdirs:
        try:
            runs[path] = read_overview(path)
        except (UserError, OSError) as error:
            runs[path] = str(error)
    keys = differing_keys([run.config for run in runs.values() if isinstance(run, Overview)])
    return [_row(run, keys) if isinstance(run, Overview) else (path.name, *[""] * 6, run) for path, run in runs.items()]


def _row(run: Overview, keys: list[str]) -> tuple[str, ...]:
    different = [f"{key}={show(run.config[key])}" for key in keys if key in run.config]
    goodput = "" if run.goodput is None else f"{100 * run.goodput:.0f} %"
    return run.path.name, run.status, f"{run.steps:,}", *run.best, si(run.size, "B"), goodput, "  ".join(different)


if __name__ == "__main__":
    sys.exit(main())
