"""How often two variants of a simulated sweep differ, at the vertex or at the best rate.

The loss of a variant is a parabola in log2(learning rate). Tuning runs cover a grid; both variants
then train on fresh paired seeds, at the best rate of the grid (the old rule) or at the vertex of
the parabola through the tuning losses (the present rule, `lm.sweeps.tuning`), and a plain paired t
test compares them. The parameters are those of the published sweeps of feed-forward layers, norms
and positions (docs/results/*/runs.csv). Everything is vectorized over sweeps.
"""

import numpy as np
from scipy import stats

from lm.sweeps.tuning import parabola_vertex

CURVATURE = 0.028  # loss = minimum + CURVATURE (log2(rate) - optimum)^2
SEED_SD = 0.007  # of a seed: the same in both variants of a pair and at all rates
NOISE_SD = 0.009  # of each run
N_RATES = 5
MIDDLE = N_RATES // 2

# of a second list: loss += DECAY_CURVATURE y^2 + 2 CROSS sqrt(both curvatures) x y
DECAY_CURVATURE = 0.01
CROSS = 0.4

# The tuning seeds of each rule.
RULES = {
    "vertex": 2,
    "best rate": 2,
    "vertex, 3 tuning seeds": 3,
    "vertex, 2 lists": 2,
    "vertex, 2 lists, 4 seeds": 4,
}


def p_values(
    rule: str, n_seeds: int, difference: float, apart: float | None, n_sweeps: int, draw
) -> np.ndarray:
    """Return the p-values of n_sweeps simulated sweeps with n_seeds fresh pairs each.

    Args:
        rule: a key of RULES.
        difference: the true difference of the variants' minima, in nats per token.
        apart: the distance of their optima in steps of the grid; None: both are anywhere within a
            step.
    """
    optima_W2 = MIDDLE + draw.uniform(-0.5, 0.5, (n_sweeps, 2))
    if apart is not None:
        optima_W2[:, 1] = optima_W2[:, 0] + apart
    seeds_WN = draw.normal(0, SEED_SD, (n_sweeps, n_seeds))
    losses = []
    for optimum_W, minimum in zip(optima_W2.T, (difference, 0.0), strict=True):
        if "2 lists" in rule:
            above_W = above_by_two_lists(RULES[rule], optimum_W - MIDDLE, draw)
        else:
            above_W = CURVATURE * (chosen(rule, optimum_W, draw) - optimum_W) ** 2
        noise_WN = draw.normal(0, NOISE_SD, (n_sweeps, n_seeds))
        losses.append(minimum + above_W[:, None] + seeds_WN + noise_WN)
    return stats.ttest_rel(*losses, axis=1).pvalue


def chosen(rule: str, optimum_W: np.ndarray, draw) -> np.ndarray:
    """Return the rates of the final runs, in steps of the grid from its first rate.

    The grid is wide enough that the best rate is never at an edge: a sweep extends it there.
    """
    x_R = np.arange(-2, N_RATES + 2)
    n_tuning = RULES[rule]
    shape = (len(optimum_W), n_tuning, len(x_R))
    noise = draw.normal(0, SEED_SD, (*shape[:2], 1)) + draw.normal(0, NOISE_SD, shape)
    loss_WR = CURVATURE * (x_R - optimum_W[:, None]) ** 2 + noise.mean(axis=1)
    best_W = loss_WR[:, 1:-1].argmin(axis=1) + 1
    if rule == "best rate":
        return x_R[best_W].astype(float)
    near_W3 = best_W[:, None] + np.array([-1, 0, 1])
    return parabola_vertex(x_R[near_W3], np.take_along_axis(loss_WR, near_W3, axis=1))


def above_by_two_lists(n_tuning: int, optimum_W: np.ndarray, draw) -> np.ndarray:
    """Return the excess loss of the final runs of a sweep that tunes two values by lists.

    That is at the vertex in each direction through the best point of the grid, which has 5 x 5
    points after extensions and one more on each side. The optimum of the second value is anywhere
    within a step.
    """
    optima_W2 = np.stack([optimum_W, draw.uniform(-0.5, 0.5, len(optimum_W))], axis=1)

    def above(xy):
        """Evaluate the paraboloid at points (W or 1, ..., 2)."""
        x, y = np.moveaxis(xy - optima_W2.reshape(-1, *[1] * (xy.ndim - 2), 2), -1, 0)
        product = 2 * CROSS * np.sqrt(CURVATURE * DECAY_CURVATURE) * x * y
        return CURVATURE * x**2 + DECAY_CURVATURE * y**2 + product

    n = len(optimum_W)
    values = np.arange(-3, 4)
    grid = np.stack(np.meshgrid(values, values, indexing="ij"), axis=-1)[None]
    noise_sd = NOISE_SD / np.sqrt(n_tuning)
    loss_WXY = above(grid) + draw.normal(0, noise_sd, (n, len(values), len(values)))
    best_W = loss_WXY[:, 1:-1, 1:-1].reshape(n, -1).argmin(axis=1)
    i_W, j_W = (index + 1 for index in np.divmod(best_W, len(values) - 2))
    near_3 = np.array([-1, 0, 1])
    w = np.arange(n)[:, None]
    rows = i_W[:, None] + near_3
    columns = j_W[:, None] + near_3
    x_W = parabola_vertex(values[rows], loss_WXY[w, rows, j_W[:, None]])
    y_W = parabola_vertex(values[columns], loss_WXY[w, i_W[:, None], columns])
    return above(np.stack([x_W, y_W], axis=-1))
