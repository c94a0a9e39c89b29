"""The command line of python -m lm.sweep."""

import argparse

from lm.config.schema import PLATFORMS
from lm.system.parser import Parser

BUDGETS = ("quick", "full")  # the names that a sweep file may use
DESCRIPTION = """\
Train the variants of an ablation: tune the learning rate of each variant, then train it with fresh seeds at the tuned
rate. python -m lm.report writes the tables and figures.
"""
EPILOG = """\
examples:
  python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --dry-run --measure
  python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget quick
  python -m lm.report sweeps/swiglu_vs_silu-quick
  python -m lm.sweep --study changes_2026 --add ReGLU --set model.activation=relu

Rerun the same command to resume after an interruption. Several processes that run the same command divide the runs
among them, on one machine or on several of one kind that share the directory.

budgets: "quick" checks that the sweep works and supports no conclusions; "full" does.

exit codes: 0 finished; 1 some runs or a disk failed: rerun to try again; 2 invalid arguments or sweep file;
130 (Ctrl-C) or 143 (SIGTERM): stopped, rerun to resume.
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments (None: those of this process); argparse exits on a mistake."""
    parser = Parser("sweep", DESCRIPTION, EPILOG)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE", help="a sweep file, as in configs/sweeps/")
    what.add_argument(
        "--study",
        metavar="NAME",
        help="a published study: train the change of --add, and compare it with the baseline",
    )
    add("--add", metavar="CHANGE", help="with --study: the name of the change")
    add(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="with --study: a config value of the change",
    )
    add(
        "--budget",
        choices=BUDGETS,
        help=("a budget of the file (default: quick; with --study always full)"),
    )
    add("--workdir", metavar="DIR", help="the sweep's directory (default: sweeps/NAME-BUDGET)")
    add(
        "--dry-run",
        action="store_true",
        help=("print the variants, the runs and their FLOPs, and stop"),
    )
    add(
        "--measure",
        action="store_true",
        help=("with --dry-run: also trace the variants, and estimate the time"),
    )
    add(
        "--together",
        type=int,
        metavar="N",
        help=(
            "runs vectorized on each device (default: as many as fit in its memory, and 1 on a CPU)"
        ),
    )
    add(
        "--platform",
        choices=PLATFORMS,
        help=("required kind of device; stop if JAX finds none (default: any)"),
    )
    arguments = parser.parse_args(argv)
    if arguments.study is None and (arguments.add is not None or arguments.set):
        parser.error("--add and --set belong to --study; a sweep file has its changes in variants")
    if arguments.study is not None and not (arguments.study and arguments.add and arguments.set):
        parser.error('--study NAME needs --add "my change" and at least one --set model.key=value')
    if arguments.measure and not arguments.dry_run:
        parser.error(
            "--measure belongs to --dry-run; add --dry-run, or leave out --measure to train"
        )
    if arguments.study and arguments.budget == "quick":
        parser.error("--study: the published runs have the full budget; leave out --budget")
    arguments.budget = arguments.budget or "quick"
    return arguments
