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
from lm.sweeps import Budget, Sweep, match_flops, match_params
from lm.sweeps.design.axes import Match
from lm.sweeps.design.spec import SweepPlan
from lm.sweeps.storage.results import Results, missing_runs
from lm.sweeps.training import runner
from lm.sweeps.training import variants as variants_module
from lm.sweeps.training.variants import (
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
        runs = [{"phase": phase, "variant": v, "learning_rate": r, "seed": s} for v, r, s in keys]
        sweep.results.add("-".join(map(str, keys[0])), runs)

    monkeypatch.setattr(runner, "train_group", train_group)
    lines, results = [], Results(tmp_path)
    keys = [(name, 1e-3, seed) for name in ("layer", "rms") for seed in (0, 1)]
    n_failed = make_runner({name: Named(name) for name in ("layer", "rms")}, results, lines).train("final", keys)
    assert n_failed == sum("failed: RuntimeError: out of memory" in line for line in lines) > 0
    assert set(results.runs) == {("final", "rms", 1e-3, seed) for seed in (0, 1)}
    lost = [("final", "layer", 1e-3, seed) for seed in (0, 1)]
    assert results.failures() == dict.fromkeys(lost, "RuntimeError: out of memory")


def test_a_loss_below_the_entropy_of_the_text_fails_its_runs_alone(tmp_path):
    """Two untrained variants evaluate the same tokens; the source of the text of "layer" gives a loss of 50."""

    def text(nats):
        tokens = np.arange(50).astype(np.uint16) % 19
        split = Split("validation", tokens, 50, 50, surprisal=lambda ids: np.full(len(ids), nats))
        names = ("train", "validation", "test")
        return Corpus("text", {name: dataclasses.replace(split, name=name) for name in names}, None, "")

    class Untrained(Named):
        warm_starts = {}

        def __init__(self, name, nats):
            self.name, self.corpus = name, text(nats)

        def run_config(self, rate, seed):
            return tiny(train={"steps": 0, "seed": seed}, model={"norm": self.name, "n_layers": 1})

    variants = {"layer": Untrained("layer", 50.0), "rms": Untrained("rms", 0.1)}
    record, results, lines = {"starts": [{"host": "", "processor": "", "git": None}]}, Results(tmp_path), []
    sweep = dataclasses.replace(make_runner(variants, results, lines), record=record)
    assert sweep.train("final", [(name, 1e-3, 0) for name in variants]) == 1
    assert [key[1] for key in results.runs] == ["rms"]
    (error,) = results.failures().values()
    assert error.startswith("BelowEntropy: the validation loss is ")
    assert "but a causal model cannot get below 50.0000 on this text" in error
    assert any(error in line for line in lines)


def test_runs_in_which_processes_die_come_last_and_fail_in_the_end(tmp_path, monkeypatch):
    """All runs of "layer" kill the process that trains them; each start of the sweep is another process."""

    class Killed(BaseException):
        pass

    class DeadlyRuns:
        def __init__(self, configs, corpus, directory, **options):
            self.configs = configs

        def train(self, signals):
            order.append((self.configs[0].model.norm, self.configs[0].train.seed))
            if self.configs[0].model.norm == "layer":
                raise Killed
            about = ("phase", "variant", "learning_rate", "seed")
            result = {key: value for key, value in run("final", "plain", 1e-3, 0, 2.0).items() if key not in about}
            return [result for _ in self.configs]

    class Variants(Named):
        warm_starts, corpus = {}, None

    monkeypatch.setattr(runner, "StackedRuns", DeadlyRuns)
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a killed process removes no file
    keys = [(name, 1e-3, seed) for name in ("layer", "rms") for seed in range(16)]
    record = {"starts": [{"host": "", "processor": "", "git": None}]}
    starts = []
    for _ in range(4):
        order, lines = [], []
        sweep = make_runner({name: Variants(name) for name in ("layer", "rms")}, Results(tmp_path), lines)
        with contextlib.suppress(Killed):
            failed = dataclasses.replace(sweep, record=record).train("final", keys)
        starts.append(order)
    size = 2 * jax.device_count()
    layer, rms = ([(name, seed) for seed in range(0, 16, size)] for name in ("layer", "rms"))
    assert starts == [layer[:1], [*rms, layer[0]], layer[:1], []]
    assert failed == len(layer)
    error = "ProcessDied: 3 processes died while they trained runs of this program; do they fit in memory?"
    assert sweep.results.failures() == {("final", "layer", 1e-3, seed): error for seed in range(16)}
    assert not list(tmp_path.glob("unfinished/*"))  # the next start tries again


def test_a_variant_that_cannot_be_traced_does_not_stop_the_others(tmp_path, monkeypatch):
    def broken(config, corpus, warm):
        if config.model.norm == "layer":
            raise TypeError("dot_general requires contracting dimensions to have the same shape")
        return config.model.norm

    monkeypatch.setattr(variants_module, "fingerprint", broken)
    monkeypatch.setattr(variants_module, "_resolve_configs", lambda plan, say: resolved)
    resolved = {norm: (tiny(model={"norm": norm}), CORPUS) for norm in ("layer", "rms")}
    sweep = Sweep("?", "base.py", {"layer": {}, "rms": {}}, "rms")
    plan, lines = SweepPlan("name", "", "full", sweep, BUDGET, {}, dict.fromkeys(resolved, (1e-3,)), {}), []
    found = resolve_variants(plan, lines.append)
    assert {name: v.fingerprint for name, v in found.items()} == {"layer": "", "rms": "rms"}
    assert lines == [
        "WARNING: variant 'layer' cannot be traced: TypeError: dot_general requires contracting dimensions to have "
        "the same shape"
    ]


def test_a_config_is_checked_again_after_its_steps_and_width_are_computed(monkeypatch):
    """Both configs are right before: with 3 steps there is no decay after the warm-up, and no step to trace."""
    long = {"steps": 300, "batch_size": 4, "seq_len": 16}
    schedule = {"warmup_steps": 150, "decay_steps": 200}
    resolved = {
        "a": (tiny(train=long, optimizer=schedule), CORPUS),
        "b": (tiny(train=long | {"profile": (10, 12)}), CORPUS),
        "c": (tiny(train=long), CORPUS),
    }
    monkeypatch.setattr(variants_module, "_resolve_configs", lambda plan, say: resolved)
    monkeypatch.setattr(variants_module, "fingerprint", lambda config, corpus, warm: str(config))
    sweep = Sweep("?", "base.py", {"a": {}, "b": {}, "c": {}}, "a")

    def resolve(steps):
        lengths = dict.fromkeys(resolved, Match("tokens", "a", steps * 64 / n_params(resolved["a"][0])))
        grids = dict.fromkeys(resolved, (1e-3,))
        return resolve_variants(SweepPlan("name", "", "full", sweep, BUDGET, {}, grids, {}, lengths), print)

    assert {v.config.train.steps for v in resolve(30).values()} == {30}
    with pytest.raises(UserError) as found:
        resolve(3)
    assert len(found.value.problems) == 2
    warmup, profile = found.value.problems
    assert warmup.startswith("variant 'a', with train.steps from ")
    assert "tokens per parameter: config.optimizer.warmup_steps: 2 is not less than the schedule" in warmup
    assert "config.train.profile: (10, 12) must be (first, last) with first <= last <= train.steps = 3" in profile


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
        if fails and ("small", 8e-3, *plan.tuning_seeds) in keys:
            raise RuntimeError("out of memory")
        trained.extend((phase, *key) for key in keys)
        loss = {2e-3: 2.0, 4e-3: 1.9}
        runs = [run(phase, "plain", r, s, loss.get(r, 2.1)) | {"variant": v} for v, r, s in keys]
        runner.results.add(f"{phase}-{keys[0]}", runs)

    class NoSignals:
        received = 0

    monkeypatch.setattr(runner, "train_group", train_group)
    monkeypatch.setattr(runner._Runner, "measure_speeds", lambda self: None)
    grids = {"small": (1e-3, 2e-3, 4e-3, 8e-3), "large": (0.1, 0.2, 0.4, 0.8)}
    variants = {
        "large": Variant(tiny(model={"d_ff": 8}), CORPUS, grids["large"], 1, 7.0, "", {}, "small"),
        "small": Variant(tiny(), CORPUS, grids["small"], 1, 7.0, "", {}),
    }
    data = {"unigram": {"validation": 3.0, "test": 3.0}, "fingerprint": ""}
    described = {
        name: {"grid": list(v.grid), "rate_from": v.rate_from, "data": data, "config": {"train": {"steps": 1}}}
        for name, v in variants.items()
    }
    plan = SweepPlan("name", "", "quick", Sweep(), Budget(1, 2), {}, {}, {})
    record = {"variants": described, "tuning_seeds": list(plan.tuning_seeds), "seeds": list(plan.seeds)}
    record |= {"looks": [2], "comparisons": [("large", "small")], "margin": 0.005}
    results, lines = Results(tmp_path), []
    tuning = {("tuning", "small", rate, *plan.tuning_seeds) for rate in grids["small"]}
    n_seeds = dict.fromkeys(variants, 2)
    assert missing_runs(results, record, n_seeds) == {"large": tuning, "small": tuning}
    assert runner._Runner(plan, variants, record, results, 1, lines.append, NoSignals).run() == fails
    assert {run[1] for run in trained if run[0] == "tuning"} == {"small"}
    final = {run[2] for run in trained if run[:2] == ("final", "large")}
    if fails:
        assert not final
    else:
        assert "large: best learning rate 0.4" in lines
        assert final == {0.2, 0.4, 0.8}
        assert not missing_runs(results, record, n_seeds)


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
