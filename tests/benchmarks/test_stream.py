"""The simulated stream of changes that are added to a study."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.calibration import stream
from lm.sweeps import ledger

OF_RUN_C1 = np.array([[0.015], [0.014], [0.02], [0.018]])
NOISE = stream.Noise(OF_RUN_C1, 0.5 * OF_RUN_C1, np.array([0.002, 0.002, 0.003, 0.003]))


def test_the_p_values_of_equal_arms_are_uniform_and_correlated_through_the_baseline():
    of_runs = NOISE._replace(of_tuning_C=np.zeros(4))
    p = stream.p_values(np.zeros(2), of_runs, 4000, np.random.default_rng(0))
    assert stats.kstest(p[:, 0], "uniform").pvalue > 0.001
    z = stats.norm.ppf(p)
    # The control's share of the variance. Its start differs from that of the changes in all parts
    # but the base's own: (1 - 1/n)^2 + (n - 1) / n^2 = 1 - 1/n of the variance of a start.
    of_control = 1 / stream.N_CONTROLS + 0.5**2 * (1 - 1 / stream.N_CONTROLS)
    share = of_control / (1 + of_control)
    assert np.corrcoef(z.T)[0, 1] == pytest.approx(share, abs=0.05)


def test_the_ledger_of_a_stream_is_that_of_lm_sweep():
    p = np.random.default_rng(1).uniform(size=(3, 30)) ** 6
    for of_stream, accepted in zip(p, stream.accepted_by_ledger(p), strict=True):
        levels = [ledger.next_level(accepted[:t]) for t in range(30)]
        assert list(of_stream <= levels) == list(accepted)
    assert accepted.any()


def test_few_of_the_accepted_changes_are_false_and_most_true_ones_are_found(monkeypatch):
    monkeypatch.setattr(stream, "noise_of_study", lambda: NOISE)
    answers = stream.simulate(100, 10, -0.02, 200, np.random.default_rng(2))
    assert answers["ledger"]["false among accepted"] < ledger.ALPHA
    assert answers["ledger"]["power"] > 0.6
    assert answers["p < 0.05"]["any false"] > 0.4
    equal = stream.simulate(100, 0, 0.0, 200, np.random.default_rng(2))
    assert equal["ledger"]["any false"] <= ledger.W0 + 0.02
