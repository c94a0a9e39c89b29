"""The answers "different", "beyond the margin" and "equivalent": how often a sweep gives any wrong one.

A significant difference is wrong if the true one is 0 or has the other sign, "beyond the margin" if the true one is
smaller than the margin, and "equivalent" if it is larger. Each kind has its own Holm correction for all comparisons.
The margin is 9.5 standard errors of a difference over 20 seeds. So every true difference other than 0 is found, and
Holm's correction leaves most of the error to the comparisons that remain. Variances are not moderated.
"""

import numpy as np

from benchmarks.calibration.looks import LOOKS, grow, simulate_tests
from lm.sweeps.analysis.looks import PairTest
from lm.sweeps.design.spec import MARGIN
from lm.sweeps.statistics import inference
from lm.text_tables import table

SD = MARGIN / 3  # of a variant
BELOW, ABOVE = 0.999, 1.001  # the hardest true differences, in margins
CASES = (  # the true differences of the comparisons of a sweep, in margins
    (0,),
    (BELOW,),
    (ABOVE,),
    (0, 0, 0, 0),
    (BELOW, BELOW, BELOW, BELOW),
    (ABOVE, ABOVE, ABOVE, ABOVE),
    (0, BELOW, ABOVE),
    (0, BELOW, BELOW, ABOVE, ABOVE),
    (0, *[BELOW] * 4, *[ABOVE] * 4),
)
DESIGNS = {"20 seeds": ((20,), (1,)), "looks": (LOOKS, inference.shares(LOOKS))}
KINDS = ("different", "beyond the margin", "equivalent")


def simulate(n_sweeps: int) -> str:
    """Return a table with a row for each case and design: how often any answer of a kind, and any at all, is wrong."""
    rows = [["true differences, in margins", "design", *(f"wrong {kind}" for kind in KINDS), "any wrong"]]
    for case in CASES:
        names = [f"{case.count(true)} x {true:g}" for true in dict.fromkeys(case)]
        truth = MARGIN * np.array(case, float)
        for name, design in DESIGNS.items():
            sweeps = simulate_tests(n_sweeps, truth, False, SD, design)
            found = np.array([wrong(truth, grow(design, tests)) for tests in sweeps])
            shares = [*found.mean(axis=0), found.any(axis=1).mean()]
            rows.append([", ".join(names), name, *(f"{share:.3f}" for share in shares)])
    return table(rows, right=range(2, 6))


def wrong(truth: np.ndarray, tests: list[PairTest]) -> list[bool]:
    """Return for each kind of answer whether a sweep gives any wrong one.

    Args:
        truth: the true differences of its comparisons.
        tests: the tests of its comparisons.
    """
    pairs = list(zip(truth, tests, strict=True))
    return [
        any(test.is_significant and true * test.difference.mean <= 0 for true, test in pairs),
        any(test.verdict == "beyond the margin" and 0 < true < MARGIN for true, test in pairs),
        any(test.verdict == "equivalent" and true > MARGIN for true, test in pairs),
    ]
