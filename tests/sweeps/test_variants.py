"""Variants: matched widths, warm starts of each seed, cost; and groups of runs that fail."""

import dataclasses

import pytest
from tiny import tiny

from lm import parameters
from lm.cost import flops
from lm.data import Corpus
from lm.sweeps import Budget, Sweep, match_flops, match_params, runner
from lm.sweeps.results import Results, missing_runs
from lm.sweeps.spec import SweepPlan
from lm.sweeps.variants import Variant, _same_parameters, describe_variants, matched, total_flops, trained_on
from lm.training.warm_start import WarmStart


def n_params(config) -> int:
    return parameters.count(parameters.parameter_table(config.model))


def n_flops(config) -> float:
    return flops.flops_per_token(config.model, config.train.seq_len)


@pytest.mark.parametrize(("match", "measure"), [(match_params, n_params), (match_flops, n_flops)])
@pytest.mark.parametrize("target", [{"ffn": "mlp", "d_ff": 64}, {"ffn": "mlp", "d_ff": 37}, {"n_layers": 4}])
def test_the_matched_width_is_the_nearest_of_all(match, measure, target):
    ours, theirs = tiny(model={"ffn": "glu"}), tiny(model=target)
    found = matched(ours, match("theirs"), theirs)
    assert found == dataclasses.replace(ours, model=dataclasses.replace(ours.model, d_ff=found.model.d_ff))
    off = {w: abs(measure(tiny(model={"ffn": "glu", "d_ff": w})) - measure(theirs)) for w in range(1, 400)}
    assert off[found.model.d_ff] == min(off.values())


def test_seeds_are_grouped_by_the_parameters_that_are_loaded():
    whole, part = (["embedding", "head/w_DV"], []), (["embedding"], ["head/w_DV"])
    runs = {
        seed: WarmStart(f"runs/{seed}", dict.fromkeys(values), initialized, [], [], [])
        for seed, (values, initialized) in enumerate([whole, part, whole])
    }
    assert _same_parameters(runs) == [[0, 2], [1]]


def test_a_group_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    class Named:
        def __init__(self, name):
            self.name = name

        def run_config(self, rate, seed):
            return tiny(optimizer={"learning_rate": rate}, train={"seed": seed}, model={"norm": self.name})

    def train_group(sweep, phase, keys):
        if keys[0][0] == "layer":
            raise RuntimeError("out of memory")
        runs = [{"phase": phase, "variant": v, "learning_rate": r, "seed": s} for v, r, s in keys]
        sweep.results.add("-".join(map(str, keys[0])), runs)

    class NoSignals:
        received = 0

    monkeypatch.setattr(runner, "train_group", train_group)
    lines, results = [], Results(tmp_path)
    keys = [(name, 1e-3, seed) for name in ("layer", "rms") for seed in (0, 1)]
    variants = {name: Named(name) for name in ("layer", "rms")}
    n_failed = runner._Runner(None, variants, {}, results, 2, lines.append, NoSignals).train("final", keys)
    assert n_failed == sum("failed: RuntimeError: out of memory" in line for line in lines) > 0
    assert set(results.runs) == {("final", "rms", 1e-3, seed) for seed in (0, 1)}
    lost = [("final", "layer", 1e-3, seed) for seed in (0, 1)]
    assert results.failures() == dict.fromkeys(lost, "RuntimeError: out of memory")


def test_the_schedule_and_the_evaluations_follow_the_steps():
    config = tiny(
        train={"steps": 400, "batch_size": 32, "seq_len": 64},
        optimizer={"warmup_steps": 20, "decay_steps": 300},
        eval={"every": 50},
    )
    ours = trained_on(config, 5 * 57_696)
    assert (ours.train.steps, ours.eval.every) == (141, 18)
    assert (ours.optimizer.warmup_steps, ours.optimizer.decay_steps) == (7, 106)
    assert trained_on(ours, 141 * 2048) == ours
    shortest = trained_on(config, 1)
    assert (shortest.train.steps, shortest.optimizer.warmup_steps, shortest.eval.every) == (1, 0, 1)
    never = trained_on(dataclasses.replace(config, eval=dataclasses.replace(config.eval, every=0)), 1e6)
    assert (never.eval.every, never.optimizer.warmup_steps) == (0, 24)


@pytest.mark.parametrize("fails", [False, True])
def test_a_size_without_tuning_runs_waits_for_the_best_rate_of_another(tmp_path, monkeypatch, fails):
    """Its rate is at the place in its grid where the other size has its best one; its neighbors are trained too."""
    trained = []

    def train_group(runner, phase, keys):
        if fails and ("small", 8e-3, 1_000_000) in keys:
            raise RuntimeError("out of memory")
        trained.extend((phase, *key) for key in keys)
        loss = {2e-3: 2.0, 4e-3: 1.9}
        runs = [{"phase": phase, "variant": v, "learning_rate": r, "seed": s} for v, r, s in keys]
        measured = [{"val_loss": loss.get(r, 2.1), "test_sums": [s]} for _, r, s in keys]
        runner.results.add(f"{phase}-{keys[0]}", [run | m for run, m in zip(runs, measured, strict=True)])

    class NoSignals:
        received = 0

    monkeypatch.setattr(runner, "train_group", train_group)
    monkeypatch.setattr(runner._Runner, "measure_speeds", lambda self: None)
    grids = {"small": (1e-3, 2e-3, 4e-3, 8e-3), "large": (0.1, 0.2, 0.4, 0.8)}
    variants = {
        "large": Variant(tiny(model={"d_ff": 8}), CORPUS, grids["large"], 1, 7.0, "", {}, "small"),
        "small": Variant(tiny(), CORPUS, grids["small"], 1, 7.0, "", {}),
    }
    described = {
        name: {"grid": list(v.grid), "rate_from": v.rate_from, "data": {"unigram": {"validation": 3.0}}}
        for name, v in variants.items()
    }
    plan = SweepPlan("name", "", "quick", Sweep(), Budget(1, 2), {}, {}, {})
    record = {"variants": described, "tuning_seeds": list(plan.tuning_seeds), "seeds": [0, 1]}
    results, lines = Results(tmp_path), []
    tuning = {("tuning", "small", rate, 1_000_000) for rate in grids["small"]}
    assert missing_runs(results, record) == {"large": tuning, "small": tuning}
    assert runner._Runner(plan, variants, record, results, 1, lines.append, NoSignals).run() == fails
    assert {run[1] for run in trained if run[0] == "tuning"} == {"small"}
    final = {run[2] for run in trained if run[:2] == ("final", "large")}
    if fails:
        assert not final
    else:
        assert "large: best learning rate 0.4" in lines
        assert final == {0.2, 0.4, 0.8}
        assert not missing_runs(results, record)


CORPUS = Corpus("numbers", {}, None, "")
BUDGET = Budget(tuning_seeds=2, seeds=5)


def test_the_cost_of_all_training():
    """4 rates with 2 tuning seeds and 3 rates with 5 fresh seeds are 23 runs; one rate with 5 fresh seeds is 5.

    An extrapolated rate and its two neighbors with 5 fresh seeds are 15.
    """
    config = tiny(train={"steps": 10, "batch_size": 4, "seq_len": 16})
    variants = {
        "tuned": Variant(config, CORPUS, (1e-3, 2e-3, 4e-3, 8e-3), 1, 7.0, "", {}),
        "given": Variant(config, CORPUS, (1e-3,), 1, 100.0, "", {}),
        "extrapolated": Variant(config, CORPUS, (1e-3, 2e-3, 4e-3, 8e-3), 1, 1000.0, "", {}, "tuned"),
    }
    plan = SweepPlan("name", "", "full", Sweep(), BUDGET, {}, {}, {})
    assert total_flops(plan, variants) == (23 * 7.0 + 5 * 100.0 + 15 * 1000.0) * 10 * 4 * 16


@pytest.mark.parametrize("steps", [10, 20])
def test_a_dry_run_lists_the_tokens_of_each_variant_where_they_differ(steps):
    configs = {"short": tiny(train={"steps": 10, "batch_size": 4, "seq_len": 16})}
    configs["long"] = tiny(train={"steps": steps, "batch_size": 4, "seq_len": 16})
    variants = {name: Variant(config, CORPUS, (1e-3, 2e-3), 1, 7.0, "", {}) for name, config in configs.items()}
    sweep = Sweep("?", "base.py", {"short": {}, "long": {"train.steps": steps}}, "short")
    described = describe_variants(SweepPlan("name", "", "full", sweep, BUDGET, {}, {}, {}), variants)
    rows = {line.split()[0]: line.split() for line in described.splitlines()}
    if steps == 10:
        assert "10 steps of 64 tokens each" in described
        assert "tokens per run" not in described
    else:
        assert "tokens per run" in described
        assert (rows["short"][3], rows["long"][3]) == ("640", "1,280")
        assert "steps of" not in described
