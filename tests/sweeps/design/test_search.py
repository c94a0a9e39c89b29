"""Random search: the draws, the mistakes in a search, the configs of its trials, and their report."""

import csv
import dataclasses
import io
import math

import numpy as np
import pytest
from running import ROOT
from synthetic_search import BEST, TRIALS, search_sweep
from synthetic_sweep import diverge, select, write
from tiny import tiny

from lm.errors import UserError
from lm.sweeps import Budget, Search, choice, log_uniform, match_tokens, uniform
from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.claims import claim_rows
from lm.sweeps.design import spec
from lm.sweeps.design.axes import LEARNING_RATE
from lm.sweeps.design.search import BATCH_SIZE, draw_trials
from lm.sweeps.design.spec import load_sweep
from lm.sweeps.report import figures, pages, search_tables, tables
from lm.sweeps.report.best_of_k_figure import best_of_k_figure
from lm.sweeps.storage.records import read_sweep
from lm.sweeps.storage.results import Results, differences, missing_runs
from lm.sweeps.training import variants
from lm.sweeps.training.variants import describe_variants, resolve_variants, total_flops, with_trial

TINY = ROOT / "tests" / "configs" / "tiny_sweep.py"
RATE = log_uniform(1e-3, 3e-2)
SPACE = {LEARNING_RATE: RATE, "optimizer.b2": choice(0.9, 0.99), "optimizer.weight_decay": uniform(0, 1)}
VARIANTS = {"mlp": {"model.ffn": "mlp"}, "glu": {"model.d_ff": 43}}
SEARCH = {"variants": VARIANTS, "comparisons": (("glu", "mlp"),), "learning_rates": None, "search": Search(6, SPACE)}


def tiny_with(monkeypatch, **changes) -> spec.SweepPlan:
    """Return the plan of the tiny sweep with a search, under the quick budget."""
    sweep = dataclasses.replace(spec.run_file(str(TINY), "get_sweep", ""), **SEARCH | changes)
    monkeypatch.setattr(spec, "run_file", lambda *_: sweep)
    return load_sweep(str(TINY), "quick")


# ---- Draws -----------------------------------------------------------------------------------------------------


def test_the_draws_follow_from_the_name_the_trial_and_the_key_alone():
    trials = draw_trials("gates", Search(20, SPACE))
    assert trials == draw_trials("gates", Search(20, dict(SPACE)))
    assert draw_trials("gates", Search(5, SPACE)) == draw_trials("gates", Search(20, SPACE), 5) == trials[:5]
    fewer = draw_trials("gates", Search(20, {LEARNING_RATE: RATE}))
    assert [trial[LEARNING_RATE] for trial in fewer] == [trial[LEARNING_RATE] for trial in trials]
    assert draw_trials("norms", Search(20, SPACE))[0][LEARNING_RATE] != trials[0][LEARNING_RATE]
    # Results on disk are named by these numbers.
    assert trials[0] == {LEARNING_RATE: 0.0033657549, "optimizer.b2": 0.9, "optimizer.weight_decay": 0.0409014826}


def test_the_draws_have_the_declared_distributions():
    trials, n = draw_trials("gates", Search(1000, SPACE | {"optimizer.clip_norm": choice(1, 2)})), 1000
    rates, b2, decay = (np.array([trial[key] for trial in trials]) for key in SPACE)
    u = np.log(rates / 1e-3) / np.log(30)
    for values in (np.sort(u), np.sort(decay)):  # Kolmogorov-Smirnov at a level of about 0.001
        assert np.abs(values - (np.arange(n) + 0.5) / n).max() < 1.95 / math.sqrt(n)
    assert abs((b2 == 0.9).mean() - 0.5) < 0.05
    assert len(set(rates)) == n  # a trial is known by its rate
    assert all(type(trial["optimizer.clip_norm"]) is float for trial in trials)  # an int would make another program


def test_every_variant_has_the_same_trials_and_a_budget_may_have_fewer(monkeypatch):
    plan = tiny_with(monkeypatch)
    assert plan.trials == draw_trials("tiny_sweep", Search(6, SPACE))
    assert plan.grids["mlp"] == plan.grids["glu"] == tuple(trial[LEARNING_RATE] for trial in plan.trials)
    assert plan.configs["mlp"].optimizer.learning_rate == 1e-3  # the base's
    fewer = tiny_with(monkeypatch, budgets={"quick": Budget(1, 2, trials=4)})
    assert fewer.trials == plan.trials[:4]


# ---- Mistakes --------------------------------------------------------------------------------------------------


def space(**more) -> Search:
    return Search(6, {LEARNING_RATE: RATE} | {key.replace("__", "."): values for key, values in more.items()})


SIZES = {name: {"model.d_model": width} for name, width in (("s", 16), ("m", 32), ("l", 64))}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"search": {"trials": 6}}, "search: {'trials': 6} must be a Search"),
        ({"search": Search(space=SPACE)}, "search: trials is missing: it must be an integer"),
        ({"search": Search("6", SPACE)}, "search: trials is '6': it must be an integer"),
        ({"search": Search(6)}, "search: space is missing: it must be a dictionary"),
        ({"search": Search(6, {LEARNING_RATE: (1e-3, 1e-2)})}, "search: optimizer.learning_rate: (0.001, 0.01) must"),
        ({"search": Search(1, SPACE)}, "search: trials is 1; it must be an integer, at least 2 and at most 1000"),
        ({"search": Search(6, {})}, "search: optimizer.learning_rate must be drawn from an interval, such as"),
        ({"search": Search(6, {LEARNING_RATE: choice(1e-3, 1e-2)})}, "search: optimizer.learning_rate must be drawn"),
        ({"search": Search(6, {LEARNING_RATE: log_uniform(0, 1)})}, "(0, 1): the numbers must be positive"),
        ({"search": Search(6, {LEARNING_RATE: log_uniform(1, 0.1)})}, "(1, 0.1) must be in ascending order"),
        ({"search": Search(6, {LEARNING_RATE: uniform(1, 1 + 1e-12)})}, "two trials have the same optimizer.lea"),
        ({"search": Search(6, {LEARNING_RATE: log_uniform("a", 1)})}, "('a', 1) must be two numbers"),
        ({"search": Search(6, {LEARNING_RATE: log_uniform(1, 10**400)})}, "a number is too large"),
        ({"search": space(optimizer__b3=choice(1, 2))}, "search: optimizer.b3: unknown key; optimizer has name, "),
        ({"search": space(optimizer__b2=choice(0.9, 1.5))}, "search: optimizer.b2: 1.5 is out of range"),
        ({"search": space(optimizer__b2=choice(0.9))}, "search: optimizer.b2: choice(0.9,) must have at least two"),
        ({"search": space(optimizer__b2=choice(0.9, 0.9))}, "at least two values, without duplicates"),
        ({"search": space(optimizer__warmup_steps=uniform(1, 9))}, "search: optimizer.warmup_steps: 1.0 is not an int"),
        ({"search": space(model__d_ff=choice(8, 16))}, "search: model.d_ff: only keys of the optimizer, train.bat"),
        ({"search": space(train__batch_size=choice(4, 5))}, "train.batch_size: 8 steps of 4 sequences are not a whole"),
        ({"search": space(optimizer__decay_steps=choice(1, 99))}, "variant 'glu': config.optimizer.decay_steps: 99 is"),
        ({"learning_rates": (1e-3, 1e-2)}, "learning_rates and search are both given: remove one of them"),
        ({"budgets": {"quick": Budget(1, 2, learning_rates=(1e-3,))}}, "'quick': learning_rates and search are both"),
        ({"budgets": {"quick": Budget(1, 2, trials=1)}}, "budget 'quick': trials is 1; it must be an integer"),
        ({"budgets": {"quick": Budget(1, 2, trials="4")}}, "budget 'quick': trials is '4'; it must be an integer"),
        (
            {"budgets": {"quick": Budget(1, 2, trials=4)}, "search": None, "learning_rates": (1e-3,)},
            "budget 'quick': trials: the sweep has no search; remove it",
        ),
        ({"sizes": SIZES}, "sizes and search are both given"),
        ({"texts": {"a": {}, "b": {"data.source": "python_docs"}}}, "texts and search are both given"),
        ({"values": {"optimizer.b2": 0.9}}, "values: optimizer.b2 is drawn by the search; remove it"),
        (
            {"variants": VARIANTS | {"glu": {LEARNING_RATE: (1e-3,)}}},
            "variant 'glu': optimizer.learning_rate is drawn by the search; remove it",
        ),
        (
            {"search": space(train__batch_size=choice(4, 8)), "values": {"train.steps": match_tokens(5)}},
            "values: train.steps must be a number, because the search draws train.batch_size",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_mistakes(monkeypatch, changes, expected):
    with pytest.raises(UserError) as caught:
        tiny_with(monkeypatch, **changes)
    assert expected in str(caught.value)


def test_all_mistakes_are_reported_at_once_and_each_once(monkeypatch):
    """Also those of the sweep. Drawn values that no config takes are reported for one trial of each variant."""
    wrong = space(optimizer__b2=choice(0.9, 1.5), optimizer__b3=choice(1, 2))
    with pytest.raises(UserError) as caught:
        tiny_with(monkeypatch, search=wrong, baseline="x", variants=VARIANTS | {"glu": {"optimizer.b2": 0.9}})
    assert len(caught.value.problems) == 4
    with pytest.raises(UserError) as caught:
        tiny_with(monkeypatch, search=space(optimizer__decay_steps=choice(98, 99)), baseline="mlp", variants=VARIANTS)
    assert len(caught.value.problems) == 2


# ---- Runs ------------------------------------------------------------------------------------------------------


def test_a_trial_of_another_batch_size_has_the_same_tokens_and_evaluations():
    config = tiny(train={"steps": 12, "batch_size": 4}, optimizer={"warmup_steps": 4}, eval={"every": 6})
    found = with_trial(config, {LEARNING_RATE: 0.01, "optimizer.warmup_steps": 2, BATCH_SIZE: 8})
    assert (found.train.steps, found.train.batch_size, found.eval.batch_size, found.eval.every) == (6, 8, 4, 3)
    assert (found.optimizer.learning_rate, found.optimizer.warmup_steps) == (0.01, 1)
    same = with_trial(config, {BATCH_SIZE: 4, "optimizer.b2": 0.5})
    assert same == dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, b2=0.5))


def test_a_dry_run_prints_the_space_and_the_runs(bench, monkeypatch):
    monkeypatch.chdir(bench.base)
    monkeypatch.setattr(variants, "_traced", lambda name, *_: name)
    plan = tiny_with(monkeypatch)
    found = resolve_variants(plan, lambda text: None)
    text = describe_variants(plan, found)
    assert "search: 6 random trials, the same for every variant, over\n" in text
    assert "  optimizer.learning_rate  log-uniform from 0.001 to 0.03\n  optimizer.b2             one of 0.9," in text
    assert "12 runs to tune by random search (1 tuning seed), then at most 4 runs at the best trial (2 fresh" in text
    assert total_flops(plan, found) == sum(8 * v.flops * v.tokens for v in found.values())
    config = found["glu"].run_config(plan.trials[3][LEARNING_RATE], 7)
    drawn = {"learning_rate": config.optimizer.learning_rate, "b2": config.optimizer.b2}
    assert drawn | {"seed": config.train.seed} == {
        "learning_rate": plan.trials[3][LEARNING_RATE], "b2": plan.trials[3]["optimizer.b2"], "seed": 7,
    }  # fmt: skip


def test_only_the_best_trial_is_trained_with_fresh_seeds(tmp_path):
    record, runs, rates = search_sweep()
    runs = [r for r in runs if r["phase"] == "tuning"]
    record = read_sweep(write(tmp_path / "s", record, runs) / "sweep.json")
    missing = missing_runs(Results(tmp_path / "s"), record, dict.fromkeys(record["variants"], 5))
    assert {name: {key[2] for key in keys} for name, keys in missing.items()} == {
        name: {rates[i]} for name, i in BEST.items()
    }


def test_a_trial_with_a_lost_run_is_not_the_best_one(tmp_path):
    """As in a grid of learning rates: fewest lost runs first."""
    record, runs, rates = search_sweep()
    diverge(select(runs, "tuning", "plain", rates[0])[0])
    runs += [r | {"learning_rate": rates[1]} for r in select(runs, "final", "plain", rates[0])]
    a = analyze(write(tmp_path / "s", record, runs))
    assert a.variants["plain"].rate == rates[1]
    assert search_tables.best_trials(a).rows[0][1:6] == ["2", "0.00199", "0.99", "4", "2.2000"]
    assert search_tables.best_trials(a).rows[0][-1] == "1 of 3"


def test_a_sweep_is_not_resumed_with_another_search(tmp_path):
    record, runs, _ = search_sweep()
    old = read_sweep(write(tmp_path / "s", record, runs) / "sweep.json") | {"variants": {}}
    assert differences(old, dict(old), {}) == []
    fewer = old | {"search": old["search"] | {"trials": TRIALS[:2]}}
    (line,) = differences(old, fewer, {})
    assert line.startswith("  search: 3 trials, optimizer.learning_rate log-uniform from 0.001 to 0.03; optimizer.b2")
    assert differences(old, old | {"search": None}, {})[0].endswith(" -> none (sweep -> now)")


@pytest.mark.parametrize("damage", ["grid", "keys", "batch size", "trials"])
def test_a_damaged_search_is_refused(tmp_path, damage):
    record, runs, rates = search_sweep()
    if damage == "grid":
        record["variants"]["wide"]["grid"] = rates[:2]
    else:
        wrong = {"keys": {LEARNING_RATE: rates[0]}, "batch size": TRIALS[0] | {BATCH_SIZE: 0}, "trials": {}}[damage]
        record["search"] = record["search"] | {"trials": [wrong, *TRIALS[1:]]}
    with pytest.raises(UserError, match="is corrupted"):
        read_sweep(write(tmp_path / "s", record, runs) / "sweep.json")


# ---- Report ----------------------------------------------------------------------------------------------------


def test_the_report_of_a_search(tmp_path, monkeypatch):
    for name in ("differences", "learning_curves"):
        monkeypatch.setattr(figures, name, lambda a: None)
    monkeypatch.setattr(figures, "to_bytes", lambda figure, kind: b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    a = analyze(write(tmp_path / "s", *search_sweep()[:2]))
    pages.write_report(a, tmp_path / "s")
    page = (tmp_path / "s" / "report.md").read_text()
    assert (
        "at fixed warm-up, decay and weight decay: each variant was tuned by 3 random trials over learning rate, b2 "
        "and batch size."
    ) in a.answers[0]
    assert all("p leaves out the luck of the random trials" in answer for answer in a.answers)
    assert "| gated | 2 | 0.00199 | 0.99 | 4 | 2.1000 | 0 of 3 |" in page
    assert "No estimate for plain, gated, wide: a random search has no rates next to the best one" in page
    assert "## Differences at each learning rate" not in page
    assert "![best_of_k](figures/best_of_k.png)" in page
    assert 'alt="best_of_k"' in (tmp_path / "s" / "report.html").read_text()
    drawn = {path.stem for path in (tmp_path / "s" / "figures").iterdir()}
    assert drawn == {"best_of_k", "curves", "differences"}
    assert "16 runs of 200 steps of 4 x 16 tokens, 12,800 tokens each" in page  # one trial has half the batch size
    assert not a.variants["plain"].at_edge  # the first trial is no edge
    assert "at the edge" not in page
    assert math.isnan(tables.variant_rows(a)[0]["learning_rate_sensitivity"])


def test_the_table_and_the_figure_have_the_same_numbers(tmp_path):
    """Three trials with losses 2.1, 2.2 and 2.3 on validation; of gated the second is the best, so 2.2, 2.1, 2.2."""
    a = analyze(write(tmp_path / "s", *search_sweep()[:2]))
    table = search_tables.best_of_k(a)
    assert table.header == ["variant", "1 trial", "2 trials", "3 trials"]
    two, three = (5 * 2.1 + 3 * 2.2 + 2.3) / 9, (19 * 2.1 + 7 * 2.2 + 2.3) / 27
    assert table.rows[0] == ["plain", "2.2000", f"{two:.4f}", f"{three:.4f}"]
    assert table.rows[1][:2] == ["gated", f"{(2.2 + 2.1 + 2.2) / 3:.4f}"]
    lines = {line.get_label(): line for line in best_of_k_figure(a).axes[0].lines}
    assert [f"{y:.4f}" for y in lines["plain"].get_ydata()] == table.rows[0][1:]


def test_runs_csv_has_the_values_of_each_trial(tmp_path):
    a = analyze(write(tmp_path / "s", *search_sweep()[:2]))
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(tables.run_rows(a)))))
    found = {(row["trial"], row["learning_rate"], row["optimizer.b2"], row["train.batch_size"]) for row in rows}
    assert found == {(f"{i}", *map(str, trial.values())) for i, trial in enumerate(TRIALS, start=1)}


def test_the_claims_of_a_search_have_no_estimate_at_an_optimum(tmp_path):
    record, runs, _ = search_sweep()
    a = analyze(write(tmp_path / "s", record, runs))
    found = {row["variant"]: row for row in claim_rows(a)}
    for c in a.comparisons:
        assert float(found[c.variant]["p"]) == pytest.approx(c.difference.p, rel=1e-5)
        assert found[c.variant]["at_optimum"] == ""
