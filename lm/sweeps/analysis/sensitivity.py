"""The effect of the learning rate: the difference of two variants at each rate, and the sensitivity of a variant.

These numbers are descriptive; the tests of tuned variants are in `lm.sweeps.analysis.looks`.
"""

import math
from typing import NamedTuple

from lm.sweeps.design.seeds import seeds_of
from lm.sweeps.statistics import inference
from lm.sweeps.storage.results import Results, rate_from, stuck_above


class RateDifference(NamedTuple):
    """The difference of two variants at one learning rate.

    Attributes:
        rate: the learning rate of both.
        phase: "final" if both trained on the fresh seeds at this rate, else "tuning".
        difference: the difference of their test losses, paired by seed; None if a run diverged.
        n: the number of seeds.
        n_diverged, n_stuck: how many of their runs, both variants together.
    """

    rate: float
    phase: str
    difference: inference.Difference | None
    n: int
    n_diverged: int
    n_stuck: int


def rate_differences(results: Results, record: dict, a: str, b: str) -> list[RateDifference]:
    """Return a - b at each learning rate that both trained at, in ascending order; none if their texts differ.

    Fresh seeds and tuning seeds are not mixed: fresh ones exist only at rates that the tuning seeds chose.

    Args:
        results, record: the sweep.
        a, b: the names of the two variants.
    """
    if len({record["variants"][name]["data"]["fingerprint"] for name in (a, b)}) > 1:
        return []
    rates = sorted(set(record["variants"][a]["grid"]) & set(record["variants"][b]["grid"]))
    phases = [(phase, seeds_of(record[key], a)) for phase, key in (("final", "seeds"), ("tuning", "tuning_seeds"))]
    found = []
    for rate in rates:
        of_rate = [_rate_difference(results, record, (a, b), rate, phase) for phase in phases]
        found += [difference for difference in of_rate if difference][:1]
    return found


def _rate_difference(
    results: Results, record: dict, pair: tuple[str, str], rate: float, phase: tuple[str, list[int]]
) -> RateDifference | None:
    """Return the difference over the seeds that both variants trained in a phase, if any."""
    name, seeds = phase
    runs = [[results.runs.get((name, variant, rate, seed)) for variant in pair] for seed in seeds]
    losses = [[run["test_loss"] for run in both] for both in runs if None not in both]
    if not losses:
        return None
    stuck = [stuck_above(record, variant, "test") for variant in pair]
    n_diverged = sum(both.count(None) for both in losses)
    n_stuck = sum(loss is not None and loss > limit for both in losses for loss, limit in zip(both, stuck, strict=True))
    difference = None if n_diverged else inference.paired_difference(*zip(*losses, strict=True))
    return RateDifference(rate, name, difference, len(losses), n_diverged, n_stuck)


def sensitivity(results: Results, record: dict, variant: str) -> float:
    """Return the learning-rate sensitivity over a variant's grid, from the validation losses of the tuning runs.

    The ceiling is the loss of the unigram baseline: see `lm.sweeps.statistics.inference.learning_rate_sensitivity`.

    Returns:
        The sensitivity in nats per token; nan if the variant has no tuning runs, and in a random search, in which more
        than the learning rate varies.
    """
    described = record["variants"][variant]
    if len(described["grid"]) < 2 or rate_from(record, variant) or record.get("search"):
        return math.nan
    seeds = seeds_of(record["tuning_seeds"], variant)
    losses = [[results.runs["tuning", variant, rate, seed]["val_loss"] for seed in seeds] for rate in described["grid"]]
    losses = [[math.nan if loss is None else loss for loss in row] for row in losses]
    return inference.learning_rate_sensitivity(losses, described["data"]["unigram"]["validation"])
