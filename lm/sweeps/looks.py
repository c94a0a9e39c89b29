"""Test the declared comparisons of a sweep, look by look.

With looks at 5, 8, 12 and 20 seeds, every comparison is tested after 5. Only the variants of comparisons that are then
undecided train with more seeds, until they are decided or after the last look. What is decided follows from the
finished runs alone, so that all processes of a sweep, a resumed sweep and its report decide alike.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from lm.sweeps import statistics
from lm.sweeps.optimum import estimate_optimum
from lm.sweeps.results import Results, best_rate, missing_runs
from lm.sweeps.statistics import Difference


class PairTest(NamedTuple):
    """The tests of one comparison at one look.

    Attributes:
        look: the look, counted from 1.
        n_seeds: the number of seeds at that look.
        difference: at the best rates of the grid; None if runs diverged or are not finished.
        at_optimum: at the estimated optima; None if a variant has no estimate.
        p_adjusted, p_at_optimum: their p-values after Holm's correction.
    """

    look: int
    n_seeds: int
    difference: Difference | None
    at_optimum: Difference | None
    p_adjusted: float = math.nan
    p_at_optimum: float = math.nan

    @property
    def is_significant(self) -> bool:
        return is_significant(self.difference, self.p_adjusted, self.at_optimum, self.p_at_optimum)

    @property
    def is_undecided(self) -> bool:
        """Return whether more seeds could decide; no seeds remove a diverged run or vary losses that are constant."""
        d = self.difference
        return d is not None and d.low < d.high and not self.is_significant


def is_significant(d: Difference | None, p: float, at_optimum: Difference | None, p_at_optimum: float) -> bool:
    """Return whether a difference is significant, and also that at the estimated optima if there is one.

    Args:
        d, p: the difference at the best rates of the grid, and its corrected p-value.
        at_optimum, p_at_optimum: the same at the estimated optima.
    """
    if d is None or not p < 1 - statistics.LEVEL:
        return False
    return at_optimum is None or (at_optimum.mean * d.mean > 0 and p_at_optimum < 1 - statistics.LEVEL)


def at_look(record: dict, n: int) -> dict:
    """Return the record of a sweep with its first n fresh seeds only."""
    return record | {"seeds": record["seeds"][:n]}


def pair_tests(record: dict, results: Results) -> list[PairTest]:
    """Return the tests of the declared comparisons, each at the look at which it stopped.

    A comparison whose runs are not finished stays at the look that needs them.
    """
    pairs, looks = record["comparisons"], record["looks"]
    return follow(len(pairs), len(looks), lambda k, i: _pair_test(record, results, pairs[k], i, len(pairs)))


def follow(n_comparisons: int, n_looks: int, test: Callable[[int, int], PairTest]) -> list[PairTest]:
    """Test every comparison at the first look, and the undecided ones at the next, until none is left or the last look.

    Holm's correction is over all comparisons, each with the p-value of the look at which it is. Those that are decided
    have the smallest p-values, so that a later look of the others does not change them.

    Args:
        n_comparisons, n_looks: their numbers.
        test: (comparison, look), both counted from 0, -> its test without correction.
    """
    at = [0] * n_comparisons
    while True:
        found = [test(k, i) for k, i in enumerate(at)]
        p, p_at_optimum = (
            statistics.holm([math.nan if d is None else d.p for d in ds])
            for ds in ([t.difference for t in found], [t.at_optimum for t in found])
        )
        found = [t._replace(p_adjusted=p[k], p_at_optimum=p_at_optimum[k]) for k, t in enumerate(found)]
        undecided = [k for k, t in enumerate(found) if t.is_undecided and at[k] + 1 < n_looks]
        if not undecided:
            return found
        for k in undecided:
            at[k] += 1


def placebo_test(record: dict, results: Results) -> PairTest:
    """Return the test of the placebo against the baseline, at the first look and without correction."""
    fixed = record | {"looks": record["looks"][:1]}
    test = _pair_test(fixed, results, (record["placebo"], record["baseline"]), 0, 1)
    p, q = (math.nan if d is None else d.p for d in (test.difference, test.at_optimum))
    return test._replace(p_adjusted=p, p_at_optimum=q)


def _pair_test(record: dict, results: Results, pair, i: int, comparisons: int) -> PairTest:
    """Test a pair of variants at the i-th look."""
    n, share = record["looks"][i], statistics.shares(record["looks"])[i]
    found = PairTest(i + 1, n, None, None)
    if missing_runs(results, record, dict.fromkeys(pair, n)):
        return found
    losses, optima, seen = [], [], at_look(record, n)
    for name in pair:
        rate = best_rate(results, record, name)
        losses.append([results.runs["final", name, rate, seed]["test_loss"] for seed in seen["seeds"]])
        optima.append(estimate_optimum(results, seen, name, rate))
    if not any(None in own for own in losses):
        found = found._replace(difference=statistics.paired_difference(*losses, comparisons, share))
    if not any(optimum.missing for optimum in optima):
        values = [optimum.losses for optimum in optima]
        found = found._replace(at_optimum=statistics.paired_difference(*values, comparisons, share))
    return found


def seeds_needed(record: dict, results: Results) -> dict[str, int]:
    """Return by variant the number of fresh seeds that its comparisons need, as far as the finished runs tell."""
    needed = dict.fromkeys(record["variants"], record["looks"][0])
    for pair, test in zip(record["comparisons"], pair_tests(record, results), strict=True):
        for name in pair:
            needed[name] = max(needed[name], test.n_seeds)
    return needed
