"""Widths that are computed, what is carried over for each seed, and runs that fail."""

import dataclasses

import pytest
from tiny import tiny

import lm.sweep
from lm import flops, parameters
from lm.carry_over import CarriedOver
from lm.sweeps import match_flops, match_params
from lm.sweeps.results import Results
from lm.sweeps.variants import _alike, matched


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
        seed: CarriedOver(f"runs/{seed}", 10, dict.fromkeys(values), fresh, [])
        for seed, (values, fresh) in enumerate([whole, part, whole])
    }
    assert _alike(runs) == [[0, 2], [1]]


def test_a_cohort_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    class Variant:
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
    variants = {name: Variant(name) for name in ("layer", "rms")}
    n_failed = lm.sweep.train("final", members, variants, results, 2, lines.append, NoSignals)
    assert n_failed == sum("failed: RuntimeError: out of memory" in line for line in lines) > 0
    assert set(results.found) == {("final", "rms", 1e-3, seed) for seed in (0, 1)}
