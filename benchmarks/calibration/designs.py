"""How often two variants of a simulated sweep are found to differ, at the vertex of the tuning runs or the best rate.

The loss of a variant is a parabola in log2(learning rate). Tuning runs cover a grid; both variants then train on fresh
paired seeds, at the best rate of the grid (the old rule) or at the vertex of the parabola through the tuning losses
(the present rule, `lm.sweeps.tuning`), and a plain paired t test compares them. The parameters are those of the
published sweeps of feed-forward layers, norms and positions (docs/results/*/runs.csv). Everything is vectorized over
sweeps.
"""

import numpy as np
from scipy import stats

from lm.sweeps.tuning import parabola_vertex

CURVATURE = 0.028  # loss = minimum + CURVATURE (log2(rate) - optimum)^2
SEED_SD = 0.007  # of a seed: the same in both variants of a pair and at all rates
NOISE_SD = 0.009  # of each run
N_RATES = 5
MIDDLE = N_RATES // 2

RULES = {"vertex": 2, "best rate": 2, "vertex, 3 tuning seeds": 3}  # the tuning seeds of each rule


def p_values(rule: str, n_seeds: int, difference: float, apart: float | None, n_sweeps: int, draw) -> np.ndarray:
    """Return the p-values of simulated sweeps.

    Args:
        rule: a key of RULES.
        n_seeds: fresh pairs of a sweep.
        difference: the true difference of the variants' minima, in nats per token.
        apart: the distance of their optima in steps of the grid; None: both are anywhere within a step.
        n_sweeps: how many sweeps.
        draw: a random generator of NumPy.
    """
    optima_W2 = MIDDLE + draw.uniform(-0.5, 0.5, (n_sweeps, 2))
    if apart is not None:
        optima_W2[:, 1] = optima_W2[:, 0] + apart
    seeds_WN = draw.normal(0, SEED_SD, (n_sweeps, n_seeds))
    losses = []
    for optimum_W, minimum in zip(optima_W2.T, (difference, 0.0), strict=True):
        x_W = chosen(rule, optimum_W, draw)
        noise_WN = draw.normal(0, NOISE_SD, (n_sweeps, n_seeds))
        losses.append(minimum + CURVATURE * (x_W - optimum_W)[:, None] ** 2 + seeds_WN + noise_WN)
    return stats.ttest_rel(*losses, axis=1).pvalue


def chosen(rule: str, optimum_W: np.ndarray, draw) -> np.ndarray:
    """Return the rates of the final runs, in steps of the grid from its first rate.

    The grid is wide enough that the best rate is never at an edge: a sweep extends it there.
    """
    x_R, n_tuning = np.arange(-2, N_RATES + 2), RULES[rule]
    shape = (len(optimum_W), n_tuning, len(x_R))
    noise = draw.normal(0, SEED_SD, (*shape[:2], 1)) + draw.normal(0, NOISE_SD, shape)
    loss_WR = CURVATURE * (x_R - optimum_W[:, None]) ** 2 + noise.mean(axis=1)
    best_W = loss_WR[:, 1:-1].argmin(axis=1) + 1
    if rule == "best rate":
        return x_R[best_W].astype(float)
    near_W3 = best_W[:, None] + np.array([-1, 0, 1])
    return parabola_vertex(x_R[near_W3], np.take_along_axis(loss_WR, near_W3, axis=1))
