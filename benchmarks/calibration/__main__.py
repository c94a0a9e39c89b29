"""Simulate sweeps with a known truth, and print how often the answers are wrong.

    python3 -m benchmarks.calibration

README.md has the tables.
"""

import argparse
import sys

import numpy as np

from benchmarks.calibration import cells, designs
from lm.system.errors import with_exit_code
from lm.system.text_tables import markdown_table

LEVELS = (0.05, 0.005, 1e-4)
BELOW = [f"p < {level:g}" for level in LEVELS]
DIFFERENCES = (0.01, 0.02)  # nats per token


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.calibration", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--sweeps", type=int, default=400_000, metavar="N", help="simulated sweeps per row (400000)"
    )
    n_sweeps = parser.parse_args(argv).sweeps
    for table in (false_positives(n_sweeps), power(n_sweeps // 10), over_cells(n_sweeps // 40)):
        print(table, end="\n\n", flush=True)
    return 0


def false_positives(n_sweeps: int) -> str:
    """Return the share of sweeps in which equal variants differ, at several levels."""
    rows = []
    for rule, n_tuning in designs.RULES.items():
        for apart in (None, 0.5):
            n = n_sweeps
            pairs = (5, 8, 10, 20)
            if "2 lists" in rule:  # takes ten times as long
                n = n_sweeps // 10
                pairs = (10,)
            elif n_tuning > 2:
                pairs = (20,)
            optima = "anywhere" if apart is None else f"{apart:g} steps apart"
            for n_seeds in pairs:
                p = designs.p_values(rule, n_seeds, 0.0, apart, n, np.random.default_rng(0))
                rows.append([rule, optima, f"{n_seeds}", *(_share(p < level) for level in LEVELS)])
    return markdown_table(["final runs at", "optima", "pairs", *BELOW], rows)


def power(n_sweeps: int) -> str:
    """Return how often a true difference is found, alone and as the first of six under Holm."""
    rows = []
    for n_seeds in (5, 8, 10, 16):
        for difference in DIFFERENCES:
            draw = np.random.default_rng(1)
            p = designs.p_values("vertex", n_seeds, difference, None, n_sweeps, draw)
            rows.append([f"{n_seeds}", f"{difference:g}", _share(p < 0.05), _share(p < 0.05 / 6)])
    return markdown_table(["pairs", "true difference", "p < 0.05", "p < 0.05 / 6"], rows)


def over_cells(n_sweeps: int) -> str:
    """Return the errors of the mean over cells with 10 pairs each."""
    rows = []
    for n_cells in (2, 4, 6):
        for tau in (0.0, 0.01):
            answers = cells.simulate(n_cells, tau, 10, n_sweeps, np.random.default_rng(2))
            wrong = ["–"] * len(LEVELS)
            if not tau:
                wrong = [_share(answers["p"] < level) for level in LEVELS]
            covered = [_share(answers[name]) for name in ("mean", "prediction")]
            rows.append([f"{n_cells}", f"{tau:g}", *wrong, *covered])
    header = ["cells", "tau", *BELOW, "mean covered", "another cell covered"]
    return markdown_table(header, rows)


def _share(is_so: np.ndarray) -> str:
    """Format a share in percent, with two significant digits below 10 %.

    >>> _share(np.array([True] * 1 + [False] * 399)), _share(np.array([True, False]))
    ('0.25 %', '50 %')
    """
    percent = 100 * float(np.mean(is_so))
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


if __name__ == "__main__":
    sys.exit(main())
