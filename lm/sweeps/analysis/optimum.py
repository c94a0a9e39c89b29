"""Estimate a variant's test loss at its best learning rate, between the rates of the grid.

The best rate of a grid is up to half a step from the optimum, and the distance differs between variants. More seeds do
not reduce this error. Around its minimum the loss is close to a parabola in log2(learning rate). The minimum of the
parabola through the best rate and its two neighbors, which are trained on the same seeds, estimates the loss at the
optimum.
"""

from typing import NamedTuple

import numpy as np

from lm.sweeps.design.seeds import seeds_of
from lm.sweeps.statistics import inference
from lm.sweeps.storage.results import Results, neighbors, stuck_above

MAX_STEP = 2.0  # between neighboring rates; on coarser grids the loss is not close to a parabola


class Optimum(NamedTuple):
    """The estimated minimum of a variant.

    Attributes:
        losses: its jackknife pseudo-values, one per seed; see `inference.pseudo_values`. None if missing.
        rate: the learning rate at the minimum; nan if missing.
        missing: the reason if there is no estimate, else "".
    """

    losses: np.ndarray | None
    rate: float
    missing: str = ""


def estimate_optimum(results: Results, record: dict, variant: str, best: float) -> Optimum:
    """Estimate the minimum over learning rates of a variant's test loss.

    Args:
        results, record: the sweep.
        variant: the name of the variant.
        best: its best rate in the grid.
    """
    if record.get("search"):
        reason = "a random search has no rates next to the best one at which all else is equal"
        return Optimum(None, float("nan"), reason)
    rates = neighbors(record["variants"][variant]["grid"], best)
    seeds = seeds_of(record["seeds"], variant)
    losses = [[results.runs["final", variant, rate, seed]["test_loss"] for rate in rates] for seed in seeds]
    if missing := _missing(rates, losses, stuck_above(record, variant, "test")):
        return Optimum(None, float("nan"), missing)
    losses, x = np.array(losses), np.log2(rates)

    def minimum(some: np.ndarray) -> float:
        return inference.parabola_minimum(x, some.mean(axis=0))[1]

    values = inference.pseudo_values(minimum, losses)
    if np.isnan(values).any():
        return Optimum(None, float("nan"), "the losses of three neighboring learning rates have no minimum")
    return Optimum(values, float(2 ** inference.parabola_minimum(x, losses.mean(axis=0))[0]))


def _missing(rates: list[float], losses: list[list[float | None]], stuck: float) -> str:
    """Return why these rates give no estimate; "" if they do."""
    if len(rates) < 3:
        return "the best learning rate is at the edge of its grid, or the only one"
    steps = np.divide(rates[1:], rates[:-1])
    if steps.max() > 1.001 * MAX_STEP:
        return f"neighboring learning rates differ by a factor of {steps.max():.3g}, more than {MAX_STEP:g}"
    if len(losses) < 2:
        return "there is only one seed"
    if any(loss is None or loss > stuck for row in losses for loss in row):
        return "a run at the best learning rate or a neighboring one diverged or got stuck"
    return ""
