"""Student's t test and the moderated one (lm/sweeps/statistics/moderation.py), in sweeps of 5 seeds and 4 comparisons.

SDS are the standard deviations of the variants over seeds, without the part that all variants share. The optima are on
the grid. The columns are fractions of the sweeps:

* Any false: any of the 4 differences is significant after Holm's correction, though all true ones are 0.
* First false: the first difference, that of the noisy variant if there is one, has p below 0.05 before the correction.
* Power: the first difference is significant after the correction, if the true one is EFFECT.
"""

from collections.abc import Callable

import numpy as np

from benchmarks.calibration.rates import CURVATURE, SEED_SD, pseudo_values_of_minimum
from lm.sweeps.statistics import inference
from lm.sweeps.statistics.moderation import NO_PRIOR, fit_prior
from lm.text_tables import table

# The standard deviations of the variants: (number of variants, random generator) -> (variants,).
SDS: dict[str, Callable] = {
    "equal, 0.010": lambda n, draw: np.full(n, 0.010),
    "from 0.006 to 0.016": lambda n, draw: np.exp(draw.uniform(*np.log([0.006, 0.016]), n)),
    "0.016, others 0.006": lambda n, draw: np.where(np.arange(n) == 1, 0.016, 0.006),
    "0.050, others 0.010": lambda n, draw: np.where(np.arange(n) == 1, 0.050, 0.010),
}
# The comparisons, pairs (variant, against).
DESIGNS: dict[str, list[tuple[int, int]]] = {
    "4 of 5 with one": [(1, 0), (2, 0), (3, 0), (4, 0)],
    "4 pairs of 8": [(1, 0), (3, 2), (5, 4), (7, 6)],
}
N_SEEDS, EFFECT = 5, 0.02
TESTS, COUNTED = ("t", "moderated"), ("any false", "first false", "power")


def simulate(n_sweeps: int) -> str:
    """Return a table with a row for each choice of comparisons, standard deviations and estimate."""
    header = [
        "comparisons",
        "sd of the variants",
        "estimate",
        *(f"{what}, {test}" for what in COUNTED for test in TESTS),
    ]
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
                shares = [np.mean([s[estimate].any() for s, _ in found[test, 0]]) for test in TESTS]
                shares += [np.mean([first[estimate] for _, first in found[test, 0]]) for test in TESTS]
                shares += [np.mean([s[estimate][0] for s, _ in found[test, EFFECT]]) for test in TESTS]
                rows.append([design, name, estimate, *(f"{share:.3f}" for share in shares)])
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


def significant(losses: dict[str, np.ndarray], pairs, test: str, shift: float) -> tuple[dict, dict]:
    """Test the pairs of variants of a sweep.

    Args:
        losses: by estimate, the losses (variants, seeds); what `simulate_sweep` returned.
        pairs: the comparisons, pairs of indices of variants.
        test: "t" or "moderated".
        shift: subtracted from the losses of the second variant.

    Returns:
        By estimate, whether each pair differs significantly after Holm's correction (pairs,); and by estimate, whether
        the first pair does without the correction. The estimate "both" is the rule of the report: both estimates are
        significant, with the same sign.
    """
    found, signs, first = {}, [], []
    for estimate, losses_VS in losses.items():
        shifted_VS = losses_VS - shift * np.eye(len(losses_VS))[1][:, None]
        prior = fit_prior(shifted_VS) if test == "moderated" else NO_PRIOR
        ds = [inference.paired_difference(shifted_VS[a], shifted_VS[b], len(pairs), prior) for a, b in pairs]
        found[estimate] = np.array(inference.holm([d.p for d in ds])) < 1 - inference.LEVEL
        first.append(ds[0].p < 1 - inference.LEVEL)
        signs.append([d.mean > 0 for d in ds])
    found["both"] = found["best rate"] & found["optimum"] & np.equal(*signs)
    alone = dict(zip(losses, first, strict=True))
    return found, alone | {"both": all(first) and signs[0][0] == signs[1][0]}
