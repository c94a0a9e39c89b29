"""The noise and the tuning curves of a published study: what the simulated sweeps are made of."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.sweeps.analysis import CLAIM, PLACEBO
from lm.sweeps.record import read_page_record
from lm.sweeps.report import read_page
from lm.sweeps.results import choices_of, final_runs, runs_from_csv
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
    final_noise: float  # sd of the test loss of a final run, without the effect of its seed
    final_seed: float  # sd of the effect of a seed, which all arms share

    def above(self, x: np.ndarray, curvature: np.ndarray | float) -> np.ndarray:
        a, b, c = self.quartic
        return curvature * x**2 * (a + b * x + c * x**2)

    def noise_at(self, x: np.ndarray) -> np.ndarray:
        return np.exp(np.interp(x, OFFSETS, np.log(self.noise)))


def published_cells(page: Path = STUDY) -> list[Cell]:
    """Return the cells of a published page of the rule VERTEX or CURVE."""
    record = read_page_record(page)
    runs = runs_from_csv(page / "runs.csv")
    choices = choices_of(record, runs)
    cells = []
    for name in record["cells"]:
        arms = [arm for arm, about in record["variants"].items() if about["cell"] == name]
        final = [final_runs(record, runs, arm, choices[arm].point) for arm in arms]
        noise, seed = final_noise(
            np.array([[r.test_loss or math.nan for r in f.values()] for f in final])
        )
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
                noise,
                seed,
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


def final_noise(losses_AS: np.ndarray) -> tuple[float, float]:
    """Return the sd of a final run and that of the effect of a seed: a two-way analysis of variance.

    Arms with more than twice the usual spread, which get stuck on some seeds, are left out.
    """
    centered_AS = losses_AS - losses_AS.mean(axis=1, keepdims=True)
    spread_A = centered_AS.std(axis=1, ddof=1)
    centered_AS = centered_AS[spread_A < 2 * np.nanmedian(spread_A)]
    n_arms, n_seeds = centered_AS.shape
    of_seed_S = centered_AS.mean(axis=0)
    noise = np.sum((centered_AS - of_seed_S) ** 2) / ((n_arms - 1) * (n_seeds - 1))
    seed = max(0.0, of_seed_S.var(ddof=1) - noise / n_arms)
    return math.sqrt(noise), math.sqrt(seed)


def variance_by_weight(against: str, weights: Sequence[float], page: Path = STUDY) -> list[float]:
    """Return the variance over seeds of an arm minus its control, in units of that of a run.

    The control is the variant `against` with each of the weights; its placebos share the rest. On
    average over the arms that are compared with it, without those that got stuck, and over the cells.
    """
    a = read_page(page)
    arms = [c.variant for c in a.of_kind(CLAIM) if c.against == against and c.difference]
    placebos = list(dict.fromkeys(c.variant for c in a.of_kind(PLACEBO) if c.against == against))
    found = []
    for cell in a.record["cells"]:
        of_arm = {v.about["arm"]: v.losses for v in a.variants.values() if v.about["cell"] == cell}

        def losses(names: Sequence[str], of_arm=of_arm) -> np.ndarray:
            return np.array([list(of_arm[name].values()) for name in names])

        runs_AS = losses([against, *placebos, *arms])
        of_runs = runs_AS.var(axis=1, ddof=1).mean()
        of_placebos_S = losses(placebos).mean(axis=0)
        controls = [
            weight * losses([against])[0] + (1 - weight) * of_placebos_S for weight in weights
        ]
        differences = [losses(arms) - control_S for control_S in controls]
        found.append([d_AS.var(axis=1, ddof=1).mean() / of_runs for d_AS in differences])
    return np.mean(found, axis=0).tolist()
