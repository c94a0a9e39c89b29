"""Simulate sweeps with a known truth: how often the intervals of a report cover it, and how precise the estimates are.

    python3 -m benchmarks.calibration            # all simulations
    python3 -m benchmarks.calibration rates      # one of them

Each simulation is a module of this directory. docs/calibration.md has the tables and explains them.
"""

import argparse
import sys

from benchmarks.calibration import answers, exponents, looks, moderated_looks, moderation, rates, search, sizes, texts
from lm.errors import UserError, with_exit_code

SIMULATIONS = {
    "rates": rates.simulate,
    "search": search.simulate,
    "moderation": moderation.simulate,
    "texts": texts.simulate,
    "looks": looks.simulate,
    "moderated_looks": moderated_looks.simulate,
    "answers": answers.simulate,
    "sizes": sizes.simulate,
    "exponents": exponents.simulate,
}


@with_exit_code
def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.calibration", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SIMULATIONS))
    parser.add_argument("--sweeps", type=int, default=4000, metavar="N", help="simulated sweeps per row (4000)")
    arguments = parser.parse_args()
    return simulate(arguments.names or list(SIMULATIONS), arguments.sweeps)


def simulate(names: list[str], n_sweeps: int) -> int:
    """Print the table of each simulation."""
    if unknown := [name for name in names if name not in SIMULATIONS]:
        raise UserError(f"unknown simulation {unknown[0]!r}; use one of {', '.join(SIMULATIONS)}")
    for name in names:
        print(f"{name}\n{SIMULATIONS[name](n_sweeps)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
