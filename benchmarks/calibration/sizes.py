"""Compute multipliers (lm/sweeps/statistics/scaling.py) in sweeps with sizes: the coverage of their intervals.

The loss at the optimum falls with the training FLOPs: the variant reaches with C FLOPs the loss that the other reaches
with m C. The optimum of each variant at each size is anywhere between two rates of the grid.
"""

import numpy as np

from benchmarks.calibration.rates import simulate_variant
from lm.sweeps.statistics import scaling
from lm.text_tables import table

FLOPS = np.array([1.1e11, 5.1e11, 1.6e12, 7.5e12])  # of one run at each size of configs/sweeps/scale_swiglu.py
LN_M = {  # the true ln m at each size
    "m = 1": np.zeros(4),
    "m = 1.15": np.full(4, np.log(1.15)),
    "m = 1.7": np.full(4, np.log(1.7)),
    "m = 1.05 to 1.30": np.interp(np.log(FLOPS), np.log(FLOPS[[0, -1]]), np.log([1.05, 1.30])),
}
N_SEEDS = 5


def simulate(n_sweeps: int) -> str:
    """Return a table: how often the intervals cover ln m, its mean and its trend, and how often the mean is not 0."""
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
    return table([header, *rows], right=range(2, len(header)))


def ladders(ln_m: np.ndarray, n_sweeps: int) -> dict[str, list]:
    """Return the intervals of ln m, its mean over sizes and its trend, from simulated sweeps with sizes."""
    draw = np.random.default_rng(0)
    found = {"best rate": [], "optimum": []}
    for _ in range(n_sweeps):
        runs = [[simulate_variant(2 + draw.uniform(), N_SEEDS, draw) for _ in range(2)] for _ in FLOPS]
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
