"""Simulate sweeps with a known truth: how often the intervals of a report cover it, and how precise the estimates are.

    python3 -m benchmarks.calibration
    python3 -m benchmarks.calibration --sizes      # of sweeps with sizes

Two equal variants, so the true difference is 0, and every 95 % interval that excludes it is a false positive. "both"
counts the sweeps in which both intervals exclude 0, which a report requires for a significant difference. The loss is a
parabola in log2(learning rate). As in a sweep, each variant takes the best of 6 rates by its mean validation loss over
2 tuning seeds, and is compared on fresh seeds at that rate and its two neighbors. CURVATURE and the standard deviations
are those of the published sweeps of feed-forward layers, norms and positions (docs/results/*/runs.csv).

With sizes, the loss at the optimum falls with the training FLOPs, and a variant does as well as the other with m times
its FLOPs. The optimum of each variant at each size is anywhere between two rates.
"""

import argparse
import sys
from collections.abc import Callable

import numpy as np

from lm.errors import run_command
from lm.sweeps import scaling, statistics
from lm.text import table

CURVATURE = 0.028  # loss = minimum + CURVATURE (log2(rate) - optimum)^2
SEED_SD, NOISE_SD = 0.007, 0.009  # standard deviations: of a seed, equal at all rates of a variant; of each run
N_RATES, TUNING_SEEDS = 6, 2

# The optima of the two variants, in steps of the grid: (number of sweeps, random generator) -> (sweeps, 2).
OPTIMA: dict[str, Callable] = {
    "anywhere": lambda n, draw: 2 + draw.uniform(0, 1, (n, 2)),
    "half a step apart": lambda n, draw: np.tile([2.0, 2.5], (n, 1)),
}

FLOPS = np.array([1.1e11, 5.1e11, 1.6e12, 7.5e12])  # of one run at each size of configs/sweeps/scale_swiglu.py
LN_M = {  # the true ln m at each size
    "m = 1": np.zeros(4),
    "m = 1.15": np.full(4, np.log(1.15)),
    "m = 1.7": np.full(4, np.log(1.7)),
    "m = 1.05 to 1.30": np.interp(np.log(FLOPS), np.log(FLOPS[[0, -1]]), np.log([1.05, 1.30])),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.calibration", description=__doc__.split("\n")[0])
    parser.add_argument("--sweeps", type=int, default=4000, metavar="N", help="simulated sweeps per row (4000)")
    parser.add_argument(
        "--sizes", action="store_true", help="simulate sweeps with sizes, and their compute multipliers"
    )
    arguments = parser.parse_args()
    return run_command(lambda: (simulate_sizes if arguments.sizes else simulate)(arguments.sweeps))


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


def simulate_sizes(n_sweeps: int) -> int:
    """Print how often the intervals cover ln m at a size, its mean and its trend, and how often the mean is not 0."""
    header = ["truth", "estimate", "at a size", "mean over sizes", "trend", "found", "width"]
    rows = []
    for truth, ln_m in LN_M.items():
        expected = [*ln_m, ln_m.mean(), np.polyfit(np.log10(FLOPS), ln_m, 1)[0]]
        not_0 = []
        for name, intervals in ladders(ln_m, n_sweeps).items():
            low, high = np.moveaxis(np.array(intervals), 2, 0)
            covered = ((low <= expected) & (expected <= high)).mean(axis=0)
            not_0.append((low[:, 4] > 0) | (high[:, 4] < 0))
            numbers = [covered[:4].mean(), covered[4], covered[5], not_0[-1].mean(), (high - low)[:, 4].mean()]
            rows.append([truth, name, *(f"{number:.3f}" for number in numbers)])
        rows.append([truth, "both", "", "", "", f"{np.logical_and(*not_0).mean():.3f}", ""])
    print(table([header, *rows], right=range(2, len(header))))
    return 0


def ladders(ln_m: np.ndarray, n_sweeps: int, n_seeds: int = 5) -> dict[str, list]:
    """Return the intervals of ln m, its mean over sizes and its trend, from simulated sweeps with sizes."""
    draw = np.random.default_rng(0)
    found = {"best rate": [], "optimum": []}
    for _ in range(n_sweeps):
        runs = [[simulate_variant(2 + draw.uniform(), n_seeds, draw) for _ in range(2)] for _ in FLOPS]
        if any(run is None for pair in runs for run in pair):
            continue
        loss_S2 = loss(np.stack([FLOPS * np.exp(ln_m), FLOPS], axis=1))
        for k, intervals in enumerate(found.values()):  # the losses of the runs, and those at the optimum
            noise_SN2 = np.array([[run[k] for run in pair] for pair in runs]).swapaxes(1, 2)
            m = scaling.multipliers(np.stack([FLOPS, FLOPS], axis=1), loss_S2[:, None] + noise_SN2)
            intervals.append([(e.low, e.high) for e in (*m.at_sizes, m.pooled, m.trend)])
    return found


def loss(flops: np.ndarray) -> np.ndarray:
    """Return the loss at the optimum; it is near that of the published sweeps (docs/results)."""
    return 1.4 + 60 * flops**-0.17


if __name__ == "__main__":
    sys.exit(main())
