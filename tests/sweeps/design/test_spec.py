"""Sweep files: plans, and all mistakes reported before anything runs."""

import dataclasses

import numpy as np
import pytest
from running import ROOT

from lm.command_line.loading import load as load_config
from lm.command_line.sweeping import BUDGETS
from lm.config import Config
from lm.errors import UserError
from lm.sweeps.design import spec
from lm.sweeps.design.axes import LEARNING_RATE, Match, match_params, match_rate, match_tokens
from lm.sweeps.design.spec import Budget, Sweep, load_sweep

TINY = ROOT / "tests" / "configs" / "tiny_sweep.py"


def test_the_plan():
    plan = load_sweep(str(TINY), "full")
    assert plan.name == "tiny_sweep"
    assert plan.grids == {"mlp": (1e-3, 1e-2), "glu": (1e-3, 1e-2), "wild": (0.1, 1e30)}
    assert plan.matches == {"glu": Match("params", "mlp")}
    assert plan.configs["wild"].optimizer.learning_rate == 0.1
    assert (plan.configs["mlp"].model.ffn, plan.configs["mlp"].model.d_model, plan.configs["mlp"].train.steps) == (
        "mlp", 16, 8,
    )  # fmt: skip
    assert not set(plan.tuning_seeds) & set(plan.seeds)
    assert (len(plan.tuning_seeds), len(plan.seeds)) == (2, 5)


def test_every_variant_is_planned_at_every_size(monkeypatch):
    """Sizes have grids of their own; the largest takes the best rate of another size. Matches stay within a size."""
    sizes = {"s": {}, "m": {"model.d_model": 32, LEARNING_RATE: (2e-3, 4e-3)}}
    sizes["l"] = {"model.d_model": 64, "model.d_ff": 80, LEARNING_RATE: match_rate("m", 0.5)}
    sweep = spec.run_file(str(TINY), "get_sweep", "")
    values = sweep.values | {"train.steps": match_tokens(5)}
    monkeypatch.setattr(spec, "run_file", lambda *_: dataclasses.replace(sweep, sizes=sizes, values=values))
    plan = load_sweep(str(TINY), "full")
    assert list(plan.configs) == [f"{name}, {size}" for size in "sml" for name in ("mlp", "glu", "wild")]
    assert plan.sweep.baseline == "mlp, l"
    assert plan.sweep.comparisons[:4] == (("glu, s", "mlp, s"), ("glu, m", "mlp, m"), ("glu, l", "mlp, l"),
                                          ("wild, s", "mlp, s"))  # fmt: skip
    assert (plan.grids["glu, s"], plan.grids["glu, m"], plan.grids["glu, l"]) == (
        (1e-3, 1e-2),
        (2e-3, 4e-3),
        (1e-3, 2e-3),
    )
    assert plan.rates_from == {"mlp, l": "mlp, m", "glu, l": "glu, m"}
    assert plan.grids["wild, l"] == (0.1, 1e30)  # a variant's own value is used at all sizes
    assert plan.matches == {f"glu, {size}": Match("params", f"mlp, {size}") for size in "sml"}
    assert plan.lengths == {
        f"{n}, {size}": Match("tokens", f"mlp, {size}", 5) for size in "sml" for n in sweep.variants
    }
    assert [plan.configs[f"mlp, {size}"].model.d_model for size in "sml"] == [16, 32, 64]
    assert plan.configs["mlp, l"].model.d_ff == 80


def tiny_with(monkeypatch, **changes) -> str:
    """Return the mistakes that are reported for the tiny sweep with changed fields."""
    sweep = dataclasses.replace(spec.run_file(str(TINY), "get_sweep", ""), **changes)
    monkeypatch.setattr(spec, "run_file", lambda *_: sweep)
    with pytest.raises(UserError) as caught:
        load_sweep(str(TINY), "quick")
    return str(caught.value)


TWO = {"a": {}, "b": {"model.norm": "layer"}}
TWO_GRIDS = {"mlp": {}, "glu": {"model.ffn": "glu", LEARNING_RATE: (1e-3, 1e-2)}}
PAIR = {"baseline": "a", "comparisons": (("b", "a"),)}
QUICK, FULL = Budget(1, 2), Budget(2, 5)
SIZES = {"s": {"model.d_model": 16}, "m": {"model.d_model": 32}, "l": {"model.d_model": 64}}
BACKWARDS = Budget(1, 2, learning_rates=[2e-3, 1e-3])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"variants": {"a": {}, "b": {"model.norn": "layer"}}, **PAIR}, r"variant 'b': config.model.norn: unknown key"),
        ({"variants": {"a": {}, "b": {"model.n_heads": 3}}, **PAIR}, "variant 'b': config.model.d_model: 16 is not d"),
        ({"variants": {}}, "variants: there are 0"),
        ({"sizes": None}, "sizes is missing: it must be a dictionary, by name, of dictionaries"),
        ({"sizes": {"s": 16}}, "sizes: {'s': 16} must be a dictionary, by name, of dictionaries"),
        ({"sizes": {"s": {}, "m": {}}}, "sizes: there are 2, and a trend needs at least 3"),
        ({"sizes": SIZES, "comparisons": ()}, "sizes: there are 3; without comparisons a sweep fits loss = E + A N^-a"),
        ({"comparisons": ()}, "comparisons: there are none; name the pairs"),
        ({"sizes": SIZES, "variants": {"mlp": {}}}, "variants: there is 1, and a comparison needs at least 2"),
        ({"sizes": SIZES | {"": {}}}, "sizes: a size must have a name"),
        ({"sizes": SIZES | {"x, l": {}, "l": {}}}, "sizes: 'x, l' ends with ', l', so names would be ambiguous"),
        (
            {"sizes": SIZES | {"xl": {"model.d_model": 128}}, "comparisons": (), "placebo": {"model.qk_norm": True}},
            "placebo: it checks comparisons, and this sweep has none; remove it",
        ),
        ({"sizes": SIZES, "budgets": {"quick": Budget(1, looks=(2, 3))}}, "'quick': looks: a sweep with sizes needs a"),
        ({"sizes": SIZES | {"l": {LEARNING_RATE: match_rate("xs")}}}, "size 'l': optimizer.learning_rate: 'xs' is not"),
        ({"sizes": SIZES | {"l": {LEARNING_RATE: match_rate("l")}}}, "size 'l': optimizer.learning_rate: 'l' is not"),
        ({"sizes": SIZES | {"l": {LEARNING_RATE: ()}}}, "size 'l': optimizer.learning_rate: () must be numbers"),
        ({"sizes": SIZES | {"l": {"model.d_ff": match_params("mlp")}}}, "size 'l': model.d_ff: params of 'mlp': match"),
        ({"sizes": SIZES | {"l": {"train.seed": 1}}}, "size 'l': train.seed is set by the sweep"),
        ({"sizes": SIZES | {"l": {"model.n_heads": 7}}}, "variant 'mlp, l': config.model.d_model: "),
        ({"variants": TWO | {"b": {LEARNING_RATE: match_rate("a")}}, **PAIR}, "match_rate belongs in sizes"),
        ({"values": {"model.d_ff": match_tokens(5)}}, "values: model.d_ff: 5 tokens per parameter: only train.steps"),
        ({"variants": {"mlp": {}}}, "variants: there is 1"),
        ({"learning_rates": ()}, "learning_rates: () must be numbers in ascending order"),
        ({"learning_rates": (2e-3, 1e-3)}, "learning_rates: (0.002, 0.001) must be numbers in ascending order"),
        ({"learning_rates": (1e-3, -1e-2)}, "ascending order"),
        ({"learning_rates": []}, "learning_rates: [] must be numbers in ascending order"),
        ({"learning_rates": [2e-3, 1e-3]}, "learning_rates: [0.002, 0.001] must be numbers in ascending order"),
        ({"learning_rates": None}, "learning_rates is missing: it must be a tuple of numbers"),
        ({"learning_rates": ("1e-3",)}, "learning_rates: ('1e-3',) must be numbers in ascending order"),
        ({"budgets": {"quick": BACKWARDS, "full": FULL}}, "budget 'quick': learning_rates: [0.002, 0.001] must be"),
        ({"variants": TWO | {"b": {LEARNING_RATE: []}}, **PAIR}, f"variant 'b': {LEARNING_RATE}: [] must be numbers"),
        ({"variants": TWO | {"b": {LEARNING_RATE: (0.0, 1.0)}}, **PAIR}, "config.optimizer.learning_rate: 0.0 is out"),
        ({"variants": TWO | {"b": {"eval.batch_size": 2}}, **PAIR}, "'b': eval.batch_size must be the same for all"),
        ({"variants": ["a", "b"]}, "variants: ['a', 'b'] must be a dictionary, by name, of dictionaries"),
        ({"variants": {"a": None}}, "variants: {'a': None} must be a dictionary, by name, of dictionaries"),
        ({"variants": {"a": {1: 2}}}, "variants: {'a': {1: 2}} must be a dictionary, by name, of dictionaries"),
        ({"values": None}, "values is missing: it must be a dictionary of config keys and values"),
        ({"base": None}, "base is missing: it must be the path of a config file"),
        ({"baseline": None}, "baseline is missing: it must be the name of a variant"),
        ({"comparisons": None}, "comparisons is missing: it must be pairs"),
        ({"comparisons": (("glu", None),)}, "comparisons: (('glu', None),) must be pairs"),
        ({"budgets": {"quick": 1}}, "budgets: {'quick': 1} must be a dictionary of Budgets by name"),
        ({"budgets": {"quick": Budget(1, "2")}}, "budget 'quick': seeds is '2': it must be an integer"),
        ({"budgets": {"quick": Budget(1)}}, "budget 'quick': seeds is missing: it must be an integer"),
        ({"comparisons": (("glu", "mlp"), ("mlp", "glu"))}, "comparisons: 'mlp' and 'glu' are compared twice"),
        ({"comparisons": (("glu", "mlp"),), "learning_rates": (1e-3,), "variants": TWO_GRIDS}, "'glu' has 2 learning"),
        ({"learning_rates": (-1e-2, 1e-3)}, "config.optimizer.learning_rate: -0.01 is out of range"),
        ({"values": {"optimizer.learning_rate": ()}}, "values: set learning rates in learning_rates or variants"),
        ({"variants": TWO | {"b": {"train.seed": 3}}, **PAIR}, "variant 'b': train.seed is set by the sweep"),
        ({"comparisons": ()}, "comparisons: there are none"),
        ({"comparisons": (("glue", "mlp"),)}, "there is no variant 'glue'; did you mean 'glu'?"),
        ({"comparisons": ("glu", "mlp")}, "comparisons: ('glu', 'mlp') must be pairs (variant, against)"),
        ({"comparisons": (("glu", "glu"),)}, "'glu' is compared with itself"),
        ({"baseline": "base"}, "baseline: there is no variant 'base'"),
        ({"variants": TWO | {"b": {"model.d_ff": match_params("c")}}, **PAIR}, "variant 'b': there is no variant 'c'"),
        ({"variants": TWO | {"b": {"model.d_ff": match_params("b")}}, **PAIR}, "a variant that is itself matched"),
        ({"variants": TWO | {"b": {"model.d_model": match_params("a")}}, **PAIR}, "only model.d_ff can be matched"),
        ({"budgets": {"full": FULL}}, "budgets: there is no 'quick'; add it, or run it with --budget full"),
        ({"budgets": {}}, "budgets: there is no 'quick'; add it"),
        ({"budgets": {"quick": QUICK, "full": FULL, "huge": FULL}}, "unknown 'huge'"),
        ({"budgets": {"quick": QUICK, "full": Budget(2, 4)}}, "seeds is 4; it must be at least 5"),
        ({"budgets": {"quick": Budget(0, 2), "full": FULL}}, "tuning_seeds is 0"),
        ({"margin": "0.01"}, "margin: '0.01' must be a number, in nats per token"),
        ({"margin": None}, "margin is missing: it must be a number, in nats per token"),
        ({"margin": 0}, "margin: 0 must be between 0.0001 and 1 nats per token"),
        ({"margin": float("nan")}, "margin: nan must be between 0.0001 and 1 nats per token"),
        ({"base": "configs/shakespere.py"}, "there is no file configs/shakespere.py; did you mean"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_mistakes(monkeypatch, changes, expected):
    assert expected in tiny_with(monkeypatch, **changes)


def test_grids_may_be_lists_of_any_numbers_or_one_rate(monkeypatch):
    grids = {"a": [1e-3, 1e-2], "b": tuple(np.array([2e-3, 2e-2])), "c": 3e-3}
    variants = {name: {LEARNING_RATE: grid} for name, grid in grids.items()}
    of_file = spec.run_file(str(TINY), "get_sweep", "")
    sweep = dataclasses.replace(of_file, variants=variants, baseline="a", comparisons=[["b", "a"]])
    monkeypatch.setattr(spec, "run_file", lambda *_: sweep)
    assert load_sweep(str(TINY), "quick").grids == {"a": (1e-3, 1e-2), "b": (2e-3, 2e-2), "c": (3e-3,)}


def test_all_mistakes_are_reported_at_once(monkeypatch):
    problems = tiny_with(monkeypatch, baseline="x", comparisons=(), learning_rates=()).splitlines()
    assert len(problems) == 3


def test_a_missing_budget_does_not_hide_a_misspelled_key(monkeypatch):
    misspelled = {"a": {}, "b": {"model.norn": "layer"}}
    problems = tiny_with(monkeypatch, variants=misspelled, budgets={"full": FULL}, **PAIR)
    assert "there is no 'quick'" in problems
    assert "variant 'b': config.model.norn: unknown key" in problems


def test_a_sweep_may_have_a_quick_budget_only(monkeypatch):
    sweep = dataclasses.replace(spec.run_file(str(TINY), "get_sweep", ""), budgets={"quick": QUICK})
    monkeypatch.setattr(spec, "run_file", lambda *_: sweep)
    assert load_sweep(str(TINY), "quick").budget == QUICK
    with pytest.raises(UserError, match="budgets: there is no 'full'; add it, or run it with --budget quick"):
        load_sweep(str(TINY), "full")


def test_missing_fields_are_named(tmp_path):
    path = tmp_path / "sweep.py"
    path.write_text("from lm.sweeps import Sweep\ndef get_sweep():\n    return Sweep(question='?', base='x.py')\n")
    with pytest.raises(UserError) as caught:
        load_sweep(str(path), "quick")
    missing = [line.split(": ")[1].split()[0] for line in str(caught.value).splitlines()]
    assert missing == ["variants", "baseline", "comparisons", "learning_rates", "budgets"]
    assert "variants is missing: it must be a dictionary" in str(caught.value)


def test_another_kind_of_file_is_refused_with_the_command_that_takes_it():
    config, sweep = ROOT / "configs" / "shakespeare.py", ROOT / "configs" / "sweeps" / "norms.py"
    with pytest.raises(UserError, match=rf"not get_sweep\(\); use python -m lm\.train --config {config}$"):
        load_sweep(str(config), "quick")
    with pytest.raises(UserError, match=rf"not get_config\(\); use python -m lm\.sweep --config {sweep}$"):
        load_config(str(sweep), [])


def test_a_file_that_declares_another_encoding(tmp_path):
    path, text = tmp_path / "sweep.py", TINY.read_text().replace("__file__", repr(str(TINY)))
    assert text.startswith('"""')
    path.write_bytes(("# -*- coding: latin-1 -*-\n" + text.replace('"""', '"""L\u00e4nge: ', 1)).encode("latin-1"))
    assert load_sweep(str(path), "quick").background.startswith("L\u00e4nge: ")


@pytest.mark.parametrize("where", ["question", "docstring", "variant"])
def test_text_that_utf_8_cannot_encode_is_refused(monkeypatch, where):
    sweep = spec.run_file(str(TINY), "get_sweep", "")
    if where == "question":
        sweep = dataclasses.replace(sweep, question="why \udcff")
    if where == "variant":
        sweep = dataclasses.replace(sweep, variants=sweep.variants | {"\udcff": {"model.d_ff": 7}})
    if where == "docstring":
        monkeypatch.setattr(spec.ast, "get_docstring", lambda _: "\udcff")
    monkeypatch.setattr(spec, "run_file", lambda *_: sweep)
    monkeypatch.setattr(spec, "load_values", lambda *_: Config())
    with pytest.raises(UserError, match="has a character that UTF-8 cannot encode; remove it"):
        load_sweep(str(TINY), "quick")


HUGE = 10**400


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"budgets": {"quick": Budget(1, HUGE)}}, "seeds is 1000000000.* it must be at least 2 and at most 1000"),
        (
            {"budgets": {"quick": Budget(HUGE, 2)}},
            "tuning_seeds is 1000000.* it must be at least 1 and at most 1000",
        ),
        ({"learning_rates": (0.1, HUGE)}, "is too large for a float"),
        ({"question": 10**5000}, "question: a number of thousands of digits must be a question"),
    ],
)
def test_integers_of_hundreds_of_digits(monkeypatch, changes, expected):
    sweep = dataclasses.replace(spec.run_file(str(TINY), "get_sweep", ""), **changes)
    monkeypatch.setattr(spec, "run_file", lambda *_: sweep)
    real = spec.load_values
    monkeypatch.setattr(spec, "load_values", lambda _, values: real(str(ROOT / "tests/configs/tiny.py"), values))
    with pytest.raises(UserError, match=expected):
        load_sweep(str(TINY), "quick")


def test_files_that_do_not_return_a_sweep(tmp_path):
    path = tmp_path / "sweep.py"
    path.write_text("def get_sweep():\n    return {}\n")
    with pytest.raises(UserError, match="returned dict; it must return a Sweep"):
        load_sweep(str(path), "quick")
    path.write_text("def get_sweeps():\n    return {}\n")
    with pytest.raises(UserError, match=r"has no function get_sweep\(\)"):
        load_sweep(str(path), "quick")


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_sweep_in_configs_has_a_plan(monkeypatch, tmp_path, path, budget):
    """Including layernorm_algorithms, which starts from runs that must be trained first."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs" / "layernorm-0" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    plan = load_sweep(str(path), budget)
    assert isinstance(plan.sweep, Sweep)
    assert plan.sweep.question.endswith("?")


def test_the_example_of_the_documentation(tmp_path):
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    path = tmp_path / "qk_norm.py"
    path.write_text(code.replace('"configs/', f'"{ROOT}/configs/'))
    for budget in BUDGETS:
        assert list(load_sweep(str(path), budget).configs) == ["base", "QK-norm", "placebo"]
