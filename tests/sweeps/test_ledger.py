"""The ledger of the changes that are added to a study."""

import pytest

from lm.sweeps import ledger
from lm.sweeps.statistics import Estimate
from lm.system.errors import UserError


def test_levels_are_those_of_another_implementation_of_lord():
    """From the page "Advanced usage" of the R package onlineFDR 2.7 (version "++", w0 = 0.005)."""
    accepted = [t in (1, 7, 9) for t in range(1, 13)]
    levels = [ledger.next_level(accepted[:t], w0=0.005) for t in range(13)]
    assert levels == pytest.approx(
        [
            0.0002675839, 0.0024664457, 0.0005732818, 0.0004872805, 0.0004059066, 0.0003447286, 0.0002986627,
            0.0029389397, 0.0008168502, 0.0033835974, 0.0011873999, 0.0010225858, 0.0008785607,
        ],
        rel=1e-6,
    )  # fmt: skip


def test_a_change_has_its_level_when_it_starts_and_counts_from_then(tmp_path):
    path = ledger.path_beside(tmp_path / "study+a-full", "study")
    first = ledger.register(path, "a", ["model.d_ff=3", "model.activation=relu"])
    second = ledger.register(path, "b", ["model.ffn=mlp"])
    assert (first.level, second.level) == (
        ledger.next_level([]),
        ledger.next_level([False]),  # the result of the first is not known yet
    )
    assert ledger.register(path, "a", ["model.activation=relu", "model.d_ff=3"]) == first
    with pytest.raises(UserError, match="another name"):
        ledger.register(path, "a", ["model.activation=gelu"])
    assert ledger.describe(path, "a").startswith("no result yet at level 0.0013; 2 tried, 0 acc")
    ledger.finish(path, "a", Estimate(-0.02, 0.004, 30, 4))
    ledger.finish(path, "b", None)  # diverged
    assert ledger.describe(path, "a") == "accepted at level 0.0013; 2 tried, 1 accepted"
    assert ledger.describe(path, "b") == "not accepted at level 0.00029; 2 tried, 1 accepted"
    assert ledger.describe(path, "c") == ""
    third = ledger.register(path, "c", ["model.ffn=glu"])
    assert third.level == ledger.next_level([True, False]) > second.level
    ledger.finish(path, "c", Estimate(0.02, 0.004, 30, 4))  # a higher loss
    assert not ledger.read_ledger(path)[2].accepted
    path.write_text(path.read_text().replace("level", "grade"))
    with pytest.raises(UserError, match="restore it"):
        ledger.read_ledger(path)
