"""Simulate sweeps with a known truth, and print how often the answers are wrong.

    python3 -m benchmarks.calibration --csv benchmarks/calibration/designs.csv

README.md explains the tables.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.calibration import cells
from benchmarks.calibration.procedure import Answers, Design, simulate
from benchmarks.calibration.published import (
    Cell,
    published_cells,
    variance_by_weight,
)
from lm.sweeps.tuning import CURVE, GRID, USUAL_SHAPE, VERTEX
from lm.system.errors import with_exit_code
from lm.system.files import write_text
from lm.system.text_tables import csv_table, markdown_table

FAMILY = 29  # comparisons of the published study: Holm's first step is at 0.05 / FAMILY
DIFFERENCES = (0.01, 0.015)  # nats per token
WEIGHTS = (1.0, 0.5, 1 / 3, 0.25)  # of a variant in its control; its placebos share the rest
DESIGNS = [
    Design("best rate", GRID, 5, 1, False),
    Design("vertex", VERTEX, 10, 1, False),
    Design("vertex, error counted", VERTEX, 10, 1, True),
    Design("vertex, error counted", VERTEX, 10, 4, True),
    Design("curve", CURVE, 10, 1, True),
    Design("curve", CURVE, 15, 1, True),
    Design("curve", CURVE, 15, 4, True),
    Design("curve, error not counted", CURVE, 15, 4, False),
    Design("vertex", VERTEX, 10, 1, False, n_lists=2, n_arms=6),
    Design("vertex, error counted", VERTEX, 10, 1, True, n_lists=2, n_arms=6),
    Design("vertex, error counted", VERTEX, 10, 3, True, n_lists=2, n_arms=6),
    Design("curve", CURVE, 10, 1, True, n_lists=2, n_arms=6),
    Design("curve", CURVE, 15, 3, True, n_lists=2, n_arms=6),
]
# In one cell, with few arms from which to learn the shape and the noise.
ALONE = [
    Design("vertex", VERTEX, 10, 1, False),
    Design("curve", CURVE, 15, 4, True),
    Design("curve", CURVE, 15, 1, True, n_arms=1),
    Design("curve", CURVE, 15, 4, True, n_arms=1),
    Design("curve", CURVE, 5, 1, True, n_arms=1),
]
# The first and the last length of changes_2026_survival, in its cell, with the shape that it fixes.
# Its update rules are compared with AdamW, which has no placebo there.
SURVIVAL_CELL = "Tiny Shakespeare, 0.11 M"
_of_lengths = {"n_arms": 12, "n_rates": 3, "shape": USUAL_SHAPE, "first_to_last": True}
LENGTHS = [
    Design("first length to last", CURVE, 8, 2, True, **_of_lengths),
    Design("first length to last", CURVE, 8, 1, True, n_lists=2, **_of_lengths),
]


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.calibration", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--sweeps", type=int, default=20_000, metavar="N", help="simulated sweeps per row (20000)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the unrounded numbers")
    arguments = parser.parse_args(argv)
    n_sweeps = arguments.sweeps
    rows = []
    of_study = published_cells()
    for design in DESIGNS:
        n = n_sweeps * max(1, 24 // design.n_arms // 2)
        rows.append(numbers(design, [simulate(of_study, design, n, 0)], len(of_study), n))
    print(table(rows), end="\n\n", flush=True)
    alone = [in_single_cells(of_study, design, n_sweeps) for design in ALONE]
    print(table(alone), end="\n\n", flush=True)
    (cell,) = [cell for cell in of_study if cell.name == SURVIVAL_CELL]
    lengths = [
        numbers(design, [simulate([cell, cell], design, n_sweeps, 0)], 2, n_sweeps)
        for design in LENGTHS
    ]
    print(table(lengths), end="\n\n", flush=True)
    print(over_cells(n_sweeps // 2), end="\n\n", flush=True)
    print(controls())
    if arguments.csv:
        write_text(arguments.csv, csv_table(list(rows[0]), rows + alone + lengths, digits=4))
    return 0


def in_single_cells(of_study: Sequence[Cell], design: Design, n_sweeps: int) -> dict:
    """Return the numbers of a design in one cell, on average over the cells of the study."""
    n = n_sweeps * max(1, 12 // design.n_arms) // len(of_study)
    return numbers(design, [simulate([cell], design, n, 0) for cell in of_study], 1, n)


def numbers(design: Design, found: Sequence[Answers], n_cells: int, n_sweeps: int) -> dict:
    """Return a row: how often equal arms differ, and how often different ones are found."""

    def share(level: float, difference: float = 0.0) -> float:
        return float(np.mean([np.mean(answers.p(difference) < level) for answers in found]))

    row = {
        "design": design.name,
        "lists": design.n_lists,
        "cells": n_cells,
        "arms": design.n_arms,
        "pairs": design.n_seeds,
        "controls": design.n_controls,
        "runs_per_arm": design.runs_per_arm,
        "sweeps": n_sweeps * len(found),
        "p<0.05": share(0.05),
        "p<0.05/29": share(0.05 / FAMILY),
        "p<1e-4": share(1e-4),
        "sd": float(np.sqrt(np.mean([np.var(answers.mean) for answers in found]))),
        "mean_se": float(np.sqrt(np.mean([np.mean(answers.se**2) for answers in found]))),
    }
    for difference in DIFFERENCES:
        row[f"power_{difference}"] = share(0.05, difference)
        row[f"power_{difference}_holm"] = share(0.05 / FAMILY, difference)
    return row


def table(rows: Sequence[dict]) -> str:
    """Return rows as a Markdown table."""
    header = ["final runs at", "tuned", "arms", "pairs", "controls", "runs of an arm"]
    header += ["p < 0.05", f"p < 0.05/{FAMILY}", "p < 1e-4", "sd"]
    header += [f"{difference} found" for difference in DIFFERENCES]
    lines = []
    for row in rows:
        tuned = "rate" if row["lists"] == 1 else "rate, decay"
        line = [row["design"], tuned]
        line += [f"{row[key]}" for key in ("arms", "pairs", "controls", "runs_per_arm")]
        line += [_percent(row[key]) for key in ("p<0.05", "p<0.05/29", "p<1e-4")]
        line += [f"{row['sd']:.4f}"]
        line += [_percent(row[f"power_{difference}_holm"]) for difference in DIFFERENCES]
        lines.append(line)
    return markdown_table(header, lines)


def over_cells(n_sweeps: int) -> str:
    """Return how often the intervals of a mean over cells cover the truth, with 10 pairs each."""
    rows = []
    for n_cells in (2, 4, 6):
        for tau in (0.0, 0.01):
            answers = cells.simulate(n_cells, tau, 10, n_sweeps, np.random.default_rng(2))
            covered = [_percent(float(np.mean(answers[name]))) for name in ("mean", "prediction")]
            rows.append([f"{n_cells}", f"{tau:g}", *covered])
    return markdown_table(["cells", "tau", "mean covered", "another cell covered"], rows)


def controls() -> str:
    """Return the variance of published differences by the weight of a variant in its control."""
    lines = []
    for against in ("base", "AdamW"):
        found = variance_by_weight(against, WEIGHTS)
        by_weight = ", ".join(
            f"{weight:.2g}: {x:.2f}" for weight, x in zip(WEIGHTS, found, strict=True)
        )
        lines.append(f"variance of a difference by the weight of {against}: {by_weight}")
    return "\n".join(lines)


def _percent(share: float) -> str:
    """Format a share in percent, with two significant digits below 10 %.

    >>> _percent(0.0025), _percent(0.5)
    ('0.25 %', '50 %')
    """
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


if __name__ == "__main__":
    sys.exit(main())
