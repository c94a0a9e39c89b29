"""Widths that are computed, what is carried over for each seed, and runs that fail."""

import dataclasses

import pytest
from tiny import tiny

import lm.sweep
from lm import parameters
from lm.cost import flops
from lm.data import Corpus
from lm.sweeps import Budget, Sweep, match_flops, match_params
from lm.sweeps.results import Results
from lm.sweeps.spec import Plan
from lm.sweeps.variants import Variant, _alike, flops_of_runs, matched
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


def test_seeds_whose_runs_give_other_parameters_are_told_apart():
    whole, part = (["embedding", "head/w_DV"], []), (["embedding"], ["head/w_DV"])
    runs = {
        seed: WarmStart(f"runs/{seed}", 10, dict.fromkeys(values), fresh, [])
        for seed, (values, fresh) in enumerate([whole, part, whole])
    }
    assert _alike(runs) == [[0, 2], [1]]


def test_a_cohort_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    class Named:
        def __init__(self, name):
            self.name = name

        def member(self, rate, seed):
            return tiny(optimizer={"learning_rate": rate}, train={"seed": seed}, model={"norm": self.name})

    def train_cohort(phase, keys, configs, variants, results, signals):
        if keys[0][0] == "layer":
            raise RuntimeError("out of memory")
        results.add(
            "-".join(map(str, keys[0])),
            [{"phase": phase, "variant": v, "learning_rate": r, "seed": s} for v, r, s in keys],
        )

    class NoSignals:
        received = 0

    monkeypatch.setattr(lm.sweep, "train_cohort", train_cohort)
    lines, results = [], Results(tmp_path)
    members = [(name, 1e-3, seed) for name in ("layer", "rms") for seed in (0, 1)]
    variants = {name: Named(name) for name in ("layer", "rms")}
    n_failed = lm.sweep.train("final", members, variants, results, 2, lines.append, NoSignals)
    assert n_failed == sum("failed: RuntimeError: out of memory" in line for line in lines) > 0
    assert set(results.found) == {("final", "rms", 1e-3, seed) for seed in (0, 1)}
    lost = [("final", "layer", 1e-3, seed) for seed in (0, 1)]
    assert results.failures() == dict.fromkeys(lost, "RuntimeError: out of memory")


def test_the_cost_of_all_training():
    """4 rates by 2 tuning seeds and 3 rates by 5 fresh ones are 23 runs; without a choice there are 5."""
    config = tiny(train={"steps": 10, "batch_size": 4, "seq_len": 16})
    corpus = Corpus("numbers", {}, None, "")
    variants = {
        "tuned": Variant(config, corpus, (1e-3, 2e-3, 4e-3, 8e-3), 1, 7.0, "", {}),
        "given": Variant(config, corpus, (1e-3,), 1, 100.0, "", {}),
    }
    sweep = Sweep("?", "base", {}, "tuned", (), (), {})
    plan = Plan("name", "", "full", sweep, Budget(tuning_seeds=2, seeds=5), {}, {}, {})
    assert flops_of_runs(plan, variants) == (23 * 7.0 + 5 * 100.0) * 10 * 4 * 16
