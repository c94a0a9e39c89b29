"""Variants: matched widths, warm starts of each seed, cost; and groups of runs that fail."""

import contextlib
import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from synthetic_sweep import run
from tiny import tiny

from lm import parameters
from lm.cost import flops
from lm.data import Corpus, Split
from lm.errors import UserError
from lm.sweeps import Budget, Sweep, match_flops, match_params, runner
from lm.sweeps import variants as variants_module
from lm.sweeps.results import Results, missing_runs
from lm.sweeps.spec import SweepPlan
from lm.sweeps.variants import (
    Variant,
    _same_parameters,
    check_distinct,
    describe_variants,
    matched,
    resolve_variants,
    total_flops,
    trained_on,
)
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


def distinct(a: dict, b: dict, grids=((2e-3, 4e-3), (2e-3, 4e-3))) -> str:
    """Return the error of `check_distinct` for two variants that compile to the same program, "" if there is none."""
    variants = {}
    for name, changes, grid in zip("ab", (a, b), grids, strict=True):
        sections = {"optimizer": {"learning_rate": grid[0]}}
        for key, value in changes.items():
            section, _, key = key.partition(".")
            sections.setdefault(section, {})[key] = value
        variants[name] = Variant(tiny(**sections), CORPUS, grid, 1, 1.0, "the same", {})
    try:
        check_distinct(variants, {"a": a, "b": b})
    except UserError as error:
        return str(error)
    return ""


def test_variants_that_share_a_program_are_refused_and_their_keys_named():
    idle, same = {"model.norm_bias": False}, "variants 'a' and 'b' are the same experiment"
    assert distinct({}, idle) == f"{same}; model.norm_bias has no effect here"
    assert distinct({}, idle, [(2e-3,), (4e-3, 8e-3)]) == f"{same}; model.norm_bias has no effect here"
    assert distinct({"model.norm": "rms"}, {}) == f"{same}; model.norm is rms in both"
    both = "model.norm_bias has no effect here; model.norm is rms in both"
    assert distinct({"model.norm": "rms"}, idle) == f"{same}; {both}"
    assert distinct({"model.norm": "rms"}, {"model.norm": "rms"}) == same


def test_only_the_learning_rates_of_two_variants_may_differ():
    assert distinct({}, {}, [(2e-3,), (4e-3,)]) == ""
    assert "the same experiment" in distinct({}, {}, [(2e-3, 4e-3), (4e-3, 8e-3)])
    assert "the same experiment" in distinct({}, {}, [(2e-3, 4e-3), (2e-3, 8e-3)])


class NoSignals:
    received = 0


def make_runner(variants: dict, results: Results, lines: list) -> runner._Runner:
    return runner._Runner(None, variants, {}, results, 2, lines.append, NoSignals)


class Named:
    """A stand-in for a variant that is named by its norm."""

    def __init__(self, name):
        self.name = name

    def run_config(self, rate, seed):
        return tiny(optimizer={"learning_rate": rate}, train={"seed": seed}, model={"norm": self.name})


CORPUS = Corpus("numbers", {}, None, "")
BUDGET = Budget(tuning_seeds=2, seeds=5)


def test_a_group_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def train_group(sweep, phase, keys):
        if keys[0][0] == "layer":
            raise RuntimeError("out of memory")
        runner.results.add(f"{phase}-{keys[0]}", [run(phase, v, r, s, loss.get(r, 2.1)) for v, r, s in keys])

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
