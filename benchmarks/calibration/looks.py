"""Looks that add seeds (lm/sweeps/analysis/looks.py), beside fixed numbers of seeds, with Holm's correction.

The learning rates are known and the variances are not moderated, so that the errors are those of the looks alone. A
comparison stops when it is decided, also as equivalent within MARGIN. A false positive is a significant difference
whose true value is 0; power is the rate of significant differences among the others. "Equivalent" is the rate of that
answer, which is wrong where the true difference is MARGIN.
"""

import numpy as np
from scipy import stats

from benchmarks.calibration.rates import NOISE_SD, SEED_SD
from lm.sweeps.analysis.looks import PairTest, follow
from lm.sweeps.design.spec import MARGIN
from lm.sweeps.statistics import inference
from lm.text_tables import table

LOOKS = (5, 8, 12, 20)
DESIGNS = {  # by name: the numbers of seeds, and the share of the error 0.05 that each look may spend
    "5 seeds": ((5,), (1,)),
    "20 seeds": ((20,), (1,)),
    "looks, as in sweeps": (LOOKS, inference.shares(LOOKS)),
    "looks, larger bounds": (LOOKS, (0.1, 0.2, 0.4, 0.6)),
    "looks, 0.05 at each": (LOOKS, (1, 1, 1, 1)),
}
SD = float(np.hypot(SEED_SD, NOISE_SD))  # of a variant
# The number of comparisons, how many have a true difference, which, whether they share their baseline, and the standard
# deviation of a variant.
CASES = (
    (1, 0, 0.0, False, SD),
    (4, 0, 0.0, False, SD),
    (4, 0, 0.0, True, SD),
    (9, 0, 0.0, False, SD),
    (4, 2, 0.02, True, SD),
    (4, 4, 0.02, True, SD),
    (4, 0, 0.0, True, SD / 4),
    (4, 4, MARGIN, True, SD / 4),
)


def simulate(n_sweeps: int) -> str:
    """Return a table with a row for each case and design: error rate, power, rate of "equivalent", and seeds."""
    header = ["comparisons", "different", "by", "baseline", "sd", "design"]
    header += ["any false positive", "power", "equivalent", "mean seeds"]
    rows = []
    for n, different, by, shared, sd in CASES:
        truth = np.where(np.arange(n) < different, by, 0.0)
        for name, design in DESIGNS.items():
            found = [grow(design, tests) for tests in simulate_tests(n_sweeps, truth, shared, sd, design)]
            significant = np.array([[test.is_significant for test in tests] for tests in found])
            equivalent = np.array([[test.verdict == "equivalent" for test in tests] for tests in found])
            seeds = np.array([[test.n_seeds for test in tests] for tests in found])
            error = f"{significant[:, truth == 0].any(axis=1).mean():.3f}" if different < n else ""
            power = f"{significant[:, truth > 0].mean():.3f}" if different else ""
            case = [f"{n}", f"{different}", f"{by:g}" if different else "", "shared" if shared else "one each"]
            rows.append([*case, f"{sd:.4f}", name, error, power, f"{equivalent.mean():.3f}", f"{seeds.mean():.1f}"])
    return table([header, *rows], right=(0, 1, 2, 4, 6, 7, 8, 9))


def simulate_tests(n_sweeps: int, truth: np.ndarray, shared: bool, sd: float, design) -> np.ndarray:
    """Simulate the comparisons of sweeps.

    Args:
        n_sweeps: how many sweeps are simulated.
        truth: the true difference of each comparison (comparisons,).
        shared: whether all comparisons are with the same baseline, else each with its own.
        sd: the standard deviation of a variant over seeds.
        design: a value of DESIGNS, (numbers of seeds, shares).

    Returns:
        Mean difference, its standard deviation over seeds, and p divided by the share: (sweeps, comparisons, looks, 3).
    """
    (looks, shares), draw = design, np.random.default_rng(0)
    losses = truth[:, None] + draw.normal(0, sd, (n_sweeps, len(truth), looks[-1]))
    differences = losses - draw.normal(0, sd, (n_sweeps, 1 if shared else len(truth), looks[-1]))
    found = []
    for n, share in zip(looks, shares, strict=True):
        some = differences[..., :n]
        p = np.minimum(1, stats.ttest_1samp(some, 0, axis=-1).pvalue / share)
        found.append(np.stack([some.mean(axis=-1), some.std(axis=-1, ddof=1), p], axis=-1))
    return np.stack(found, axis=2)


def grow(design, tests: np.ndarray) -> list[PairTest]:
    """Return the tests of the comparisons of a sweep, each at the look at which it stopped."""
    looks, shares = design

    def test(k: int, i: int) -> PairTest:
        (mean, sd, p), n = tests[k, i], looks[i]
        d = inference.Difference(mean, -np.inf, np.inf, p, n, sd, n - 1, len(tests), shares[i])
        return PairTest(i + 1, n, d, None)

    return follow(len(tests), len(looks), test, MARGIN)
