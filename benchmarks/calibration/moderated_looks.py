"""Looks with moderated variances, as in sweeps: the prior is that of the seeds of the first look, at every look.

4 comparisons with one baseline. The columns are those of `moderation`; the learning rates are known. Seeds: the mean
number of seeds at which the first comparison stops, if its true difference is EFFECT.
"""

import numpy as np

from benchmarks.calibration.looks import LOOKS
from benchmarks.calibration.moderation import DESIGNS, EFFECT, SDS
from lm.sweeps.analysis.looks import PairTest, follow
from lm.sweeps.design.spec import MARGIN
from lm.sweeps.statistics import inference
from lm.sweeps.statistics.moderation import NO_PRIOR, fit_prior
from lm.text_tables import table

PAIRS = DESIGNS["4 of 5 with one"]
TESTS = ("t", "moderated")


def simulate(n_sweeps: int) -> str:
    """Return a table with a row for each choice of standard deviations and each test."""
    rows = [["sd of the variants", "test", "any false", "first false", "power", "seeds"]]
    for name, sds in SDS.items():
        draw = np.random.default_rng(0)
        sweeps = [draw.normal(size=(5, LOOKS[-1])) * sds(5, draw)[:, None] for _ in range(n_sweeps)]
        for test in TESTS:
            equal = [grow(losses_VS, test) for losses_VS in sweeps]
            shifted = [grow(losses_VS - EFFECT * np.eye(5)[1][:, None], test) for losses_VS in sweeps]
            found = np.array([[t.is_significant for t in tests] for tests in equal])
            numbers = [found.any(axis=1).mean(), np.mean([first_is_found(losses_VS, test) for losses_VS in sweeps])]
            numbers.append(np.mean([tests[0].is_significant for tests in shifted]))
            seeds = np.mean([tests[0].n_seeds for tests in shifted])
            rows.append([name, test, *(f"{number:.3f}" for number in numbers), f"{seeds:.1f}"])
    return table(rows, right=range(2, 6))


def grow(losses_VS: np.ndarray, test: str, pairs=PAIRS) -> list[PairTest]:
    """Return the tests of the comparisons of a sweep, each at the look at which it stopped.

    Args:
        losses_VS: the losses of each variant and seed.
        test: "t" or "moderated".
        pairs: the comparisons, pairs of indices of variants.
    """
    prior = fit_prior(losses_VS[:, : LOOKS[0]]) if test == "moderated" else NO_PRIOR
    shares = inference.shares(LOOKS)

    def test_pair(k: int, i: int) -> PairTest:
        a, b = losses_VS[list(pairs[k]), : LOOKS[i]]
        return PairTest(i + 1, LOOKS[i], inference.paired_difference(a, b, len(pairs), prior, shares[i]), None)

    return follow(len(pairs), len(LOOKS), test_pair, MARGIN)


def first_is_found(losses_VS: np.ndarray, test: str) -> bool:
    """Return whether the first comparison, alone and without correction, is significant at any look."""
    return grow(losses_VS, test, PAIRS[:1])[0].is_significant
