"""Simulated sweeps: which answers count as wrong, and agreement of their tests with those of real sweeps."""

import math

import numpy as np
import pytest

from benchmarks.calibration import answers, moderated_looks
from benchmarks.calibration.looks import LOOKS
from lm.sweeps.analysis.looks import PairTest
from lm.sweeps.design.spec import MARGIN
from lm.sweeps.statistics import inference
from lm.sweeps.statistics.moderation import fit_prior


def answer(mean: float, **p_values) -> PairTest:
    return PairTest(1, 5, inference.Difference(mean, -1, 1, math.nan, 5, 0.01, 4), None, **p_values)


DIFFERENT, OPPOSITE = (answer(mean, p_adjusted=0.01, p_beyond=0.5, p_equivalent=0.5) for mean in (0.01, -0.01))
BEYOND = answer(0.01, p_adjusted=0.01, p_beyond=0.01, p_equivalent=0.5)
EQUIVALENT = answer(0.001, p_adjusted=0.5, p_beyond=0.5, p_equivalent=0.01)
UNDECIDED = answer(0.01, p_adjusted=0.5, p_beyond=0.01, p_equivalent=0.5)


@pytest.mark.parametrize(
    ("margins", "test", "expected"),
    [
        (0, DIFFERENT, [True, False, False]),
        (0, BEYOND, [True, False, False]),
        (0, EQUIVALENT, [False, False, False]),
        (0, UNDECIDED, [False, False, False]),
        (0.5, DIFFERENT, [False, False, False]),
        (0.5, OPPOSITE, [True, False, False]),
        (0.5, BEYOND, [False, True, False]),
        (0.5, EQUIVALENT, [False, False, False]),
        (2, DIFFERENT, [False, False, False]),
        (2, BEYOND, [False, False, False]),
        (2, EQUIVALENT, [False, False, True]),
    ],
)
def test_an_answer_is_wrong_only_if_the_truth_contradicts_it(margins, test, expected):
    assert answers.wrong(np.array([margins * MARGIN]), [test]) == expected
    assert answers.wrong(np.array([margins * MARGIN, 0]), [test, UNDECIDED]) == expected


def test_the_prior_of_all_looks_is_that_of_the_first():
    losses_VS = np.random.default_rng(0).normal(0, 0.01, (5, LOOKS[-1]))
    prior = fit_prior(losses_VS[:, : LOOKS[0]])
    last = moderated_looks.grow(losses_VS, "moderated")[0]
    assert last.n_seeds > LOOKS[0]
    share = last.n_seeds / sum(LOOKS)
    expected = inference.paired_difference(*losses_VS[[1, 0], : last.n_seeds], 4, prior, share)
    assert last.difference == expected
    assert expected.df > last.n_seeds - 1
    assert moderated_looks.grow(losses_VS, "t")[0].difference.df == moderated_looks.grow(losses_VS, "t")[0].n_seeds - 1
