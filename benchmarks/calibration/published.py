"""The noise and the tuning curves of a published study: what the simulated sweeps are made of."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.sweeps.analysis import CLAIM, PLACEBO, Analysis
from lm.sweeps.report import read_page
from lm.sweeps.results import choices_of, runs_from_csv
from lm.sweeps.tuning import Choice, above_optimum

STUDY = Path("docs/results/changes_2026")
OFFSETS = (-2.0, -0.75, 0.25, 1.1, 2.0)  # steps from the vertex, at which the noise is measured
EDGES = (-3.0, -1.25, -0.25, 0.75, 1.5, 3.0)  # of the bins around them


class Cell(NamedTuple):
    """A cell of the study.

    The loss of an arm x steps from its optimum is curvature (a x^2 + b x^3 + c x^4) above its
    lowest. The polynomial is fitted to the points of all arms that tune the rate alone. It is not
    the curve that the sweeps fit.
    """

    name: str
    quartic: tuple[float, float, float]  # a, b, c
    log_curvature: float  # mean over the arms of ln(curvature)
    log_curvature_sd: float
    noise: tuple[float, ...]  # sd of a tuning run at OFFSETS, without the effect of its seed
    decay_curvature: float  # per step of the list of weight decays, median over the update rules
    of_run: float  # sd of the test loss of a final run, without what it shares with others
    of_start: float  # sd of the part of the initial values, which an arm and the base share

    def above(self, x: np.ndarray, curvature: np.ndarray | float) -> np.ndarray:
        a, b, c = self.quartic
        return curvature * x**2 * (a + b * x + c * x**2)

    def noise_at(self, x: np.ndarray) -> np.ndarray:
        return np.exp(np.interp(x, OFFSETS, np.log(self.noise)))


def published_cells(page: Path = STUDY) -> list[Cell]:
    """Return the cells of a published page of the rule VERTEX or CURVE."""
    a = read_page(page)
    choices = choices_of(a.record, runs_from_csv(page / "runs.csv"))
    cells = []
    for name in a.record["cells"]:
        arms = [arm for arm, about in a.record["variants"].items() if about["cell"] == name]
        chosen = [choices[arm] for arm in arms]
        curvatures, x, losses, squares = tuning_curves(chosen)
        powers = np.stack([x**2, x**3, x**4], axis=1)
        bins = np.digitize(x, EDGES)
        sds = [
            math.sqrt(np.mean(squares[bins == i])) for i in range(1, len(EDGES)) if any(bins == i)
        ]
        sds += sds[-1:] * (len(OFFSETS) - len(sds))  # no arm has a point there
        cells.append(
            Cell(
                name,
                tuple(np.linalg.lstsq(powers, losses)[0].tolist()),
                float(np.mean(np.log(curvatures))),
                float(np.std(np.log(curvatures), ddof=1)),
                tuple(sds),
                decay_curvature(chosen),
                *final_noise(*final_losses(a, "base", name)),
            )
        )
    return cells


def tuning_curves(
    choices: list[Choice],
) -> tuple[list[float], np.ndarray, np.ndarray, np.ndarray]:
    """Return what the tuning runs of arms with one list say.

    Returns:
        The fitted curvatures; and for all points their distance from the vertex, their loss above
        the lowest in units of the curvature, and their squared residual between two seeds.
    """
    curvatures: list[float] = []
    points: list[tuple[float, float, float]] = []
    for choice in choices:
        if len(choice.lines) != 1 or not choice.lines[0].is_valley:
            continue
        line = choice.lines[0]
        curve = line.curve(choice.shape)
        curvature = float(curve.curvature)
        if not curvature > 0 or abs(curve.vertex) > 1:
            continue
        curvatures.append(curvature)
        x = line.x[line.used] - float(curve.vertex)
        losses_PS = np.array(
            [f.losses for f, used in zip(line.outcomes, line.used, strict=True) if used]
        )
        means = losses_PS.mean(axis=1)
        lowest = np.mean(means - above_optimum(x, choice.shape, curvature))
        half = (losses_PS[:, 0] - losses_PS[:, 1]) / math.sqrt(2)
        squares = (half - half.mean()) ** 2 * len(half) / (len(half) - 1)
        points += zip(x, (means - lowest) / curvature, squares, strict=True)
    x, losses, squares = np.array(points).T
    return curvatures, x, losses, squares


def decay_curvature(choices: list[Choice]) -> float:
    """Return the median curvature along the second list of arms that have two, per step."""
    found = []
    for choice in choices:
        if len(choice.lines) == 2 and choice.lines[1].is_valley:
            line = choice.lines[1]
            step = float(np.mean(np.diff(line.x)))
            found.append(float(line.curve(0.0).curvature) * step**2)
    return float(np.median(found)) if found else 0.02


def final_losses(a: Analysis, against: str, cell: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the test losses by seed of a baseline (S), of its placebos (P, S), and of the arms that
    are compared with it (A, S), without those that got stuck.
    """
    of_arm = {v.about["arm"]: v.losses for v in a.variants.values() if v.about["cell"] == cell}
    arms = [c.variant for c in a.of_kind(CLAIM) if c.against == against and c.difference]
    placebos = dict.fromkeys(c.variant for c in a.of_kind(PLACEBO) if c.against == against)

    def losses(names) -> np.ndarray:
        return np.array([list(of_arm[name].values()) for name in names])

    return losses([against])[0], losses(placebos), losses(arms)


def final_noise(
    base_S: np.ndarray, placebos_PS: np.ndarray, arms_AS: np.ndarray
) -> tuple[float, float]:
    """Return `Cell.of_run` and `Cell.of_start`.

    An arm starts from the values of the base, a placebo from others. So the differences of the arms
    from the base have twice the variance of a run, and those from a placebo twice that of both
    parts. What else a seed decides, the order of the data, is the same in all of them.
    """
    from_base = _variance(arms_AS - base_S)
    from_placebos = _variance(arms_AS - placebos_PS[:, None])
    of_start = max(0.0, (from_placebos - from_base) / 2)
    return math.sqrt(from_base / 2), math.sqrt(of_start)


def draw_starts(sd, n_controls: int, n_arms: int, shape: Sequence[int], draw) -> np.ndarray:
    """Return the part of the initial values in the losses of the controls, and then of the arms.

    Args:
        sd: `Cell.of_start`, or an array that broadcasts against `shape`.
        n_controls: the base, whose values the arms have too, and placebos, which have their own.
        shape: of the result (simulations, n_controls + n_arms, ...), without its second axis.
        draw: a generator of random numbers.
    """
    simulations, *rest = shape
    of_controls = draw.normal(0, 1, (simulations, n_controls, *rest)) * sd
    of_arms = np.repeat(of_controls[:, :1], n_arms, axis=1)
    return np.concatenate([of_controls, of_arms], axis=1)


def variance_by_weight(against: str, weights: Sequence[float], page: Path = STUDY) -> list[float]:
    """Return the variance over seeds of an arm minus its control, in units of that of a run.

    The control is the variant `against` with each of the weights; its placebos share the rest. On
    average over the arms that are compared with it, and over the cells.
    """
    a = read_page(page)
    found = []
    for cell in a.record["cells"]:
        base_S, placebos_PS, arms_AS = final_losses(a, against, cell)
        of_runs = _variance(np.concatenate([base_S[None], placebos_PS, arms_AS]))
        of_placebos_S = placebos_PS.mean(axis=0)
        controls = [weight * base_S + (1 - weight) * of_placebos_S for weight in weights]
        found.append([_variance(arms_AS - control_S) / of_runs for control_S in controls])
    return np.mean(found, axis=0).tolist()


def _variance(losses_S: np.ndarray) -> float:
    """Return the variance over seeds, on average over the other axes."""
    return float(losses_S.var(axis=-1, ddof=1).mean())
