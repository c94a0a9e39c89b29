"""Sweep files: plans, and all mistakes reported before anything runs."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from running import ROOT

from lm.sweeps import LEARNING_RATE, Budget, Sweep, match_params, product
from lm.sweeps import plan as plan_module
from lm.sweeps.plan import draw_seeds, load_sweep
from lm.system.errors import UserError

TINY = ROOT / "tests" / "configs" / "tiny_sweep.py"
STUDY = ROOT / "configs" / "studies" / "changes_2026" / "changes_2026.py"
SWEEPS = [*sorted((ROOT / "configs" / "sweeps").glob("*.py")), STUDY]
DECAY = "optimizer.weight_decay"
QUICK, FULL = Budget(tuning_seeds=1, seeds=2), Budget(tuning_seeds=2, seeds=5)
TWO = {"a": {}, "b": {"model.norm": "layer"}}
PAIR = {"baseline": "a", "comparisons": (("b", "a"),)}
SIZES = {"s": {}, "m": {"model.d_model": 32, LEARNING_RATE: (2e-3, 4e-3, 8e-3)}}
LENGTHS = {"1": {}, "2": {"train.steps": 16}}
TEXTS = {"plays": {}, "docs": {"data.source": "python_docs"}}


@pytest.fixture
def planned(monkeypatch):
    """Return planned(budget="quick", **changes): the plan of the tiny sweep with other fields."""
    fields = vars(plan_module.run_file(str(TINY), "get_sweep", ""))

    def load(budget="quick", **changes):
        sweep = Sweep(**fields | changes)
        monkeypatch.setattr(plan_module, "run_file", lambda *_: sweep)
        return load_sweep(str(TINY), budget)

    return load


def test_the_plan():
    plan = load_sweep(str(TINY), "full")
    lists = {name: v.lists[LEARNING_RATE] for name, v in plan.variants.items()}
    assert lists == {"mlp": (0.03, 0.1, 0.3), "glu": (0.02, 0.04, 0.08), "wild": (0.1, 0.2, 1e30)}
    assert plan.variants["glu"].match == "mlp"
    config = plan.variants["mlp"].config
    assert (config.model.ffn, config.model.d_model, config.train.steps) == ("mlp", 16, 8)
    assert config.optimizer.learning_rate == 0.03
    seeds = {name: (v.tuning_seeds, v.seeds) for name, v in plan.variants.items()}
    assert [len(found) for found in seeds["mlp"]] == [2, 5]
    assert not set(seeds["mlp"][0]) & set(seeds["mlp"][1])
    assert seeds["glu"] == seeds["wild"] == seeds["mlp"]


def test_every_variant_is_planned_at_every_size(planned):
    values = {"data.source": "text:text.txt"}
    plan = planned(sizes=SIZES, values=values, placebo={"model.rope_pairing": "halves"})
    assert list(plan.variants) == [
        f"{n}, {size}" for size in "sm" for n in ("mlp", "glu", "wild", "placebo")
    ]
    assert plan.comparisons == tuple(
        (f"{name}, {size}", f"mlp, {size}") for name in ("glu", "wild") for size in "sm"
    )
    assert plan.placebos == (("placebo, s", "mlp, s"), ("placebo, m", "mlp, m"))
    rates = {name: v.lists[LEARNING_RATE] for name, v in plan.variants.items()}
    assert rates["mlp, m"] == (2e-3, 4e-3, 8e-3)
    # a variant's own list is used at all sizes
    assert rates["glu, s"] == rates["glu, m"] == (0.02, 0.04, 0.08)
    assert (plan.variants["glu, m"].match, plan.variants["wild, m"].match) == ("mlp, m", None)
    assert [plan.variants[f"mlp, {size}"].config.model.d_model for size in "sm"] == [16, 32]


def test_a_full_budget_has_three_placebos_each_with_its_own_draw_of_initial_values(planned):
    """And so may other variants that are compared with; the first one may have values of its own."""
    given = {"variants": TWO | {"c": {"model.ffn": "mlp"}}, "baseline": "a"}
    given |= {"comparisons": (("b", "a"), ("c", "b")), "placebos": {"b": 1}}
    full = Budget(tuning_seeds=2, seeds=5, placebos=3)
    plan = planned(
        "full", **given, budgets={"full": full}, placebo={"model.rope_pairing": "halves"}
    )
    assert plan.placebos == (
        ("placebo", "a"),
        ("placebo 2", "a"),
        ("placebo 3", "a"),
        ("placebo of b", "b"),
    )
    models = {name: plan.variants[name].config.model for name in dict(plan.placebos)}
    assert [model.init_draw for model in models.values()] == [0, 2, 3, 1]
    assert models["placebo"].rope_pairing == "halves"
    assert models["placebo of b"].norm == "layer"
    assert planned(**given, budgets={"quick": QUICK}).placebos == ()
    assert Sweep.__dataclass_fields__["budgets"].default_factory()["full"].placebos == 3


def test_the_values_of_a_budget_replace_those_of_a_size_but_not_those_of_a_variant(planned):
    sizes = {"s": {"train.steps": 10, "model.n_layers": 2}, "m": {}}
    variants = {"a": {}, "b": {"train.steps": 7}}
    budgets = {"quick": Budget(tuning_seeds=1, seeds=2, values={"train.steps": 4}), "full": FULL}
    given = {
        "sizes": sizes,
        "variants": variants,
        "budgets": budgets,
        "values": {"optimizer.warmup_steps": 1},
    } | PAIR

    def steps(budget):
        return {name: v.config.train.steps for name, v in planned(budget, **given).variants.items()}

    assert steps("full") == {"a, s": 10, "b, s": 7, "a, m": 12, "b, m": 7}
    assert steps("quick") == {"a, s": 4, "b, s": 7, "a, m": 4, "b, m": 7}
    assert planned(**given).variants["a, s"].changes == {"model.n_layers": 2}


def test_every_variant_is_planned_on_every_text_with_other_seeds_and_at_every_size_on_it(planned):
    plan = planned(texts=TEXTS)
    assert list(plan.variants) == [
        f"{name}, {text}" for text in TEXTS for name in ("mlp", "glu", "wild")
    ]
    assert not set(plan.variants["glu, plays"].seeds) & set(plan.variants["glu, docs"].seeds)
    plan = planned(texts=TEXTS, sizes=SIZES)
    assert plan.cells == ["plays, s", "plays, m", "docs, s", "docs, m"]
    config = plan.variants["glu, docs, m"].config
    assert (config.model.d_model, config.data.source) == (32, "python_docs")


def test_every_variant_is_planned_at_every_length_with_other_seeds(planned):
    plan = planned(lengths=LENGTHS)
    assert plan.cells == ["1", "2"]
    steps = [plan.variants[f"mlp, {length}"].config.train.steps for length in "12"]
    assert steps == [8, 16]
    assert not set(plan.variants["mlp, 1"].seeds) & set(plan.variants["mlp, 2"].seeds)


def test_tuned_keys_have_lists_that_a_variant_may_replace(planned):
    variants = {
        "a": {LEARNING_RATE: 1e-3, DECAY: 0},
        "b": {},
        "c": {LEARNING_RATE: np.array([1e-3, 2e-3]).tolist()},
    }
    tuned = {"tune": {DECAY: (0, 0.1, 0.2)}, "learning_rates": tuple(np.array([1e-3, 1e-2]))}
    changes = tuned | {"variants": variants, "baseline": "b", "comparisons": [["c", "b"]]}
    lists = {name: tuple(v.lists.values()) for name, v in planned(**changes).variants.items()}
    assert lists["a"] == ((1e-3,), (0.0,))
    assert lists["b"] == ((1e-3, 1e-2), (0.0, 0.1, 0.2))
    assert lists["c"] == ((1e-3, 2e-3), (0.0, 0.1, 0.2))
    b = planned("full", **changes).variants["b"]
    assert (b.n_points, b.config.optimizer.weight_decay) == (2 + 3, 0.0)
    other_order = planned(
        variants=TWO, **PAIR, learning_rates=None, tune={DECAY: (0.1,), LEARNING_RATE: (1e-3,)}
    )
    assert list(other_order.variants["b"].lists) == [LEARNING_RATE, DECAY]


def test_a_warm_up_that_no_longer_fits_is_shortened_with_one_warning(planned, capsys):
    """As in lm.train: a cosine schedule of 20 steps cannot follow 20 steps of warm-up."""
    base, values = (
        "configs/shakespeare_small.py",
        {"data.source": "text:text.txt", "train.steps": 20},
    )
    plan = planned(base=base, values=values, variants=TWO, **PAIR)
    assert {v.config.optimizer.warmup_steps for v in plan.variants.values()} == {1}
    (warning,) = capsys.readouterr().err.splitlines()
    assert "optimizer.warmup_steps=1 in place of 20" in warning


MISTAKES = [
    ({"variants": TWO | {"b": {"model.norn": "layer"}}, **PAIR}, "variant 'b': config.model.norn: unknown key"),
    ({"variants": TWO | {"b": {"model.n_heads": 3}}, **PAIR}, "variant 'b': config.model.d_model: 16 is not d"),
    ({"variants": {"a": {1: 2}}}, "variants: {'a': {1: 2}} must be dict["),
    ({"variants": TWO | {"placebo": {}}, **PAIR}, "variants: 'placebo' is a name of placebos"),
    ({"variants": TWO | {"b": {"train.seed": 3}}, **PAIR}, "variant 'b': train.seed is set by the sweep"),
    ({"variants": TWO | {"b": {"eval.batch_size": 2}}, **PAIR}, "'b': eval.batch_size must be the same for all"),
    ({"variants": TWO | {"b": {LEARNING_RATE: []}}, **PAIR}, f"variant 'b': {LEARNING_RATE}: [] must be values"),
    ({"variants": TWO | {"b": {LEARNING_RATE: (0.0, 1.0)}}, **PAIR}, "config.optimizer.learning_rate: 0.0 is out"),
    ({"variants": TWO | {"b": {LEARNING_RATE: (1e-3, 2e-3)}}, **PAIR}, "'b' is tuned over 2 points and 'a' over 3"),
    ({"variants": TWO | {"b": {"model.d_ff": match_params("c")}}, **PAIR}, "variant 'b': there is no variant 'c'"),
    ({"variants": TWO | {"b": {"model.d_ff": match_params(variant="b")}}, **PAIR}, "a variant that is itself matched"),
    ({"variants": TWO | {"b": {"model.d_model": match_params("a")}}, **PAIR}, "config.model.d_model: Match(of='a') is"),
    *(({"variants": TWO | {name: {}}, **PAIR}, "must be one line of printable text") for name in
      ("", "a\nb", "a\0b", "\x1b[2J", "\u202egnp", "a" * 5000)),
    ({"values": None}, "values: None must be dict["),
    ({"values": {"model.d_ff": match_params("mpl")}}, "variant 'mlp': there is no variant 'mpl'; did you mean mlp?"),
    ({"values": {"model.d_ff": match_params("mlp")}}, "variant 'wild': it is matched to a variant that is itself"),
    ({"values": {LEARNING_RATE: 1e-3}}, (f"values: {LEARNING_RATE} is tuned; set it in "
                                        "learning_rates or tune")),
    ({"sizes": {"s": 16}}, "sizes: {'s': 16} must be dict["),
    ({"sizes": {"s": {"data.source": "text:a"}}, "texts": TEXTS}, "sizes, texts and lengths: docs, s: two axes set"),
    ({"lengths": LENGTHS, "texts": TEXTS}, "lengths: a sweep with lengths has no sizes or texts"),
    ({"lengths": {"1": {}}}, "lengths: there is one; give two or more"),
    ({"lengths": {"2": {"train.steps": 16}, "1": {}}}, "lengths: '1' is not longer than '2'; list them from short"),
    ({"lengths": {"1": {}, "wide": {"model.d_ff": 64}}}, "lengths: 'wide' is not longer than '1'"),
    ({"lengths": LENGTHS, "budgets": {"quick": Budget(tuning_seeds=1, seeds=2, values={"train.steps": 4})}},
     "budget 'quick': it sets train.steps, which the lengths set"),
    ({"lengths": LENGTHS | {"2": {LEARNING_RATE: ()}}}, f"length '2': {LEARNING_RATE}: () must be values"),
    ({"lengths": {"a\nb": {}, "c": {}}}, "must be one line of printable text"),
    ({"sizes": {"x, l": {}, "l": {}}, "variants": {"a": {}, "a, x": {}}, "comparisons": ()}, "name of two variants"),
    ({"sizes": SIZES | {"l": {LEARNING_RATE: ()}}}, f"size 'l': {LEARNING_RATE}: () must be values"),
    ({"sizes": SIZES | {"l": {"model.n_heads": 7}}}, "variant 'mlp, l': config.model.d_model: "),
    ({"comparisons": ()}, "comparisons: there are none; name the pairs"),
    ({"comparisons": ("glu", "mlp")}, "comparisons: ('glu', 'mlp') must be tuple[tuple[str, str]"),
    ({"comparisons": (("glue", "mlp"),)}, "there is no variant 'glue'; did you mean 'glu'?"),
    ({"comparisons": (("glu", "glu"),)}, "'glu' is compared with itself"),
    ({"comparisons": (("glu", "mlp"), ("mlp", "glu"))}, "comparisons: 'mlp' and 'glu' are compared twice"),
    ({"comparisons": (("placebo", "mlp"),), "placebo": {"model.qk_norm": True}}, "'placebo' is always compared"),
    ({"comparisons": (), "sizes": SIZES, "placebo": {"model.qk_norm": True}}, "placebo: it checks comparisons"),
    ({"placebo": {"model.qk_norm": True}}, ("placebo: model.qk_norm may change the loss; only "
                                           "model.rope_pairing and")),
    ({"values": {"init_from": "x"}, "placebo": {"model.rope_pairing": "halves"}}, "placebos: with init_from all"),
    ({"baseline": "base"}, "baseline: there is no variant 'base'"),
    ({"learning_rates": None}, "learning_rates is missing: give a tuple of numbers"),
    ({"learning_rates": (2e-3, 1e-3)}, (f"{LEARNING_RATE}: (0.002, 0.001) must be values in "
                                       "ascending order")),
    ({"learning_rates": ("1e-3",)}, "learning_rates: ('1e-3',) must be tuple[float, ...]"),
    ({"learning_rates": (-1e-2, 1e-3)}, "config.optimizer.learning_rate: -0.01 is out of range"),
    ({"tune": {LEARNING_RATE: (1e-3,)}}, (f"learning_rates and tune both have {LEARNING_RATE}; "
                                         "remove one")),
    ({"tune": {"model.d_ff": (8, 16)}}, "tune: model.d_ff: only keys of the optimizer are tuned"),
    ({"tune": {DECAY: (0.1, 0.1)}}, f"{DECAY}: (0.1, 0.1) must be values in ascending order"),
    ({"tune": {"optimizer.weight_decoy": (0.1,)}}, "config.optimizer.weight_decoy: unknown key"),
    ({"margin": "0.01"}, "margin: '0.01' must be float"),
    ({"margin": float("nan")}, "margin: nan must be between 0.0001 and 1 nats per token"),
    ({"budgets": {"quick": 1}}, "budgets: {'quick': 1} must be dict[str, "),
    ({"budgets": {"full": FULL}}, ("budgets: there is no 'quick'; add it, or run it with --budget "
                                  "full")),
    ({"budgets": {"quick": Budget(tuning_seeds=1, seeds="2")}}, "budget 'quick': seeds: '2' must be int"),
    ({"budgets": {"quick": QUICK, "full": Budget(tuning_seeds=2, seeds=4)}}, "seeds is 4; it must be at least 5"),
    ({"budgets": {"quick": Budget(tuning_seeds=0, seeds=2)}}, "tuning_seeds is 0"),
    ({"placebos": {"wild": 2}}, "placebos: 'wild' is no variant, besides the baseline, that others"),
    ({"budgets": {"quick": Budget(tuning_seeds=2, seeds=11, placebos=-1)}}, "placebos is -1; it must be at"),
    ({"values": {"eval.patience": 2}}, ("eval.patience is 2, and a sweep does not use it; set it "
                                       "to 0 in values")),
    ({"variants": TWO | {"b": {"log.detail_every": 4}}, **PAIR}, "log.detail_every is 4, and a sweep does not"),
    ({"values": {"train.on_nonfinite": "skip"}}, "set it to 'stop' in values"),
    ({"values": {"train.profile": (1, 2)}}, "train.profile is (1, 2), and a sweep does not use it"),
    ({"base": "configs/shakespere.py"}, "there is no file configs/shakespere.py; did you mean"),
]  # fmt: skip


def test_mistakes(planned):
    for changes, expected in MISTAKES:
        with pytest.raises(UserError, match=re.escape(expected)):
            planned(**changes)


def test_all_mistakes_are_reported_at_once(planned):
    variants = {"a": {}, "b": {"model.norn": "layer"}}
    changes = {
        "variants": variants,
        "baseline": "x",
        "comparisons": (("b", "a"),),
        "budgets": {"full": FULL},
    }
    with pytest.raises(UserError) as caught:
        planned(**changes, learning_rates=())
    assert len(caught.value.problems) == 4  # of the baseline, the rates, the budget, the key


def test_more_than_ten_seeds_need_three_tuning_seeds_only_if_something_is_tuned(planned):
    many = {"quick": Budget(tuning_seeds=1, seeds=11)}
    assert planned(budgets=many, learning_rates=(1e-3,), variants=TWO, **PAIR)
    assert planned(budgets={"quick": Budget(tuning_seeds=3, seeds=100)})


@pytest.mark.parametrize(
    ("fields", "named"),
    [("question='?', base='x.py'", ("variants", "comparisons")), ("quesiton='?'", ("quesiton",))],
)
def test_missing_and_unknown_fields_are_named(tmp_path, fields, named):
    path = tmp_path / "sweep.py"
    path.write_text(f"from lm.sweeps import Sweep\ndef get_sweep():\n    return Sweep({fields})\n")
    with pytest.raises(UserError) as caught:
        load_sweep(str(path), "quick")
    assert all(name in str(caught.value) for name in (str(path), *named))


def test_a_path_may_begin_with_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", str(TINY.parent))
    assert (
        load_sweep("~/tiny_sweep.py", "quick").background
        == load_sweep(str(TINY), "quick").background
    )


def test_axes_refuse_what_would_be_ambiguous():
    a = {"a": {"model.norm": "rms"}}
    with pytest.raises(ValueError, match=r"a, b: two axes set model\.norm"):
        product(a, {"b": {"model.norm": "layer"}})
    with pytest.raises(ValueError, match="an axis has no variants"):
        product(a, {})


def test_seeds_follow_from_the_name_and_a_larger_budget_begins_with_the_smaller_one():
    quick, full = (load_sweep(str(TINY), budget).variants["mlp"] for budget in ("quick", "full"))
    assert quick.seeds == full.seeds[:2] == draw_seeds("tiny_sweep", 2)


@pytest.mark.slow
def test_no_two_sweeps_or_cells_of_configs_share_a_seed():
    plans = [load_sweep(str(path), "full") for path in SWEEPS]
    seeds = {
        seeds
        for plan in plans
        for v in plan.variants.values()
        for seeds in (v.seeds, v.tuning_seeds)
    }
    assert len(seeds) == 2 * sum(len(plan.cells) for plan in plans)
    assert all(not set(a) & set(b) for a, b in itertools.combinations(seeds, 2))


@pytest.mark.slow
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_of_configs_follow_the_design(path: Path):
    """Two tuning seeds, fifteen fresh ones (ten over sizes), and placebos: one of another order of features
    (test_placebo.py), the others with other initial values.
    """
    plan = load_sweep(str(path), "full")
    if path.stem != "cmu_15780":  # nothing is tuned, and a run is long
        assert plan.budget.tuning_seeds == 2
        assert plan.budget.seeds in (10, 15)
    if plan.comparisons:
        assert set(plan.sweep.placebo) <= {"model.rope_pairing", "model.sinusoidal_order"}
        assert plan.placebos
        for placebo, baseline in plan.placebos:
            ours, theirs = plan.variants[placebo].config.model, plan.variants[baseline].config.model
            assert ours != theirs
            if ours.init_draw != theirs.init_draw:
                continue
            key = "rope_pairing" if ours.positions == "rope" else "sinusoidal_order"
            assert getattr(ours, key) != getattr(theirs, key)


def test_the_runs_that_layernorm_algorithms_starts_from_have_its_seeds():
    text = (ROOT / "configs" / "sweeps" / "layernorm_algorithms.py").read_text()
    first, last = map(int, re.search(r"seq (\d+) (\d+)\)", text).groups())
    assert range(first, last + 1) == draw_seeds("layernorm_algorithms", 15)
