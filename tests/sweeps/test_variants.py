"""Variants: matched widths, warm starts of each seed, cost; and groups of runs that fail."""

import dataclasses

import pytest
from tiny import tiny

from lm import parameters
from lm.cost import flops
from lm.data import Corpus
from lm.sweeps import Budget, Sweep, match_flops, match_params, runner
from lm.sweeps.results import Results
from lm.sweeps.spec import SweepPlan
from lm.sweeps.variants import Variant, _same_parameters, describe_variants, matched, total_flops
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


CORPUS = Corpus("numbers", {}, None, "")
BUDGET = Budget(tuning_seeds=2, seeds=5)


def test_the_cost_of_all_training():
    """4 rates with 2 tuning seeds and 3 rates with 5 fresh seeds are 23 runs; one rate with 5 fresh seeds is 5."""
    config = tiny(train={"steps": 10, "batch_size": 4, "seq_len": 16})
    variants = {
        "tuned": Variant(config, CORPUS, (1e-3, 2e-3, 4e-3, 8e-3), 1, 7.0, "", {}),
        "given": Variant(config, CORPUS, (1e-3,), 1, 100.0, "", {}),
    }
    plan = SweepPlan("name", "", "full", Sweep(), BUDGET, {}, {}, {})
    assert total_flops(plan, variants) == (23 * 7.0 + 5 * 100.0) * 10 * 4 * 16


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
