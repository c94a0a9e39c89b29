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
  python -m lm.sweep --study changes_2026 --repeat "token shift"

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
        help="a published study: add a change to it (--add), or repeat one of its changes (--repeat)",
    )
    what.add_argument(
        "--replicate",
        metavar="FILE",
        help="compare a finished sweep with the numbers of a paper, as in configs/replications/",
    )
    add("--add", metavar="CHANGE", help="with --study: the name of the change")
    add(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="with --study: a config value of the change",
    )
    add("--repeat", metavar="CHANGE", help="with --study: train a change and its control again")
    add("--against", metavar="ARM", help="with --repeat: one of several that it is compared with")
    add("--cell", metavar="CELL", help="with --repeat: the cell (default: the smallest)")
    add("--seed", type=int, metavar="N", help="with --repeat: the first seed (default: random)")
    add("--pairs", type=int, metavar="N", help="with --repeat: pairs of runs (default: 10)")
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
        "--speed",
        action="store_true",
        help="after the runs, measure the speed of each variant in turn with the baseline",
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
    _check_study(arguments, parser)
    if arguments.measure and not arguments.dry_run:
        parser.error(
            "--measure belongs to --dry-run; add --dry-run, or leave out --measure to train"
        )
    if arguments.speed and arguments.replicate:
        parser.error("--speed belongs to a sweep; leave it out with --replicate")
    if arguments.speed and arguments.dry_run:
        parser.error("--speed measures finished runs; leave out --dry-run")
    if arguments.study and arguments.budget == "quick":
        parser.error("--study: the published runs have the full budget; leave out --budget")
    arguments.budget = arguments.budget or "quick"
    return arguments


def _check_study(arguments: argparse.Namespace, parser: Parser) -> None:
    """Refuse options of one kind of sweep with another kind."""
    of_repeat = {
        "--against": arguments.against,
        "--cell": arguments.cell,
        "--seed": arguments.seed,
        "--pairs": arguments.pairs,
    }
    given = [name for name, value in of_repeat.items() if value is not None]
    if arguments.study is None and (arguments.add is not None or arguments.set):
        parser.error("--add and --set belong to --study; a sweep file has its changes in variants")
    if given and arguments.repeat is None:
        parser.error(f'{given[0]} belongs to --study NAME --repeat "a change"')
    if arguments.study is None and arguments.repeat is not None:
        parser.error("--repeat belongs to --study NAME; a sweep file runs with --config")
    if arguments.repeat is not None and (arguments.add is not None or arguments.set):
        parser.error("--repeat trains a published change; leave out --add and --set")
    adds = arguments.add and arguments.set
    if arguments.study is not None and not (arguments.study and (adds or arguments.repeat)):
        parser.error(
            '--study NAME needs --add "my change" and at least one --set model.key=value, or '
            '--repeat "a change"'
        )
