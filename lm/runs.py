"""List the runs in a directory: python -m lm.runs runs"""

import dataclasses
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from lm.config.values import path_argument, show
from lm.cost.units import si
from lm.huggingface.config_files import is_checkpoint
from lm.system.errors import UserError, with_exit_code
from lm.system.parser import Parser
from lm.system.text_tables import say, shortened, table
from lm.workdir.overview import Overview, are_comparable, differing_keys, read_overview, texts

HEADER = ("run", "data", "parameters", "steps", "loss", "status")
DETAILS = ("run", "at", "size", "goodput", "differs in")
NARROWEST = 9  # characters of the name of a run or a text
LONGEST = 24  # characters of a name beside keys, in a terminal


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(
        "runs",
        "List the runs in a directory: the text that each was trained on, its parameters, steps, "
        "best validation loss and status. python -m lm.compare shows runs side by side.",
    )
    add = parser.add_argument
    add(
        "directory",
        nargs="?",
        default="runs",
        type=path_argument,
        metavar="DIR",
        help="default: runs",
    )
    add(
        "--keys",
        action="store_true",
        help="also the step of the best loss, the size, the goodput (the share of time "
        "in steps), and the keys in which runs of configs of one name differ",
    )
    a = parser.parse_args(argv)
    directory = Path(a.directory)
    workdirs = sorted(
        path.parent for path in directory.glob("*/config.json") if not is_checkpoint(path.parent)
    )
    if not workdirs:
        raise UserError(f"{directory} holds no runs; give the directory in which the workdirs are")
    runs, configs, damaged = read_runs(workdirs)
    # in a file nothing is shortened
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    say(fitted([HEADER, *rows(runs), *(_damaged(path) for path in damaged)], width))
    if a.keys:
        say("")
        for line in table([DETAILS, *details(runs, configs, width)], right=[1, 2, 3]).splitlines():
            say(wrapped(line, width))
    for path, reason in damaged.items():
        say("\n" + wrapped(f"{path.name}: {reason}", width))
    if not are_comparable([run.data for run in runs if run.best[0]]):
        say(
            "\n"
            + wrapped("The losses are of different texts: compare those of equal data only.", width)
        )
    return 0


def read_runs(
    workdirs: list[Path],
) -> tuple[list[Overview], dict[str, dict[str, Any]], dict[Path, str]]:
    """Return the runs, the first config of each name, and what is wrong with each run that cannot
    be read.

    The configs of the runs have only what differs from the first of the same name: there may be
    thousands of runs.
    """
    runs: list[Overview] = []
    firsts: dict[str, dict[str, Any]] = {}
    damaged: dict[Path, str] = {}
    for path in workdirs:
        try:
            run = read_overview(path)
        except (UserError, OSError) as error:
            damaged[path] = str(error)
            continue
        first = firsts.setdefault(run.name, run.config)
        changed = {
            key: run.config.get(key, "absent") for key in differing_keys([first, run.config])
        }
        runs.append(dataclasses.replace(run, config=changed))
    return runs, firsts, damaged


def rows(runs: list[Overview]) -> list[tuple[str, ...]]:
    """Return the cells of the table, a row for each run."""
    return [
        (
            run.path.name,
            text,
            "" if run.parameters is None else f"{run.parameters:,}",
            f"{run.steps:,}",
            run.best[0],
            run.status,
        )
        for run, text in zip(runs, texts([run.data for run in runs]), strict=True)
    ]


def _damaged(path: Path) -> tuple[str, ...]:
    return path.name, *[""] * (len(HEADER) - 2), "damaged"


def details(
    runs: list[Overview], firsts: dict[str, dict[str, Any]], width: int | None
) -> list[tuple[str, ...]]:
    """Return the cells of the second table: `firsts` has the first config of each name; see
    `read_runs`.
    """
    keys: dict[str, set[str]] = {}
    for run in runs:
        keys.setdefault(run.name, set()).update(run.config)
    found: list[tuple[str, ...]] = []
    for run in runs:
        config = firsts[run.name] | run.config
        different = [f"{key}={show(config.get(key, 'absent'))}" for key in sorted(keys[run.name])]
        goodput = "" if run.goodput is None else f"{100 * run.goodput:.0f} %"
        name = run.path.name if width is None else shortened(run.path.name, LONGEST)
        found.append((name, run.best[1], si(run.size, "B"), goodput, "  ".join(different)))
    return found


def fitted(cells: list[tuple[str, ...]], width: int | None) -> str:
    """Align the table so that its lines have at most this width; None: any.

    The names of runs and texts are shortened. In a narrow terminal the columns between them and the
    status are dropped.
    """
    run, data, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    left = run + data if width is None else width - sum(others) - 2 * (len(others) + 1)
    if left < 2 * NARROWEST and len(others) > 1:
        return fitted([(*row[:2], *row[3:]) for row in cells], width)
    data = min(data, max(left // 2, left - run))
    short = [(shortened(row[0], left - data), shortened(row[1], data), *row[2:]) for row in cells]
    return table(short, right=range(2, len(others) + 1))


def wrapped(line: str, width: int | None) -> str:
    """Break a line between words; None: not."""
    if width is None:
        return line
    return textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
