"""The choice of the learning rate: the best rate of a grid, and the estimated optimum between its rates.

Two equal variants, so the true difference is 0, and every 95 % interval that excludes it is a false positive. "both"
counts the sweeps in which both intervals exclude 0, which a report requires for a significant difference. The loss is a
parabola in log2(learning rate). As in a sweep, each variant takes the best of 6 rates by its mean validation loss over
2 tuning seeds, and is compared on fresh seeds at that rate and its two neighbors. CURVATURE and the standard deviations
are those of the published sweeps of feed-forward layers, norms and positions (docs/results/*/runs.csv).
"""

from collections.abc import Callable

import numpy as np

from lm.sweeps.statistics import inference
from lm.text_tables import table

CURVATURE = 0.028  # loss = minimum + CURVATURE (log2(rate) - optimum)^2
SEED_SD, NOISE_SD = 0.007, 0.009  # standard deviations: of a seed, the same at all rates; of each run
N_RATES, TUNING_SEEDS = 6, 2

# The optima of the two variants, in steps of the grid: (number of sweeps, random generator) -> (sweeps, 2).
OPTIMA: dict[str, Callable] = {
    "anywhere": lambda n, draw: 2 + draw.uniform(0, 1, (n, 2)),
    "half a step apart": lambda n, draw: np.tile([2.0, 2.5], (n, 1)),
}


def simulate(n_sweeps: int) -> str:
    """Return a table with a row for each placement of the optima, number of seeds and estimate."""
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
    return table([header, *rows], right=range(3, len(header)))


def differences(place: str, n_seeds: int, n_sweeps: int) -> dict[str, list[inference.Difference]]:
    """Return the differences of simulated sweeps at the best rates of the grid, and at the estimated optima.

    Sweeps without an estimate of an optimum are left out: at most one in 40.

    Args:
        place: a key of OPTIMA.
        n_seeds: fresh seeds of a sweep.
        n_sweeps: how many sweeps are simulated.
    """
    draw = np.random.default_rng(0)
    found = {"best rate": [], "optimum": []}
    for optima in OPTIMA[place](n_sweeps, draw):
        a, b = (simulate_variant(optimum, n_seeds, draw) for optimum in optima)
        if a is not None and b is not None:
            for name, losses_a, losses_b in zip(found, a, b, strict=True):
                found[name].append(inference.paired_difference(losses_a, losses_b))
    return found


def simulate_variant(optimum: float, n_seeds: int, draw) -> tuple[np.ndarray, np.ndarray] | None:
    """Simulate the tuning and the final runs of a variant.

    Args:
        optimum: the best rate, in steps of the grid from its first rate.
        n_seeds: the number of fresh seeds.
        draw: a random generator of NumPy.

    Returns:
        The losses of the seeds at the best rate of the grid, and the pseudo-values of the estimated minimum, both
        relative to the true minimum; None if the best rate is at the edge of the grid, or if there is no minimum.
    """
    x = np.arange(N_RATES)

    def losses(n: int) -> np.ndarray:
        return CURVATURE * (x - optimum) ** 2 + draw.normal(0, SEED_SD, (n, 1)) + draw.normal(0, NOISE_SD, (n, N_RATES))

    best = int(losses(TUNING_SEEDS).mean(axis=0).argmin())
    final = losses(n_seeds)
    if best in (0, N_RATES - 1):
        return None
    around = slice(best - 1, best + 2)
    minimum = pseudo_values_of_minimum(x[around], final[:, around])
    return None if np.isnan(minimum).any() else (final[:, best], minimum)


def pseudo_values_of_minimum(x: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return the pseudo-values of the minimum over three rates x of losses (seeds, rates), nan without a minimum."""
    return inference.pseudo_values(lambda some: inference.parabola_minimum(x, some.mean(axis=0))[1], losses)
