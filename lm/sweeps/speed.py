"""The speed of variants beside that of the baseline, and differences at equal seconds.

`lm.sweep --speed` writes speeds.json (lm/sweeps/speedometer.py). Reports add a table. This module
does not import jax.

A variant that trains r times as many tokens per second as its control has, after the same seconds,
made r times as many steps. The loss of the control changes by about s ln r in so many more steps,
with s = dL / d ln(steps) < 0 from shorter runs of the baseline, each with a schedule of its own. The
difference at equal seconds is the one at equal tokens plus s ln r. A straight line does not reach
far: there is none for r beyond FARTHEST.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lm.sweeps import statistics
from lm.sweeps.analysis import CELL, CLAIM, MEAN, PLACEBO, Analysis, Claim
from lm.sweeps.declare import in_cell
from lm.sweeps.statistics import Estimate
from lm.system.errors import UserError
from lm.system.files import NUMBER, read_json, to_json, write_text

SPEEDS = "speeds.json"
ADVICE = "delete it, and measure again with python -m lm.sweep --speed"
FARTHEST = 1.5
SHORTER = 0.8  # of the steps of the baseline
_SHAPE = {"ratios": {str: [NUMBER]}, "slopes": {str: [NUMBER]}}


class Speeds(NamedTuple):
    """What `lm.sweep --speed` measured.

    Attributes:
        ratios: by variant, its tokens per second over those of the baseline of its cell, of
            dispatches one after the other.
        slopes: by cell, dL / d ln(steps) of the baseline, of each seed.
    """

    ratios: dict[str, list[float]]
    slopes: dict[str, list[float]]


class Row(NamedTuple):
    """A row of the table of speeds."""

    claim: Claim
    ratio: float  # tokens per second of the variant over those of what it is compared with
    interval: tuple[float, float]
    at_equal_seconds: Estimate | None


def read_speeds(directory: Path) -> Speeds | None:
    """Read the speeds of a sweep or a page; None if they were not measured."""
    path = directory / SPEEDS
    if not path.is_file():
        return None
    content = read_json(path, _SHAPE, ADVICE)
    speeds = Speeds(content["ratios"], content["slopes"])
    for name, values in (speeds.ratios | speeds.slopes).items():
        if len(values) < 2 or not all(map(math.isfinite, values)):
            raise UserError(f"{path} is corrupted: {name} has not two numbers; {ADVICE}")
    if not all(x > 0 for ratios in speeds.ratios.values() for x in ratios):
        raise UserError(f"{path} is corrupted: a ratio is not above 0; {ADVICE}")
    return speeds


def write_speeds(directory: Path, speeds: Speeds) -> None:
    write_text(directory / SPEEDS, to_json(speeds._asdict(), indent=1) + "\n")


def rows(a: Analysis, speeds: Speeds) -> list[Row]:
    """Return the rows for the claims, single cells and placebos whose speed was measured."""
    claims = a.of_kind(CLAIM) + a.of_kind(CELL) + a.of_kind(PLACEBO)
    measured = (_row(a, claim, speeds) for claim in claims)
    return [row for row in measured if row]


def _row(a: Analysis, claim: Claim, speeds: Speeds) -> Row | None:
    in_cells = a.in_cells(claim) if claim.cell == MEAN else [claim]
    log_ratios: list[Estimate] = []
    differences: list[Estimate] = []
    for c in in_cells:
        log_ratio = _log_ratio(a, c, speeds)
        if log_ratio is None:
            return None
        log_ratios.append(log_ratio)
        slope = speeds.slopes.get(c.cell)
        if c.difference and slope and abs(log_ratio.mean) <= math.log(FARTHEST):
            of_slope = statistics.estimate(slope)
            differences.append(at_equal_seconds(c.difference, log_ratio, of_slope))
    difference = _mean(differences) if len(differences) == len(in_cells) else None
    log_mean = _mean(log_ratios)
    low, high = log_mean.interval()
    return Row(claim, math.exp(log_mean.mean), (math.exp(low), math.exp(high)), difference)


def _mean(cells: Sequence[Estimate]) -> Estimate:
    return statistics.mean_over_cells(cells).mean if len(cells) > 1 else cells[0]


def _log_ratio(a: Analysis, claim: Claim, speeds: Speeds) -> Estimate | None:
    """Return the logarithm of the ratio of both speeds; None if one was not measured."""

    def log_speed(arm: str) -> Estimate | None:
        ratios = speeds.ratios.get(in_cell(arm, claim.cell))
        return statistics.estimate([math.log(x) for x in ratios]) if ratios else None

    of_variant, of_against = log_speed(claim.variant), log_speed(claim.against)
    if claim.against == a.record["baseline"]:
        return of_variant
    if claim.variant == a.record["baseline"]:
        return of_against._replace(mean=-of_against.mean) if of_against else None
    if of_variant is None or of_against is None:
        return None
    return statistics.difference(of_variant, of_against)


def at_equal_seconds(difference: Estimate, log_ratio: Estimate, slope: Estimate) -> Estimate:
    """Return the difference in loss after the same seconds, from the one after the same tokens.

    The errors of the three are taken as independent.

    >>> d, r, s = Estimate(-0.02, 0.003, 9, 10), Estimate(math.log(0.9), 0, 8, 9), Estimate(-0.2, 0, 3, 4)
    >>> round(at_equal_seconds(d, r, s).mean, 4)
    0.0011
    """
    moved = slope.mean * log_ratio.mean
    terms = [(difference.se, difference.df)]
    terms += [(slope.mean * log_ratio.se, log_ratio.df), (log_ratio.mean * slope.se, slope.df)]
    variance = sum(se**2 for se, _ in terms)
    df = difference.df
    if variance > 0:
        df = variance**2 / sum(se**4 / of for se, of in terms if of > 0)
    return difference._replace(mean=difference.mean + moved, se=math.sqrt(variance), df=df)
