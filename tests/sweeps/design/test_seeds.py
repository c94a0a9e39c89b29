"""The seeds of a sweep follow from its name; older directories keep theirs. Looks and placebos are checked."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import synthetic_sizes
from running import ROOT
from synthetic_sweep import sweep as synthetic
from synthetic_sweep import write
from tiny import tiny

from lm.config import to_dict
from lm.errors import UserError
from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.design import spec
from lm.sweeps.design.axes import LEARNING_RATE, at_size, match_rate
from lm.sweeps.design.placebo import placebo_name, placebo_pair
from lm.sweeps.design.seeds import FIRST_TUNING_SEED, MAX_SEEDS, by_size, fresh_seeds, seeds_of, tuning_seeds
from lm.sweeps.design.spec import MARGIN, Budget, load_sweep
from lm.sweeps.report import tables
from lm.sweeps.storage.records import read_sweep
from lm.sweeps.storage.results import final_runs, keep_seeds, open_sweep

TINY = ROOT / "tests" / "configs" / "tiny_sweep.py"
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.py"))


def test_no_two_sweeps_of_configs_share_a_seed():
    used = []
    for path in SWEEPS:
        sizes = load_sweep(str(path), "full").sweep.sizes
        for draw in (fresh_seeds, tuning_seeds):
            seeds = by_size(draw, path.stem, sizes, MAX_SEEDS)
            used += [seed for size in sizes or [""] for seed in seeds_of(seeds, at_size("some variant", size))]
    assert len(set(used)) == len(used) >= 2 * MAX_SEEDS * len(SWEEPS)
    assert max(used) < 2**31
    assert max(fresh_seeds("norms", MAX_SEEDS)) < FIRST_TUNING_SEED <= min(tuning_seeds("norms", MAX_SEEDS))


def test_sizes_are_independent_and_variants_of_a_size_are_paired(tmp_path):
    """With the same seeds at all sizes, the mean over sizes would have a larger variance than the jackknife takes."""
    plan = load_sweep(str(ROOT / "configs" / "sweeps" / "scale_swiglu.py"), "full")
    for seeds, n in ((plan.seeds, 5), (plan.tuning_seeds, 2)):
        used = {name: seeds_of(seeds, name) for name in plan.configs}
        assert {len(own) for own in used.values()} == {n}
        assert len({seed for own in used.values() for seed in own}) == len(plan.sweep.sizes) * n
        assert all(used[f"SwiGLU, {size}"] == used[f"SiLU, {size}"] for size in plan.sweep.sizes)
    quick = load_sweep(str(ROOT / "configs" / "sweeps" / "scale_swiglu.py"), "quick")
    assert seeds_of(quick.seeds, "SiLU, 96") == seeds_of(plan.seeds, "SiLU, 96")[:2]


def test_seeds_of_sizes_are_trained_recorded_analyzed_and_kept(tmp_path):
    record, runs = synthetic_sizes.sweep(1.25)
    fresh = {size: [100 * i + k for k in range(5)] for i, size in enumerate(synthetic_sizes.SIZES, start=1)}
    tuning = {size: [10**6 + 100 * i, 10**6 + 100 * i + 1] for i, size in enumerate(synthetic_sizes.SIZES, start=1)}
    for run in runs:
        own, first = (fresh, 0) if run["phase"] == "final" else (tuning, 10**6)
        run["seed"] = own[run["variant"].split(", ")[1]][run["seed"] - first]
    workdir = synthetic_sizes.write(tmp_path / "s", record | {"seeds": fresh, "tuning_seeds": tuning}, runs)
    a = analyze(workdir)
    alike = analyze(synthetic_sizes.write(tmp_path / "same", *synthetic_sizes.sweep(1.25)))
    assert a.savings[0].at_optimum == alike.savings[0].at_optimum  # the same losses under other seeds
    lines = tables.reproduction(a)
    assert "size 48: seeds [200, 201, 202, 203, 204], tuning seeds [1000200, 1000201]" in lines
    assert f"seeds {[0, 1, 2, 3, 4]}, tuning seeds {[1000000, 1000001]}" in tables.reproduction(alike)
    assert set(final_runs(a.results, a.record, "plain, 32", a.record["seeds"])) == {
        ("plain, 32", rate, seed) for rate in (0.001, 0.002, 0.004) for seed in fresh["32"]
    }

    plan = load_sweep(str(ROOT / "configs" / "sweeps" / "scale_swiglu.py"), "full")
    assert seeds_of(keep_seeds(plan, workdir).seeds, "SiLU, 64") == tuple(fresh["64"])
    sizes = {f"{size} wide": values for size, values in plan.sweep.sizes.items()}
    other = dataclasses.replace(plan, sweep=dataclasses.replace(plan.sweep, sizes=sizes))
    assert keep_seeds(other, workdir) == other  # another sweep, which `open_sweep` refuses
    of_older_version = keep_seeds(plan, tmp_path / "same")
    assert (
        seeds_of(of_older_version.seeds, "SiLU, 64") == seeds_of(of_older_version.seeds, "SiLU, 96") == tuple(range(5))
    )
    assert seeds_of(of_older_version.tuning_seeds, "SiLU, 96") == (1_000_000, 1_000_001)


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": {}},
        {"seeds": {size: [1] for size in synthetic_sizes.SIZES}},  # the tuning seeds are not by size
        {"seeds": {"32": [1]}, "tuning_seeds": {"32": [1]}},
        {
            key: {size: [1] * (1 + (size == "64")) for size in synthetic_sizes.SIZES}
            for key in ("seeds", "tuning_seeds")
        },
    ],
)
def test_seeds_that_do_not_fit_the_sizes_are_a_corrupted_record(tmp_path, changes):
    record, runs = synthetic_sizes.sweep(1.25)
    workdir = synthetic_sizes.write(tmp_path / "s", record | changes, runs)
    with pytest.raises(UserError, match="its seeds do not match its sizes"):
        read_sweep(workdir / "sweep.json")


def test_a_larger_budget_begins_with_the_seeds_of_a_smaller_one(monkeypatch):
    quick, full = (load_sweep(str(TINY), budget) for budget in ("quick", "full"))
    assert quick.seeds == full.seeds[:2] == fresh_seeds("tiny_sweep", 2)
    growing = planned(monkeypatch, budgets={"full": Budget(2, looks=(5, 8, 12, 20))})
    assert growing.looks == (5, 8, 12, 20)
    assert growing.seeds[:5] == full.seeds
    assert len(growing.seeds) == 20


def test_the_runs_that_layernorm_algorithms_starts_from_have_its_seeds():
    text = (ROOT / "configs" / "sweeps" / "layernorm_algorithms.py").read_text()
    named = re.search(r"for seed in ([\d ]+); do", text)[1].split()
    assert tuple(map(int, named)) == fresh_seeds("layernorm_algorithms", 5)


def test_a_directory_of_an_older_version_keeps_its_seeds(tmp_path):
    """Its sweep.json lists seeds 0 to 4, and neither looks nor a placebo."""
    record, runs = synthetic()
    config = tiny()
    configs = dict.fromkeys(record["variants"], config)
    variants = {name: v | {"config": to_dict(config), "warm_starts": {}} for name, v in record["variants"].items()}
    workdir = write(tmp_path / "s", record | {"variants": variants}, runs)
    assert "looks" not in json.loads((workdir / "sweep.json").read_text())
    plan = load_sweep(str(TINY), "full")
    kept = keep_seeds(plan, workdir)
    assert (kept.seeds, kept.tuning_seeds) == ((0, 1, 2, 3, 4), (1_000_000, 1_000_001))
    assert keep_seeds(plan, tmp_path / "new") == plan
    assert keep_seeds(load_sweep(str(TINY), "quick"), workdir).seeds == fresh_seeds("tiny_sweep", 2)
    assert [c.difference.n for c in analyze(workdir).comparisons] == [5, 5]

    described = {name: v | {"rate_from": None} for name, v in variants.items()}
    again = record | {"seeds": list(kept.seeds), "looks": [5], "placebo": None, "variants": described, "margin": MARGIN}
    open_sweep(workdir, again, configs)
    assert len(read_sweep(workdir / "sweep.json")["starts"]) == 2
    assert [c.difference.n for c in analyze(workdir).comparisons] == [5, 5]
    for changed, line in (
        ({"seeds": [9]}, r"seeds: \[0, 1, 2, 3, 4\] -> \[9\]"),
        ({"looks": [5, 8]}, r"looks: \[5\] -> \[5, 8\]"),
        ({"placebo": "wide"}, "placebo: None -> wide"),
    ):
        with pytest.raises(UserError, match=line):
            open_sweep(workdir, again | changed, configs)


@pytest.mark.parametrize("looks", [[8, 5], [5, 5], [4], [0, 5], [5.0], 5, ["a"], [], [True, 5]])
def test_looks_that_do_not_fit_the_seeds_are_a_corrupted_record(tmp_path, looks):
    record, runs = synthetic()
    with pytest.raises(UserError, match="its looks do not match its seeds"):
        read_sweep(write(tmp_path / "s", record | {"looks": looks}, runs) / "sweep.json")


def test_a_placebo_that_is_not_a_variant_is_a_corrupted_record(tmp_path):
    record, runs = synthetic()
    for i, placebo in enumerate(("other", ["plain"], 3)):
        with pytest.raises(UserError, match="its placebo is not a variant"):
            read_sweep(write(tmp_path / f"{i}", record | {"placebo": placebo}, runs) / "sweep.json")


def planned(monkeypatch, **changes):
    """Return the plan of the tiny sweep with changed fields, under the full budget."""
    found = dataclasses.replace(spec.run_file(str(TINY), "get_sweep", ""), **changes)
    monkeypatch.setattr(spec, "run_file", lambda *_: found)
    return load_sweep(str(TINY), "full")


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(2, 5, looks=(5, 8)), "budget 'full': seeds and looks are both given: seeds is one number"),
        (Budget(2, looks=5), "budget 'full': looks is 5: it must be a tuple of integers, such as (5, 8, 12, 20)"),
        (Budget(2, looks=(5, 8.5)), "looks is (5, 8.5): it must be a tuple of integers"),
        (Budget(2, looks=(5,)), "looks is (5,); it must be at least two numbers in ascending order"),
        (Budget(2, looks=(8, 5)), "looks is (8, 5); it must be at least two numbers in ascending order"),
        (Budget(2, looks=(4, 8)), "looks is 4; it must be at least 5 and at most 1000"),
        (Budget(2, looks=(5, 1001)), "looks is 1001; it must be at least 5 and at most 1000"),
        (Budget(looks=(5, 8)), "budget 'full': tuning_seeds is missing: it must be an integer"),
        (Budget(2), "budget 'full': seeds is missing: it must be an integer"),
    ],
)
def test_wrong_looks(monkeypatch, budget, expected):
    with pytest.raises(UserError) as caught:
        planned(monkeypatch, budgets={"full": budget})
    assert expected in str(caught.value)


def test_a_placebo_is_the_baseline_with_its_changes(monkeypatch):
    plan = planned(monkeypatch, placebo={"model.rope_pairing": "halves"})
    assert list(plan.configs) == ["mlp", "glu", "wild", "placebo"]
    assert plan.grids["placebo"] == plan.grids["mlp"]
    ours, theirs = plan.configs["placebo"].model, plan.configs["mlp"].model
    assert ours == dataclasses.replace(theirs, rope_pairing="halves")
    assert plan.sweep.comparisons == (("glu", "mlp"), ("wild", "mlp"))


def test_with_sizes_the_placebo_is_trained_at_the_first_size_with_tuning_runs(monkeypatch):
    sizes = {str(d): {"model.d_model": d} for d in (8, 16, 32)}
    sizes["8"][LEARNING_RATE] = match_rate("16", 2.0)
    plan = planned(monkeypatch, sizes=sizes, placebo={"model.rope_pairing": "halves"})
    assert list(plan.configs) == [
        *("mlp, 8", "glu, 8", "wild, 8"),
        *("mlp, 16", "glu, 16", "wild, 16", "placebo, 16"),
        *("mlp, 32", "glu, 32", "wild, 32"),
    ]
    ours, theirs = plan.configs["placebo, 16"].model, plan.configs["mlp, 16"].model
    assert ours == dataclasses.replace(theirs, rope_pairing="halves")
    assert plan.rates_from.keys() == {"mlp, 8", "glu, 8"}  # "wild" has its own rates


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"placebo": ["model.rope_pairing"]}, "placebo: ['model.rope_pairing'] must be a dictionary"),
        ({"placebo": {"optimizer.learning_rate": 1.0}}, "it uses the learning rates of the baseline; remove optimizer"),
        ({"placebo": {"train.seed": 3}}, "variant 'placebo': train.seed is set by the sweep; remove it"),
        ({"placebo": {"model.rope": 3}}, "variant 'placebo': config.model.rope: unknown key"),
        ({"comparisons": (("placebo", "mlp"),)}, "'placebo' is always compared with the baseline; remove it"),
        ({"variants": {"mlp": {}, "placebo": {}}}, "'placebo' is the name of the variant that placebo describes"),
    ],
)
def test_wrong_placebos(monkeypatch, changes, expected):
    with pytest.raises(UserError) as caught:
        planned(monkeypatch, **({"placebo": {"model.rope_pairing": "halves"}} | changes))
    assert expected in str(caught.value)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_that_compares_has_a_placebo_of_another_order_of_features(path: Path):
    """Initial weights are independent and alike over the features of a head, or of the residual stream, and AdamW and
    SGD treat all alike. Pairing or ordering the features in another way gives results of the same distribution."""
    plan = load_sweep(str(path), "full")
    if not plan.sweep.comparisons:
        assert not plan.sweep.placebo
        return
    key = {"rope": "model.rope_pairing", "sinusoidal": "model.sinusoidal_order"}
    record = {"placebo": placebo_name(plan.sweep), "baseline": plan.sweep.baseline}
    axes = {"sizes": list(plan.sweep.sizes), "texts": list(plan.sweep.texts)}
    placebo, baseline = (plan.configs[name].model for name in placebo_pair(record | axes))
    assert list(plan.sweep.placebo) == [key[baseline.positions]]
    change = {"rope_pairing", "sinusoidal_order"}
    ours, theirs = dataclasses.asdict(placebo), dataclasses.asdict(baseline)
    assert len([name for name in change if ours.pop(name) != theirs.pop(name)]) == 1
    assert ours == theirs
