"""Write the report of a sweep: python -m lm.report sweeps/swiglu_vs_silu-full"""

import argparse
import shlex
import sys
from pathlib import Path

import jinja2

from lm.sweeps.analysis import Analysis, analyze
from lm.sweeps.record import read_failures, read_record, without_cells
from lm.sweeps.results import RUNS, choices_of, final_runs, read_runs
from lm.sweeps.speed import read_speeds
from lm.system.errors import UserError, first_line, with_exit_code
from lm.system.parser import Parser
from lm.system.text_tables import say

DESCRIPTION = """\
Write the report of a sweep into its directory: report.html (one self-contained page), report.md with figures/,
claims.csv, runs.csv and report.json. Given a published page's folder (docs/results/NAME), write that page again from
its sweep.json and runs.csv. docs/sweeps.md explains how to read it.
"""


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parse_arguments(argv)
    try:
        return report(arguments)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        jinja2.TemplateError,
    ) as error:
        # A checksum protects the files from damage, and not from a stranger who computes it again.
        raise UserError(
            f"the files of {arguments.sweep} make no sense: {first_line(error)}; restore them"
        ) from error


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        "report", DESCRIPTION, "example:\n  python -m lm.report sweeps/swiglu_vs_silu-quick"
    )
    parser.add_argument(
        "sweep",
        metavar="SWEEP_DIR",
        type=Path,
        help="the directory that python -m lm.sweep printed",
    )
    parser.add_argument(
        "--publish",
        metavar="DIR",
        type=Path,
        help="also write the page NAME.md and NAME/ with its tables and figures into DIR (docs/results); needs the "
        "full budget, and leaves out cells that are not finished",
    )
    return parser.parse_args(argv)


def report(arguments: argparse.Namespace) -> int:
    """Write the report, publish it if asked to, and return the exit code."""
    from lm.sweeps.report import publish, read_page, write_page, write_report  # imports matplotlib

    directory = arguments.sweep.resolve()
    if (directory / "runs.csv").is_file() and not (
        directory / RUNS
    ).exists():  # the folder of a published page
        if arguments.publish:
            raise UserError(f"{directory} is published already; leave out --publish")
        say(str(write_page(read_page(directory), directory.parent)))
        return 0
    a = read_finished(directory)
    say("\n".join(map(str, write_report(a, directory))))
    if arguments.publish:
        say(str(publish(a, arguments.publish, read_speeds(directory))))
    return 0


def read_finished(directory: Path) -> Analysis:
    """Analyze the finished cells of the sweep of a directory.

    Raises:
        UserError: the directory holds no sweep, or every cell lacks runs that did not fail.
    """
    record = read_record(directory)
    runs = read_runs(directory)
    failed = read_failures(directory)
    choices = choices_of(record, runs, failed)
    lacking = {
        name: about["cell"]
        for name, about in record["variants"].items()
        if len(final_runs(record, runs, name, choices[name].point)) < len(about["seeds"])
    }
    # others were trained since
    failed = {name: error for name, error in failed.items() if name in lacking}
    unfinished = {name: cell for name, cell in lacking.items() if name not in failed}
    left = [cell for cell in record["cells"] if cell in unfinished.values()]
    if left == record["cells"]:
        command = shlex.join(["python", "-m", "lm.sweep", *record["starts"][-1]["argv"][1:]])
        raise UserError(
            f"{directory} is not finished: {', '.join(unfinished)} lack runs; resume with {command}"
        )
    record = without_cells(record, left)
    if failed.keys() >= record["variants"].keys():
        raise UserError(
            f"{directory}: every variant has runs that failed ({'; '.join(failed.values())})"
        )
    return analyze(record, runs, failed)


if __name__ == "__main__":
    sys.exit(main())
