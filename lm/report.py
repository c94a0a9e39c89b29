"""Write the report of a sweep: python -m lm.report sweeps/swiglu_vs_silu-full"""

import argparse
import sys
from pathlib import Path

from lm.errors import with_exit_code
from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.report.pages import check_publishable, publish, write_report

DESCRIPTION = """\
Write the report of a sweep into its directory: report.html (one self-contained page), report.md with figures/,
variants.csv, runs.csv and claims.csv. docs/reports.md explains how to read it.
"""


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return report(parse_arguments(argv))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lm.report",
        description=DESCRIPTION,
        epilog="example:\n  python -m lm.report sweeps/swiglu_vs_silu-quick",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweep", metavar="SWEEP_DIR", type=Path, help="the directory that python -m lm.sweep printed")
    parser.add_argument(
        "--publish",
        metavar="DIR",
        type=Path,
        help="also copy the Markdown, the figures, runs.csv and claims.csv to DIR (docs/results); needs a complete "
        "full budget",
    )
    return parser.parse_args(argv)


def report(arguments: argparse.Namespace) -> int:
    """Write the report, publish it if asked to, and return the exit code."""
    analysis = analyze(arguments.sweep)
    if arguments.publish:
        check_publishable(analysis)
    write_report(analysis, arguments.sweep)
    if arguments.publish:
        publish(analysis, arguments.sweep, arguments.publish)
    return 0


if __name__ == "__main__":
    sys.exit(main())
