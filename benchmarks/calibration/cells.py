"""The mean over cells (texts or sizes): how often its test and its intervals are wrong.

The effects of the cells are drawn from a normal distribution with mean `difference` and standard
deviation tau. The interval of the mean over these cells should cover the mean of their true
effects, and the prediction interval the estimate in one more cell.
"""

import numpy as np

from lm.sweeps.statistics import estimate, mean_over_cells

SD = 0.016  # of the paired differences: that of two runs, and of the error of their tuned rates


def simulate(n_cells: int, tau: float, n_seeds: int, n_sweeps: int, draw) -> dict[str, np.ndarray]:
    """Return each sweep's p-value of the mean if all effects are 0, and whether intervals cover."""
    effects_WC = np.zeros((n_sweeps, n_cells + 1))
    if tau:
        effects_WC = draw.normal(0, tau, effects_WC.shape)
    # some cells are noisier than others
    spread_C = SD * np.append(np.linspace(0.6, 1.4, n_cells), 1.0)
    answers = {"p": [], "mean": [], "prediction": []}
    for effects_C in effects_WC:
        noise_CN = draw.normal(0, spread_C[:, None], (n_cells + 1, n_seeds))
        *rows, new = effects_C[:, None] + noise_CN  # the last cell is the one to be predicted
        over = mean_over_cells([estimate(row) for row in rows])
        low, high = over.mean.interval()
        answers["p"].append(over.mean.p)
        answers["mean"].append(low <= effects_C[:-1].mean() <= high)
        answers["prediction"].append(over.prediction[0] <= new.mean() <= over.prediction[1])
    return {name: np.array(values) for name, values in answers.items()}
