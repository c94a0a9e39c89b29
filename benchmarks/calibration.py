"""Simulate sweeps with a known truth: how often the intervals of a report cover it, and how precise the estimates are.

    python3 -m benchmarks.calibration

Two equal variants, so the true difference is 0, and every 95 % interval that excludes it is a false positive. "both"
counts the sweeps in which both intervals exclude 0, which a report requires for a significant difference. The loss is a
parabola in log2(learning rate). As in a sweep, each variant takes the best of 6 rates by its mean validation loss over
2 tuning seeds, and is compared on fresh seeds at that rate and its two neighbors. CURVATURE and the standard deviations
are those of the published sweeps of feed-forward layers, norms and positions (docs/results/*/runs.csv).

The second table compares Student's t test with the moderated one (lm/sweeps/moderation.py) in sweeps of 5 seeds and 4
comparisons. SDS are the standard deviations of the variants over seeds, without what they share. The optima are on the
grid. False positives: sweeps in which any of the 4 differences is significant after Holm's correction though all are 0.
Power: sweeps in which the first one is, if it is EFFECT.
The second table asks the same of another text: the true difference is the mean over seeds and text. All seeds are
tested on the same blocks of text. The sampling error of the difference is 0.003, as for the published feed-forward
layers, and most of it is the same for all seeds.
"""

import argparse
import sys
from collections.abc import Callable

import numpy as np

from lm.errors import run_command
from lm.sweeps import statistics
from lm.sweeps.moderation import NO_PRIOR, fit_prior
from lm.text import table

CURVATURE = 0.028  # loss = minimum + CURVATURE (log2(rate) - optimum)^2
SEED_SD, NOISE_SD = 0.007, 0.009  # standard deviations: of a seed, equal at all rates of a variant; of each run
N_RATES, TUNING_SEEDS = 6, 2

# Of the difference of two variants on a test text of N_BLOCKS blocks: over seeds, over blocks, and the rest.
N_BLOCKS = 55
DIFFERENCE_SD, BLOCK_SD, REST_SD = 0.016, 0.02, 0.02

# The optima of the two variants, in steps of the grid: (number of sweeps, random generator) -> (sweeps, 2).
OPTIMA: dict[str, Callable] = {
    "anywhere": lambda n, draw: 2 + draw.uniform(0, 1, (n, 2)),
    "half a step apart": lambda n, draw: np.tile([2.0, 2.5], (n, 1)),
}

# The standard deviations of the variants: (number of variants, random generator) -> (variants,).
SDS: dict[str, Callable] = {
    "equal, 0.010": lambda n, draw: np.full(n, 0.010),
    "from 0.006 to 0.016": lambda n, draw: np.exp(draw.uniform(*np.log([0.006, 0.016]), n)),
    "0.016, others 0.006": lambda n, draw: np.where(np.arange(n) == 1, 0.016, 0.006),
}
# The comparisons, pairs (variant, against).
DESIGNS: dict[str, list[tuple[int, int]]] = {
    "4 of 5 with one": [(1, 0), (2, 0), (3, 0), (4, 0)],
    "4 pairs of 8": [(1, 0), (3, 2), (5, 4), (7, 6)],
}
N_SEEDS, EFFECT = 5, 0.02
TESTS = {"t": lambda losses_VS: NO_PRIOR, "moderated": fit_prior}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.calibration", description=__doc__.split("\n")[0])
    parser.add_argument("--sweeps", type=int, default=4000, metavar="N", help="simulated sweeps per row (4000)")
    return run_command(lambda: simulate(parser.parse_args().sweeps))


def simulate(n_sweeps: int) -> int:
    """Print all tables."""
    print(estimates(n_sweeps))
    print()
    print(moderation(n_sweeps))
    print()
    print(table(over_text(n_sweeps), right=range(1, 4)))
    return 0


def estimates(n_sweeps: int) -> str:
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


def over_text(n_sweeps: int) -> list[list[str]]:
    """Return a table of the intervals over seeds alone, and over seeds and text."""
    rows, draw = [["interval over", "seeds", "false positives", "mean width"]], np.random.default_rng(0)
    for n in (5, 20):
        found = {"seeds": [], "seeds and text": []}
        for _ in range(n_sweeps):
            shared = draw.normal(0, DIFFERENCE_SD, (n, 1)) + draw.normal(0, BLOCK_SD, N_BLOCKS)
            tests = shared + draw.normal(0, REST_SD, (n, N_BLOCKS))
            found["seeds"].append(statistics.interval(tests.mean(axis=1)))
            found["seeds and text"].append(statistics.crossed_interval(tests, np.ones(N_BLOCKS)))
        for name, intervals in found.items():
            wrong = np.mean([not i.low <= 0 <= i.high for i in intervals])
            rows.append([name, f"{n}", f"{wrong:.3f}", f"{np.mean([i.high - i.low for i in intervals]):.4f}"])
    return rows


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
    minimum = pseudo_values_of_minimum(x[around], final[:, around])
    return None if np.isnan(minimum).any() else (final[:, best], minimum)


def pseudo_values_of_minimum(x: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return the pseudo-values of the minimum over three rates x of losses (seeds, rates), nan without a minimum."""
    return statistics.pseudo_values(lambda some: statistics.parabola_minimum(x, some.mean(axis=0))[1], losses)


def moderation(n_sweeps: int) -> str:
    """Return a table with a row for each choice of comparisons, standard deviations and estimate."""
    header = ["comparisons", "sd of the variants", "estimate", *(f"false positives, {test}" for test in TESTS)]
    header += [f"power, {test}" for test in TESTS]
    rows = []
    for design, pairs in DESIGNS.items():
        for name, sds in SDS.items():
            draw = np.random.default_rng(0)
            sweeps = [simulate_sweep(sds(1 + max(max(pairs)), draw), draw) for _ in range(n_sweeps)]
            found = {
                (test, shift): [significant(losses, pairs, test, shift) for losses in sweeps]
                for test in TESTS
                for shift in (0, EFFECT)
            }
            for estimate in ("best rate", "optimum", "both"):
                wrong = [np.mean([s[estimate].any() for s in found[test, 0]]) for test in TESTS]
                right = [np.mean([s[estimate][0] for s in found[test, EFFECT]]) for test in TESTS]
                rows.append([design, name, estimate, *(f"{share:.3f}" for share in wrong + right)])
    return table([header, *rows], right=range(3, len(header)))


def simulate_sweep(sds: np.ndarray, draw) -> dict[str, np.ndarray]:
    """Return the losses (variants, seeds) at the best rate of the grid, and those at the estimated optimum.

    Sweeps in which a variant has no estimate of the optimum are drawn again.
    """
    x = np.array([-1, 0, 1])
    while True:
        losses_VSR = CURVATURE * x**2 + draw.normal(0, SEED_SD, (N_SEEDS, 1))
        losses_VSR = losses_VSR + draw.normal(size=(len(sds), N_SEEDS, 3)) * sds[:, None, None]
        optima_VS = np.array([pseudo_values_of_minimum(x, losses_SR) for losses_SR in losses_VSR])
        if not np.isnan(optima_VS).any():
            return {"best rate": losses_VSR[:, :, 1], "optimum": optima_VS}


def significant(losses: dict[str, np.ndarray], pairs, test: str, shift: float) -> dict[str, np.ndarray]:
    """Return by estimate whether each pair differs significantly, if the second variant is lower by `shift`.

    "both" is the rule of the report: both estimates, with the same sign.
    """
    found, signs = {}, []
    for estimate, losses_VS in losses.items():
        shifted_VS = losses_VS - shift * np.eye(len(losses_VS))[1][:, None]
        prior = TESTS[test](shifted_VS)
        ds = [statistics.paired_difference(shifted_VS[a], shifted_VS[b], len(pairs), prior) for a, b in pairs]
        found[estimate] = np.array(statistics.holm([d.p for d in ds])) < 1 - statistics.LEVEL
        signs.append([d.mean > 0 for d in ds])
    return found | {"both": found["best rate"] & found["optimum"] & np.equal(*signs)}


if __name__ == "__main__":
    sys.exit(main())
