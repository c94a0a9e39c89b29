"""Exponents and irreducible losses (lm/sweeps/statistics/power_laws.py): how often their intervals cover the truth.

Sweeps of one variant at the sizes of configs/sweeps/scaling.py, whose loss at the optimal learning rate is E + A N^-a.
As in the other simulations, the optimum at each size is anywhere between two rates of the grid. Two kinds of intervals
are compared: those of the profile likelihood, which reports use, and, at the optima, those of the jackknife over the
seeds of each size.
"""

import numpy as np

from benchmarks.calibration.rates import simulate_variant
from lm.sweeps.statistics import power_laws, scaling
from lm.text_tables import table

PARAMETERS = np.array([4188.0, 7248.0, 15864.0, 27808.0, 61680.0])  # of configs/sweeps/scaling.py
TRUTHS = {  # exponent a, sizes
    "a = 0.7, 5 sizes": (0.7, PARAMETERS),
    "a = 0.7, 4 sizes": (0.7, PARAMETERS[:4]),
    "a = 0.35, 5 sizes": (0.35, PARAMETERS),
    "a = 0.1, 5 sizes": (0.1, PARAMETERS),
}
FLOOR, ABOVE = 1.8, 0.45  # E, and the loss above it at the smallest size
N_SEEDS = 5


def simulate(n_sweeps: int) -> str:
    """Return a table: how often intervals cover a and E, their median widths, and how often E has no lower end."""
    header = [
        "truth",
        "losses",
        "interval",
        "covers a",
        "covers E",
        "width of a",
        "width of E",
        "E unbounded",
        "misfit",
    ]
    rows = []
    for truth, (exponent, x) in TRUTHS.items():
        for (losses, name), found in intervals(exponent, x, n_sweeps).items():
            low, high = np.moveaxis(np.array([ends for *ends, _ in found]), 2, 0)
            covered = ((low <= [exponent, FLOOR]) & (high >= [exponent, FLOOR])).mean(axis=0)
            width, unbounded = np.median(high - low, axis=0), np.isinf(low[:, 1]).mean()
            misfit = np.mean([p < 0.05 for *_, p in found]) if name == "profile" else np.nan
            numbers = [*covered, *width, unbounded, misfit]
            rows.append([truth, losses, name, *("" if np.isnan(number) else f"{number:.3f}" for number in numbers)])
    return table([header, *rows], right=range(3, len(header)))


def intervals(exponent: float, x_S: np.ndarray, n_sweeps: int) -> dict[tuple[str, str], list]:
    """Simulate sweeps, and return their intervals of a and E and the p-value of the misfit.

    Args:
        exponent: the true a.
        x_S: the number of parameters of each size.
        n_sweeps: how many sweeps are simulated.

    Returns:
        By (losses, kind of interval), a tuple (interval of a, interval of E, p) for each sweep. Without a fit the
        intervals of the profile are infinite, because the report then claims nothing; the jackknife leaves the sweep
        out.
    """
    draw, found = np.random.default_rng(0), {}
    loss_S = FLOOR + ABOVE * (x_S / x_S[0]) ** -exponent
    for _ in range(n_sweeps):
        runs = [simulate_variant(2 + draw.uniform(), N_SEEDS, draw) for _ in x_S]
        if any(run is None for run in runs):
            continue
        for k, losses in enumerate(("best rate", "optimum")):
            losses_SN = loss_S[:, None] + np.array([run[k] for run in runs])
            law = power_laws.fit(x_S, losses_SN)
            ends = [(0, np.inf), (-np.inf, np.inf)] if law is None else [law.exponent[1:], law.floor[1:]]
            p = 1.0 if law is None else law.p_misfit
            found.setdefault((losses, "profile"), []).append((*ends, p))
            if losses == "optimum" and law is not None and (jackknife := _jackknife(x_S, losses_SN)):
                found.setdefault((losses, "jackknife"), []).append((*jackknife, p))
    return found


def _jackknife(x_S: np.ndarray, losses_SN: np.ndarray) -> list[tuple[float, float]] | None:
    """Return the jackknife intervals of a and E; None if a fit without one of the seeds has no solution."""

    def estimate(mean_S: np.ndarray) -> np.ndarray:
        law = power_laws.fit(x_S, np.stack([mean_S, mean_S], axis=1))
        return np.full(2, np.nan) if law is None else np.array([law.exponent.value, law.floor.value])

    found = [(e.low, e.high) for e in scaling.jackknife(estimate, losses_SN)]
    return None if np.isnan(found).any() else found
