"""The tables of costs and speeds of a small synthetic sweep, and losses at equal cost, by hand."""

import numpy as np
import pytest
from synthetic_sweep import BASE, LOSSES, OPTIMIZER, diverge, select, speeds_json, sweep, write

from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.report import cost_tables, tables


def at_equal_cost(a) -> list[list]:
    """Return by variant the losses at equal FLOPs and at equal time."""
    return [
        [cost_tables.loss_at_equal(a, v, cost) for cost in cost_tables.EQUAL_COSTS.values()]
        for v in a.variants.values()
    ]


def test_loss_at_equal_cost_by_hand(tmp_path):
    # plain is the cheapest: 100 steps. gated costs 5/4 of it, so 80 steps: 0.6 of the way from step 50 (+0.6) to
    # step 100 (+0.1), which is +0.3. wide costs three times as many FLOPs, and has no validation before step 33.3.
    plain, gated, wide = at_equal_cost(analyze(write(tmp_path / "s", *sweep())))
    means = {name: np.mean(losses) for name, losses in LOSSES.items()}
    assert plain == pytest.approx([means["plain"] + 0.1] * 2)
    assert gated == pytest.approx([means["gated"] + 0.3] * 2)
    assert wide == ["too early", pytest.approx(means["wide"] + 0.1)]


def test_equal_cost_is_among_connected_variants(tmp_path):
    """If wide is not compared, its cost does not affect the others, and theirs does not affect it."""
    record, runs = sweep()
    before = at_equal_cost(analyze(write(tmp_path / "all", record, runs)))
    found = at_equal_cost(analyze(write(tmp_path / "s", record | {"comparisons": [["gated", "plain"]]}, runs)))
    assert found[:2] == before[:2]
    assert found[2] == pytest.approx([np.mean(LOSSES["wide"]) + 0.1] * 2)


def test_losses_at_equal_cost_are_shown_only_if_learning_rates_are_constant(tmp_path):
    """Under a decay the run of a more expensive variant is cut off before its learning rate has decayed."""
    record, runs = sweep()
    a = analyze(write(tmp_path / "cosine", record, runs))
    assert cost_tables.costs(a).header == ["variant", "parameters", "tokens per parameter", "FLOPs/token"]
    assert cost_tables.speeds(a).header == ["variant", "tokens/s"]
    for schedule, expected in (("constant", True), ("wsd", False)):
        for v in record["variants"].values():
            v["config"] = v["config"] | {"optimizer": OPTIMIZER | {"schedule": "constant"}}
        v["config"]["optimizer"]["schedule"] = schedule  # of the last variant
        a = analyze(write(tmp_path / schedule, record, runs))
        assert cost_tables.costs(a).header[4:] == ["loss at equal FLOPs"] * expected
        assert cost_tables.speeds(a).header[2:] == ["loss at equal time"] * expected
    assert cost_tables.is_constant(record) is False


def test_speedup_of_training_several_runs_at_once(tmp_path):
    a = analyze(write(tmp_path / "s", *sweep()))
    assert cost_tables.speedup(a) == "4 runs of plain at once: 2.00 times the tokens/s of one at a time"
    a.results.speeds["at_once"] = 1
    assert cost_tables.speedup(a) == "speeds were measured one run at a time"


@pytest.mark.parametrize("speed", [997.3, 1013.7, 1e5 / 3])
def test_one_validation_at_the_end_is_enough_for_the_cheapest(tmp_path, speed):
    record, runs = sweep()
    for r in runs:
        r["validation"] = r["validation"][1:]
    workdir = write(tmp_path / "s", record, runs)
    (workdir / "speeds.json").write_text(speeds_json(speed, speed * 0.9, speed * 0.5))
    found = [at_time for _, at_time in at_equal_cost(analyze(workdir))]
    assert found == [pytest.approx(np.mean(BASE) + 0.1), "too early", "too early"]


def test_a_variant_that_trains_nothing_costs_nothing_and_sets_no_budget(tmp_path):
    whole = at_equal_cost(analyze(write(tmp_path / "whole", *sweep())))
    record, runs = sweep()
    record["variants"]["wide"]["config"] |= {"train": {"steps": 0, "batch_size": 8, "seq_len": 16}}
    found = at_equal_cost(analyze(write(tmp_path / "s", record, runs)))
    assert found == [*whole[:2], ["not trained"] * 2]
    lines = tables.reproduction(analyze(tmp_path / "s"))
    assert "42 runs of 100 steps of 8 x 16 tokens, 12,800 tokens each" in lines
    assert "21 runs of 0 steps of 8 x 16 tokens, 0 tokens each" in lines


def test_a_variant_with_diverged_runs_has_no_loss_at_equal_cost(tmp_path):
    record, runs = sweep()
    diverge(select(runs, "final", "gated")[3])
    assert at_equal_cost(analyze(write(tmp_path / "s", record, runs)))[1] == ["runs diverged"] * 2
