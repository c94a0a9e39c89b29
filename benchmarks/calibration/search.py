"""Random search: how often two equal variants differ significantly because they were tuned with few trials.

At their optima the variants are equal, so the true difference is 0, and every 95 % interval that excludes it is a false
positive. As in a sweep, both variants are tried with the same trials, each takes the best one by its mean validation
loss over the tuning seeds, and they are compared there on fresh seeds. The loss is a parabola in log2(learning rate)
with the curvature of `rates`, over a range of 5 factors of 2, plus a parabola in a second hyperparameter. By assumption
the second one changes the loss by OTHER nats per token from its optimum at one end of the range to the other end.

Beyond the margin: how often the test finds a difference of more than MARGIN. Gap: how far the loss of a variant's best
trial is above that at its optimum.
"""

import numpy as np

from benchmarks.calibration.rates import CURVATURE, NOISE_SD, SEED_SD
from lm.sweeps.design.spec import MARGIN
from lm.sweeps.statistics import inference
from lm.sweeps.statistics.margins import p_beyond
from lm.text_tables import table

FACTORS = 5.0  # of 2, from the lowest learning rate to the highest
OTHER = 0.02
OPTIMA = ("the same", "anywhere")


def simulate(n_sweeps: int) -> str:
    """Return a table with a row for each placement of the optima, number of trials, tuning seeds and fresh seeds."""
    header = ["optima", "trials", "tuning seeds", "seeds", "false positives", "beyond the margin", "mean gap", "rmse"]
    rows = []
    for place in OPTIMA:
        for n_trials in (20, 50):
            for n_tuning, n_seeds in ((1, 5), (2, 20)):
                found, gap = differences(place, n_trials, n_tuning, n_seeds, n_sweeps)
                wrong = np.mean([not d.low <= 0 <= d.high for d in found])
                beyond = np.mean([p_beyond(d, MARGIN) < 1 - inference.LEVEL for d in found])
                rmse = np.sqrt(np.mean([d.mean**2 for d in found]))
                sizes = [f"{n}" for n in (n_trials, n_tuning, n_seeds)]
                rows.append([place, *sizes, f"{wrong:.3f}", f"{beyond:.3f}", f"{gap:.4f}", f"{rmse:.4f}"])
    return table([header, *rows], right=range(1, len(header)))


def differences(place: str, n_trials: int, n_tuning: int, n_seeds: int, n_sweeps: int):
    """Return the differences of simulated sweeps, and the mean gap.

    Args:
        place: a value of OPTIMA: whether both variants have the same optimum.
        n_trials, n_tuning, n_seeds: trials, tuning seeds and fresh seeds of a sweep.
        n_sweeps: how many sweeps are simulated.
    """
    draw, found, gaps = np.random.default_rng(0), [], []
    for _ in range(n_sweeps):
        trials = draw.uniform(0, 1, (n_trials, 2))
        optima = draw.uniform([0.3, 0], [0.7, 1], (2, 2))  # that of the rate is near the middle of its range
        if place == "the same":
            optima[1] = optima[0]
        losses = []
        for optimum in optima:
            gap = ((trials - optimum) ** 2) @ [CURVATURE * FACTORS**2, OTHER]
            best = (gap + noise(draw, n_tuning, n_trials).mean(axis=0)).argmin()
            losses.append(gap[best] + noise(draw, n_seeds, 1)[:, 0])
            gaps.append(gap[best])
        found.append(inference.paired_difference(*losses))
    return found, np.mean(gaps)


def noise(draw, n_seeds: int, n_trials: int) -> np.ndarray:
    """Draw the noise of losses (seeds, trials): a part of each seed, the same in all trials, and a part of each run."""
    return draw.normal(0, SEED_SD, (n_seeds, 1)) + draw.normal(0, NOISE_SD, (n_seeds, n_trials))
