"""Test many pairs of a placebo and its baseline: docs/results/placebo/*.csv.

    python3 -m benchmarks.placebo                              # write the table of docs/results/placebo.md
    python3 -m benchmarks.placebo --add WORKDIR --name NAME    # first save the final runs of a sweep as NAME.csv

The pairs are also read as blocks of 5, each a small sweep: with correct p-values 5 % of the blocks
have p < 0.05.
"""

import argparse
import sys
from pathlib import Path

from scipy import stats

from benchmarks.page import fill, rows_of
from lm.sweeps import statistics
from lm.sweeps.analysis import OVER_CELLS, PLACEBO
from lm.sweeps.figures import nats
from lm.sweeps.report import format_p, to_csv
from lm.sweeps.results import read_runs
from lm.system.errors import UserError, with_exit_code
from lm.system.text_tables import markdown_table

RELABELED = "relabeled"  # the placebo
COLUMNS = ("phase", "variant", "learning_rate", "seed", "steps", "val_loss", "test_loss")
BLOCK = 5  # pairs


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.placebo", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path("docs/results"), help="(docs/results)"
    )
    parser.add_argument(
        "--add", metavar="WORKDIR", type=Path, help=f"a sweep of a baseline and {RELABELED!r}"
    )
    parser.add_argument("--name", help="of the new file, without .csv")
    arguments = parser.parse_args(argv)
    if bool(arguments.add) != bool(arguments.name):
        parser.error("--add WORKDIR and --name NAME belong together")
    if arguments.add:
        add(arguments.add, arguments.directory / "placebo" / f"{arguments.name}.csv")
    written = "written by python3 -m benchmarks.placebo"
    fill(arguments.directory / "placebo.md", written, f"\n{table(arguments.directory)}\n")
    return 0


def add(workdir: Path, path: Path) -> None:
    """Save the final runs of a sweep."""
    runs = [
        {**run.row(), "learning_rate": run.point["optimizer.learning_rate"]}
        for run in read_runs(workdir)
    ]
    rows = [{key: run[key] for key in COLUMNS} for run in runs if run["phase"] == "final"]
    rows.sort(key=lambda row: (row["variant"], row["seed"]))
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_csv(rows), encoding="utf-8")


def differences(path: Path) -> list[float]:
    """Return the placebo's loss minus the baseline's, for each seed that both finished."""
    losses = {True: {}, False: {}}
    for row in (row for row in rows_of(path) if row["test_loss"]):
        losses[row["variant"] == RELABELED][int(row["seed"])] = float(row["test_loss"])
    return [
        losses[True][seed] - losses[False][seed]
        for seed in sorted(losses[True].keys() & losses[False].keys())
    ]


def table(directory: Path) -> str:
    """Return a row for each file, and one for each placebo in each cell of a published page."""
    rows = []
    for path in sorted((directory / "placebo").glob("*.csv")):
        of_sweep = differences(path)
        if len(of_sweep) < BLOCK:
            raise UserError(
                f"{path} has {len(of_sweep)} pairs; {BLOCK} are needed: finish the sweep, then --add "
                "it again"
            )
        blocks = [
            statistics.estimate(of_sweep[i : i + BLOCK]).p
            for i in range(0, len(of_sweep) - BLOCK + 1, BLOCK)
        ]
        wrong = sum(p < 1 - statistics.LEVEL for p in blocks)
        low, high = stats.binomtest(wrong, len(blocks)).proportion_ci()
        e = statistics.estimate(of_sweep)
        share = f"{wrong} of {len(blocks)} ({100 * low:.1f} to {100 * high:.1f} %)"
        rows.append(
            [f"[{path.stem}](placebo/{path.name})", *_cells(e.n, e.mean, *e.interval(), e.p), share]
        )
    for path in sorted(directory.glob("*/claims.csv")):
        page = path.parent.name
        if "+" in page:  # an addition has the placebos of its study
            continue
        for row in rows_of(path):
            if row["kind"] == PLACEBO and row["cell"] not in OVER_CELLS:
                numbers = [float(row[key]) for key in ("mean", "low", "high", "p")]
                name = ", ".join(
                    filter(None, [f"[{page}]({page}.md)", row["variant"], row["cell"]])
                )
                rows.append([name, *_cells(row["n"], *numbers), "–"])
    header = [
        "runs",
        "pairs",
        "difference [95 % interval]",
        "p",
        f"blocks of {BLOCK} with p < 0.05",
    ]
    return markdown_table(header, rows)


def _cells(n, mean: float, low: float, high: float, p: float) -> list[str]:
    return [str(n), f"{nats(mean)} [{nats(low)}, {nats(high)}]", format_p(p)]


if __name__ == "__main__":
    sys.exit(main())
