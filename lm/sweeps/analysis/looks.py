"""Test the declared comparisons of a sweep, look by look.

With looks at 5, 8, 12 and 20 seeds, every comparison is tested after 5. Only the variants of comparisons that are then
undecided train with more seeds, until they are decided or the last look is reached. The decisions depend on the
finished runs alone, so all processes of a sweep, a resumed sweep and its report make the same ones.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lm.sweeps.analysis.optimum import estimate_optimum
from lm.sweeps.design.axes import size_of
from lm.sweeps.design.placebo import placebo_pair
from lm.sweeps.design.seeds import first_seeds, seeds_of
from lm.sweeps.statistics import inference
from lm.sweeps.statistics.inference import Difference
from lm.sweeps.statistics.margins import p_beyond, p_equivalent
from lm.sweeps.statistics.moderation import NO_PRIOR, Prior, fit_prior
from lm.sweeps.storage.results import Results, best_rate, missing_runs, stuck_above


class PairTest(NamedTuple):
    """The tests of one comparison at one look.

    Attributes:
        look: the look, counted from 1.
        n_seeds: the number of seeds at that look.
        difference: at the best rates of the grid; None if runs diverged or are not finished, or if all got stuck.
        at_optimum: at the estimated optima; None if a variant has no estimate.
        same_text: whether both losses are on the same text, and so can be compared.
        p_adjusted, p_at_optimum: the p-values of the two differences after Holm's correction.
        p_beyond, p_equivalent: p-values of the tests in `lm.sweeps.statistics.margins` after Holm's correction; with an
            estimate at the optimum, the larger one of both estimates, because an answer needs both.
        leaves_out_tuning: whether the two were tuned and one has no estimate at the optimum. Then the p-values leave
            out how far their best rates are from the optima, and there is no claim.
    """

    look: int
    n_seeds: int
    difference: Difference | None
    at_optimum: Difference | None
    same_text: bool = True
    p_adjusted: float = math.nan
    p_at_optimum: float = math.nan
    p_beyond: float = math.nan
    p_equivalent: float = math.nan
    leaves_out_tuning: bool = False

    @property
    def is_significant(self) -> bool:
        return is_significant(self)

    @property
    def verdict(self) -> str:
        """Return "beyond the margin", "different", "equivalent" or "undecided", else why there is no answer.

        "" without a difference. Only "undecided" needs more seeds: they would not undo a divergence, give an estimate
        at the optimum, or make constant losses vary.
        """
        d, level = self.difference, 1 - inference.LEVEL
        if not self.same_text:
            return "no conclusion"
        if d is None:
            return ""
        if d.sd == 0:
            return "equal losses" if d.mean == 0 else "no p-value"
        if self.leaves_out_tuning:
            return "no claim"
        if self.is_significant and self.p_beyond < level:
            return "beyond the margin"
        if self.p_equivalent < level:
            return "equivalent"
        return "different" if self.is_significant else "undecided"


def is_significant(test) -> bool:
    """Return whether a difference is significant, and also that at the estimated optima if there is one.

    After tuning without an estimate at the optima it is not: at the best rates alone, more than 1 of 20 equal pairs
    differ (`benchmarks/calibration/rates.py`).

    Args:
        test: a PairTest, a Comparison or an Interaction.
    """
    level, at_optimum = 1 - inference.LEVEL, test.at_optimum
    if test.difference is None or test.leaves_out_tuning or not test.p_adjusted < level:
        return False
    return at_optimum is None or (at_optimum.mean * test.difference.mean > 0 and test.p_at_optimum < level)


def was_tuned(record: dict, *names: str) -> bool:
    """Return whether any of these variants chose its learning rate."""
    return bool(record.get("search")) or any(len(record["variants"][name]["grid"]) > 1 for name in names)


def at_look(record: dict, n: int) -> dict:
    """Return the record of a sweep with its first n fresh seeds only."""
    return record | {"seeds": first_seeds(record["seeds"], n)}


def pair_tests(record: dict, results: Results) -> list[PairTest]:
    """Return the tests of the declared comparisons, each at the look at which it stopped.

    A comparison whose runs are not finished stays at the look that needs them.
    """
    pairs, looks = record["comparisons"], record["looks"]
    priors = _priors(record, results)

    def test(k: int, i: int) -> PairTest:
        return _pair_test(record, results, pairs[k], i, priors)

    return follow(len(pairs), len(looks), test, record["margin"])


def follow(n_comparisons: int, n_looks: int, test: Callable[[int, int], PairTest], margin: float) -> list[PairTest]:
    """Test every comparison at the first look, and the undecided ones at the next, until none is left or the last look.

    Holm's correction is over all comparisons, each with the p-value of its latest look. A decided comparison keeps its
    corrected p-values.

    Args:
        n_comparisons, n_looks: their numbers.
        test: (comparison, look), both counted from 0, -> its test without correction.
        margin: that of the sweep.

    Returns:
        The test of each comparison at the look at which it stopped, with corrected p-values.
    """
    found, undecided = [test(k, 0) for k in range(n_comparisons)], list(range(n_comparisons))
    for i in range(n_looks):
        for k in undecided if i else ():
            found[k] = test(k, i)
        corrected = correct(found, margin)
        for k in undecided:
            found[k] = corrected[k]
        undecided = [k for k in undecided if found[k].verdict == "undecided"]
        if not undecided:
            break
    return found


def correct(tests: list[PairTest], margin: float) -> list[PairTest]:
    """Return the tests with p-values after Holm's correction, which is separate for each kind of test.

    Args:
        tests: the tests of one family, without correction.
        margin: that of the sweep.
    """

    def corrected(p: Callable[[Difference], float]) -> tuple[list[float], list[float]]:
        estimates = [t.difference for t in tests], [t.at_optimum for t in tests]
        return tuple(inference.holm([math.nan if d is None else p(d) for d in ds]) for ds in estimates)

    def larger(p: Callable[[Difference], float]) -> list[float]:
        at_rate, at_optimum = corrected(p)
        both = zip(at_rate, at_optimum, tests, strict=True)
        return [x if t.at_optimum is None else float(np.maximum(x, y)) for x, y, t in both]  # nan where one is

    columns = list(corrected(lambda d: d.p))
    columns += [larger(lambda d: p_beyond(d, margin)), larger(lambda d: p_equivalent(d, margin))]
    names = "p_adjusted", "p_at_optimum", "p_beyond", "p_equivalent"
    rows = zip(tests, *columns, strict=True)
    return [t._replace(**dict(zip(names, p_values, strict=True))) for t, *p_values in rows]


def placebo_test(record: dict, results: Results) -> PairTest:
    """Return the test of the placebo against the baseline, at the first look and without correction."""
    fixed = record | {"looks": record["looks"][:1], "comparisons": [placebo_pair(record)]}
    return pair_tests(fixed, results)[0]


class _Losses(NamedTuple):
    """The test losses of a variant, one per seed.

    Attributes:
        at_rate: at its best rate of the grid; None if runs diverged or all got stuck.
        at_optimum: at the estimated optimum; None without an estimate.
        any_stuck: whether any run at the best rate got stuck.
    """

    at_rate: list[float] | None
    at_optimum: np.ndarray | None
    any_stuck: bool


def _losses(record: dict, results: Results, name: str, n: int) -> _Losses | None:
    """Return the losses of a variant with n seeds; None if its runs are not finished."""
    if missing_runs(results, record, {name: n}):
        return None
    rate, seen = best_rate(results, record, name), at_look(record, n)
    losses = [results.runs["final", name, rate, seed]["test_loss"] for seed in seeds_of(seen["seeds"], name)]
    stuck = [loss is not None and loss > stuck_above(record, name, "test") for loss in losses]
    usable = None not in losses and not all(stuck)
    return _Losses(losses if usable else None, estimate_optimum(results, seen, name, rate).losses, any(stuck))


def _text(record: dict, name: str) -> str:
    return record["variants"][name]["data"]["fingerprint"]


def _group(record: dict, name: str) -> tuple[str, str, int]:
    """Return a variant's text, size and number of steps: the variants of a group share one prior.

    Sizes are separate groups, because runs of two sizes have less noise in common. So are runs of different length: a
    trained model that is evaluated with a changed layer has far less noise than one that is trained with it.
    """
    steps = record["variants"][name]["config"]["train"]["steps"]
    return _text(record, name), size_of(name, record.get("sizes") or ()), steps  # older versions have no sizes


def _priors(record: dict, results: Results) -> dict[tuple[tuple[str, str, int], str], Prior]:
    """Return the prior of the variances by group and estimate, from all variants of the group whose runs all trained.

    It uses the seeds of the first look, which all variants have, and so is the same at every look.
    """
    found, n = {}, record["looks"][0]
    for name in record["variants"]:
        losses = _losses(record, results, name, n)
        for estimate in ("at_rate", "at_optimum"):
            if losses and not losses.any_stuck and getattr(losses, estimate) is not None:
                found.setdefault((_group(record, name), estimate), []).append(getattr(losses, estimate))
    return {key: fit_prior(losses) for key, losses in found.items()}


def _pair_test(record: dict, results: Results, pair, i: int, priors: dict) -> PairTest:
    """Test a pair of variants at the i-th look, without correction."""
    n, share = record["looks"][i], inference.shares(record["looks"])[i]
    groups = [_group(record, name) for name in pair]
    found = PairTest(i + 1, n, None, None, same_text=_text(record, pair[0]) == _text(record, pair[1]))
    a, b = (_losses(record, results, name, n) for name in pair)
    if a is None or b is None:
        return found
    has_prior = groups[0] == groups[1] and not a.any_stuck and not b.any_stuck

    def difference(estimate: str) -> Difference | None:
        losses = getattr(a, estimate), getattr(b, estimate)
        prior = priors.get((groups[0], estimate), NO_PRIOR) if has_prior else NO_PRIOR
        if losses[0] is None or losses[1] is None:
            return None
        return inference.paired_difference(*losses, len(record["comparisons"]), prior, share)

    at_optimum = difference("at_optimum")
    leaves_out_tuning = at_optimum is None and was_tuned(record, *pair)
    return found._replace(difference=difference("at_rate"), at_optimum=at_optimum, leaves_out_tuning=leaves_out_tuning)


def seeds_needed(record: dict, results: Results) -> dict[str, int]:
    """Return by variant the number of fresh seeds that its comparisons need, judged by the runs finished so far."""
    needed = dict.fromkeys(record["variants"], record["looks"][0])
    for pair, test in zip(record["comparisons"], pair_tests(record, results), strict=True):
        for name in pair:
            needed[name] = max(needed[name], test.n_seeds)
    return needed
