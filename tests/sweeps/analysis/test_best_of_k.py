"""The expected best loss of k trials, against enumeration, and the losses that it is computed from."""

import itertools

import numpy as np
import pytest
from synthetic_search import search_sweep
from synthetic_sweep import TUNING_SEEDS, diverge, select, write

from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.best_of_k import expected_best, trial_losses


@pytest.mark.parametrize("losses", [[2.0, 1.5, 3.0, 1.0], [1.0, 1.0, 2.0], [4.0], [2.5, 2.5]])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_expected_best_is_the_mean_over_all_ways_to_draw_k_trials_with_replacement(losses, k):
    lowest = [min(drawn) for drawn in itertools.product(losses, repeat=k)]
    assert expected_best(losses, k) == pytest.approx(np.mean(lowest), rel=1e-12)


def test_the_expected_best_falls_from_the_mean_to_the_lowest_loss():
    losses = np.random.default_rng(0).uniform(1, 3, 20)
    found = [expected_best(losses, k) for k in (1, 2, 4, 20, 10_000)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(losses.mean())
    assert found[-1] == pytest.approx(losses.min())


def test_lost_trials_count_as_the_unigram_baseline(tmp_path):
    """The baseline is 2.5 on validation. A trial is the mean of its tuning seeds."""
    record, runs, rates = search_sweep()
    diverge(next(r for r in select(runs, "tuning", "plain", rates[1]) if r["seed"] == TUNING_SEEDS[0]))
    for r in select(runs, "tuning", "plain", rates[2]):
        r["val_loss"] = 7.0
    a = analyze(write(tmp_path / "s", record, runs))
    assert trial_losses(a.results, a.record, "plain") == pytest.approx([2.1, (2.5 + 2.2) / 2, 2.5])
