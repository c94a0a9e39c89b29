"""Simulate sweeps with a known truth: how often the intervals of a report cover it, and how precise the estimates are.

    python3 -m benchmarks.calibration
    python3 -m benchmarks.calibration --looks

Two equal variants, so the true difference is 0, and every 95 % interval that excludes it is a false positive. "both"
counts the sweeps in which both intervals exclude 0, which a report requires for a significant difference. The loss is a
parabola in log2(learning rate). As in a sweep, each variant takes the best of 6 rates by its mean validation loss over
2 tuning seeds, and is compared on fresh seeds at that rate and its two neighbors. CURVATURE and the standard deviations
are those of the published sweeps of feed-forward layers, norms and positions (docs/results/*/runs.csv).

With --looks: several comparisons with Holm's correction, of a fixed number of seeds or of looks at 5, 8, 12 and 20
(`lm.sweeps.looks`). The learning rates are known, so that the errors are those of the looks alone.
"""

import argparse
import sys
from collections.abc import Callable

import numpy as np
from scipy import stats

from lm.errors import run_command
from lm.sweeps import statistics
from lm.sweeps.looks import PairTest, follow
from lm.text import table

CURVATURE = 0.028  # loss = minimum + CURVATURE (log2(rate) - optimum)^2
SEED_SD, NOISE_SD = 0.007, 0.009  # standard deviations: of a seed, equal at all rates of a variant; of each run
N_RATES, TUNING_SEEDS = 6, 2

# The optima of the two variants, in steps of the grid: (number of sweeps, random generator) -> (sweeps, 2).
OPTIMA: dict[str, Callable] = {
    "anywhere": lambda n, draw: 2 + draw.uniform(0, 1, (n, 2)),
    "half a step apart": lambda n, draw: np.tile([2.0, 2.5], (n, 1)),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.calibration", description=__doc__.split("\n")[0])
    parser.add_argument("--sweeps", type=int, default=4000, metavar="N", help="simulated sweeps per row (4000)")
    parser.add_argument("--looks", action="store_true", help="simulate numbers of seeds that grow instead")
    arguments = parser.parse_args()
    return run_command(lambda: (simulate_looks if arguments.looks else simulate)(arguments.sweeps))


def simulate(n_sweeps: int) -> int:
    """Print a row for each placement of the optima, number of seeds and estimate."""
    header = ["optima", "seeds", "estimate", "false positives", "mean width", "rmse"]
    rows = []
    for place in OPTIMA:
        for n_seeds in (5, 10, 20):
            found = differences(place, n_seeds, n_sweeps)
            wrong = {name: np.array([not d.low <= 0 <= d.high for d in ds]) for name, ds in found.items()}
            for name, results in found.items():
                width = np.mean([d.high - d.low for d in results])
                rmse = np.sqrt(np.mean([d.mean**2 for d in results]))
                rows.append([place, f"{n_seeds}", name, f"{wrong[name].mean():.3f}", f"{width:.4f}", f"{rmse:.4f}"])
            rows.append([place, f"{n_seeds}", "both", f"{np.logical_and(*wrong.values()).mean():.3f}", "", ""])
    print(table([header, *rows], right=range(3, len(header))))
    return 0


def differences(place: str, n_seeds: int, n_sweeps: int) -> dict[str, list[statistics.Difference]]:
    """Return the differences of simulated sweeps at the best rates of the grid, and at the estimated optima.

    Sweeps without an estimate of an optimum are left out: at most one in 40.
    """
    draw = np.random.default_rng(0)
    found = {"best rate": [], "optimum": []}
    for optima in OPTIMA[place](n_sweeps, draw):
        a, b = (simulate_variant(optimum, n_seeds, draw) for optimum in optima)
        if a is not None and b is not None:
            for name, losses_a, losses_b in zip(found, a, b, strict=True):
                found[name].append(statistics.paired_difference(losses_a, losses_b))
    return found


def simulate_variant(optimum: float, n_seeds: int, draw) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the losses of the seeds at the best rate of the grid, and the pseudo-values of the estimated minimum.

    None if the best rate is at the edge of the grid, or there is no minimum.
    """
    x = np.arange(N_RATES)

    def losses(n: int) -> np.ndarray:
        return CURVATURE * (x - optimum) ** 2 + draw.normal(0, SEED_SD, (n, 1)) + draw.normal(0, NOISE_SD, (n, N_RATES))

    best = int(losses(TUNING_SEEDS).mean(axis=0).argmin())
    final = losses(n_seeds)
    if best in (0, N_RATES - 1):
        return None
    around = slice(best - 1, best + 2)
    minimum = statistics.pseudo_values(
        lambda some: statistics.parabola_minimum(x[around], some.mean(axis=0))[1], final[:, around]
    )
    return None if np.isnan(minimum).any() else (final[:, best], minimum)


# ---- Looks -----------------------------------------------------------------------------------------------------

LOOKS = (5, 8, 12, 20)
DESIGNS = {  # by name: the numbers of seeds, and the bounds on p
    "5 seeds": ((5,), (0.05,)),
    "20 seeds": ((20,), (0.05,)),
    "looks, as in sweeps": (LOOKS, [0.05 * share for share in statistics.shares(LOOKS)]),
    "looks, larger bounds": (LOOKS, (0.005, 0.01, 0.02, 0.03)),
    "looks, 0.05 at each": (LOOKS, (0.05,) * 4),
}
DIFFERENCE = 0.02  # true one, in nats per token, of the comparisons that have one
# What is compared: the number of comparisons, how many have a true difference, and whether they share their baseline.
CASES = ((1, 0, False), (4, 0, False), (4, 0, True), (9, 0, False), (4, 2, True), (4, 4, True))


def simulate_looks(n_sweeps: int) -> int:
    """Print a row for each case and design: how often anything false is reported, the power, and the seeds used."""
    header = ["comparisons", "different", "baseline", "design", "any false positive", "power", "mean seeds"]
    rows = []
    for n, different, shared in CASES:
        truth = np.where(np.arange(n) < different, DIFFERENCE, 0.0)
        for name, (looks, bounds) in DESIGNS.items():
            found = [grow(looks, tests) for tests in simulate_tests(n_sweeps, truth, shared, looks, bounds)]
            significant, seeds = (np.array(values) for values in zip(*found, strict=True))
            error = f"{significant[:, truth == 0].any(axis=1).mean():.3f}" if different < n else ""
            power = f"{significant[:, truth > 0].mean():.3f}" if different else ""
            baseline = "shared" if shared else "one each"
            rows.append([f"{n}", f"{different}", baseline, name, error, power, f"{seeds.mean():.1f}"])
    print(table([header, *rows], right=(0, 1, 4, 5, 6)))
    return 0


def simulate_tests(n_sweeps: int, truth: np.ndarray, shared: bool, looks, bounds) -> np.ndarray:
    """Return the mean differences and the scaled p-values of sweeps: (sweeps, comparisons, looks, 2)."""
    draw, sd = np.random.default_rng(0), np.hypot(SEED_SD, NOISE_SD)
    shape = n_sweeps, len(truth), looks[-1]
    losses = truth[:, None] + draw.normal(0, sd, shape)
    differences = losses - draw.normal(0, sd, (n_sweeps, 1 if shared else len(truth), looks[-1]))
    p = [stats.ttest_1samp(differences[..., :n], 0, axis=-1).pvalue for n in looks]
    means = [differences[..., :n].mean(axis=-1) for n in looks]
    scaled = np.minimum(1, np.stack(p, axis=-1) * 0.05 / np.array(bounds))
    return np.stack([np.stack(means, axis=-1), scaled], axis=-1)


def grow(looks, tests: np.ndarray) -> tuple[list[bool], list[int]]:
    """Return for each comparison of a sweep whether it is significant, and its number of seeds."""

    def test(k: int, i: int) -> PairTest:
        mean, p = tests[k, i]
        return PairTest(i + 1, looks[i], statistics.Difference(mean, -np.inf, np.inf, p, looks[i], np.nan), None)

    found = follow(len(tests), len(looks), test)
    return [t.is_significant for t in found], [t.n_seeds for t in found]


if __name__ == "__main__":
    sys.exit(main())
