"""Compare runs: python -m lm.compare runs/a runs/b"""

import os
import sys
from pathlib import Path

from lm.config.values import path_argument, show
from lm.system.errors import UserError, with_exit_code
from lm.system.files import check_output, write_bytes
from lm.system.parser import Parser
from lm.system.text_tables import for_terminal, say, table
from lm.workdir.overview import Overview, are_comparable, differing_keys, read_overview, texts


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(
        "compare",
        "Compare runs: the keys in which their configs differ, their losses, their curves in a "
        "picture.",
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=path_argument,
        metavar="RUN",
        help="directories of runs, at least two",
    )
    add(
        "--output",
        type=path_argument,
        metavar="FILE",
        help="picture (default: compare.png beside the first run)",
    )
    a = parser.parse_args(argv)
    if len({os.path.realpath(run) for run in a.runs}) < max(2, len(a.runs)):
        raise UserError(
            "give at least two different runs, such as runs/a runs/b; python -m lm.runs lists them"
        )
    output = Path(a.output or os.path.normpath(f"{a.runs[0]}/../compare.png"))
    check_output(output, "--output", ".png", ".pdf", ".svg")
    runs = [read_overview(Path(run)) for run in a.runs]
    say(table(rows(runs), right=range(1, len(runs) + 1)))
    of_text = [""] * len(runs)
    title = ""
    if not are_comparable([run.data for run in runs]):
        title = "losses are of different texts"
        of_text = [f" ({text})" for text in texts([run.data for run in runs])]
        say(f"\n{title}, and cannot be compared")
    from lm.training.loss_curve import loss_curves, to_png  # imports matplotlib

    names = [for_terminal(f"{run.path}{text}") for run, text in zip(runs, of_text, strict=True)]
    curves = {name: run.metrics for name, run in zip(names, runs, strict=True)}
    write_bytes(output, to_png(loss_curves(curves, title)))
    say(f"\ncurves: {output}")
    return 0


def rows(runs: list[Overview]) -> list[tuple[str, ...]]:
    """Return the cells of the table, a column for each run; the first rows are the keys that
    differ, and the texts.
    """
    keys = differing_keys([run.config for run in runs])
    best, steps = zip(*(run.best for run in runs), strict=True)
    of_texts = texts([run.data for run in runs])
    different = "" if are_comparable([run.data for run in runs]) else ", of different texts"
    return [
        ("", *(str(run.path) for run in runs)),
        *(
            (f"config.{key}", *(show(run.config.get(key, "absent")) for run in runs))
            for key in keys
        ),
        *([("data", *of_texts)] if len(set(of_texts)) > 1 else []),
        ("status", *(run.status for run in runs)),
        ("steps", *(f"{run.steps:,}" for run in runs)),
        (f"best validation loss{different}", *best),
        ("at step", *steps),
    ]


if __name__ == "__main__":
    sys.exit(main())
