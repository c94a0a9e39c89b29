"""Variants: matched widths, and the refusal of two that are the same experiment."""

import dataclasses

import numpy as np
import pytest
from running import slow
from tiny import tiny

from lm import model, parameters
from lm.data.corpus import Corpus, Split
from lm.declarations import Parameter
from lm.sweeps import Budget, Sweep, analysis
from lm.sweeps import variants as module
from lm.sweeps.plan import Plan, PlannedVariant
from lm.sweeps.tuning import LEARNING_RATE
from lm.sweeps.variants import Variant, describe_variants, fingerprint, matched, refuse_duplicates
from lm.system.errors import UserError

DECAY = "optimizer.weight_decay"
TOKENS = np.arange(400, dtype=np.uint16) * 7 % 19
SPLITS = {name: Split(name, TOKENS, 400, 400) for name in ("train", "validation", "test")}
CORPUS = Corpus("numbers", SPLITS, None, "fingerprint")


def planned(config, changes=(), rates=(1e-3,), match=None) -> PlannedVariant:
    return PlannedVariant(
        "", "", dict(changes), {LEARNING_RATE: rates}, range(5), range(6, 8), config, match
    )


def plan_of(variants: dict[str, PlannedVariant]) -> Plan:
    names = {
        "variants": {key: {} for key in variants},
        "baseline": next(iter(variants)),
        "comparisons": (),
    }
    sweep = Sweep(question="?", base="base.py", budgets={}, **names)
    return Plan("name", "", sweep, "full", Budget(tuning_seeds=2, seeds=5), variants, ())


def n_params(config) -> int:
    return parameters.count(parameters.parameter_table(config.model))


@pytest.mark.parametrize(
    "target", [{"ffn": "mlp", "d_ff": 64}, {"ffn": "mlp", "d_ff": 37}, {"n_layers": 4}]
)
def test_the_matched_width_is_the_nearest_of_all(target):
    ours, theirs = tiny(model={"ffn": "glu"}), tiny(model=target)
    found = matched(ours, theirs)
    assert found == dataclasses.replace(
        ours, model=dataclasses.replace(ours.model, d_ff=found.model.d_ff)
    )
    off = {
        w: abs(n_params(tiny(model={"ffn": "glu", "d_ff": w})) - n_params(theirs))
        for w in range(1, 400)
    }
    assert off[found.model.d_ff] == min(off.values())


def test_a_width_may_be_matched_to_a_variant_that_is_not_trained(monkeypatch):
    plan = plan_of({"glu": planned(tiny(), match="wide")})
    plan = dataclasses.replace(plan, targets={"wide": planned(tiny(model={"d_ff": 37}))})
    monkeypatch.setattr(module.data, "open_corpus", lambda *_, **__: CORPUS)
    monkeypatch.setattr(module, "resolve_config", lambda config, _: config)
    monkeypatch.setattr(module, "check_arrays", lambda *_: None)
    variants = module.resolve_variants(plan, print)
    assert {name: v.config.model.d_ff for name, v in variants.items()} == {"glu": 37}
    assert "(params of 'wide')" in module._changes("glu", variants)


def test_widths_that_cannot_match_are_refused(monkeypatch, fresh_tables):
    with pytest.raises(
        UserError, match=r"match_params: \S+ parameters with d_ff = 1, but \S+ to match; set d_ff"
    ):
        matched(tiny(), tiny(model={"n_layers": 1, "d_ff": 1}))
    for n_layers, shape in ((7, lambda c: (c.d_ff, c.d_ff)), (8, lambda c: (3, 3))):
        fresh_tables()
        table = lambda c, shape=shape: {"mine_XY": Parameter(shape(c), "XY", "weight", "X")}  # noqa: E731
        monkeypatch.setitem(model.FEED_FORWARDS, "glu", (table, model.glu))
        with pytest.raises(UserError, match=r"match_params: .* ffn = glu .* not linear"):
            matched(tiny(model={"n_layers": n_layers}), tiny())


def variants_of(changes: dict[str, dict], rates: dict[str, tuple]) -> dict[str, Variant]:
    found = {}
    for name, changed in changes.items():
        sections = {"optimizer": {"learning_rate": rates[name][0]}}
        for key, value in changed.items():
            section, _, key = key.partition(".")
            sections.setdefault(section, {})[key] = value
        config = tiny(**sections)
        found[name] = Variant(planned(config, changed, rates[name]), config, CORPUS, 1, 7.0)
    return found


SAME = "variants 'a' and 'b' are the same experiment"
IDLE = {"model.norm_bias": False}


@pytest.mark.parametrize(
    ("a", "b", "rates", "expected"),
    [
        ({}, IDLE, [(2e-3,), (2e-3,)], f"{SAME}; model.norm_bias has no effect here"),
        ({}, IDLE, [(2e-3,), (4e-3, 8e-3)], f"{SAME}; model.norm_bias has no effect here"),
        ({"model.norm": "rms"}, {}, [(2e-3,), (2e-3,)], f"{SAME}; model.norm is rms in both"),
        (
            {"model.norm": "rms"},
            IDLE,
            [(2e-3,)] * 2,
            "model.norm_bias has no effect here; model.norm is rms in both",
        ),
        ({}, {}, [(2e-3, 4e-3), (4e-3, 8e-3)], SAME),
    ],
)
def test_variants_that_share_a_program_are_refused_and_their_keys_named(a, b, rates, expected):
    variants = variants_of({"a": a, "b": b}, dict(zip("ab", rates, strict=True)))
    with pytest.raises(UserError, match=expected):
        refuse_duplicates(variants, dict.fromkeys("ab", "the same"))
    refuse_duplicates(variants, {"a": "one", "b": "another"})


def test_what_can_be_found_is_that_of_the_least_precise_comparison(monkeypatch):
    """The error of each list that a variant tunes, and the placebos of its own control, count."""
    rates = (1e-3, 2e-3)
    decayed = dataclasses.replace(planned(tiny()), lists={LEARNING_RATE: rates, DECAY: (0.1, 0.2)})
    own = {"base": planned(tiny(), rates=rates), "a": planned(tiny(), rates=rates), "b": decayed}
    own["placebo"] = own["base"]
    own = {name: dataclasses.replace(p, arm=name) for name, p in own.items()}
    plan = dataclasses.replace(plan_of(own), comparisons=(("a", "base"), ("b", "base")))
    plan = dataclasses.replace(
        plan, sweep=dataclasses.replace(plan.sweep, placebo={"model.rope_pairing": "adjacent"})
    )
    variants = {name: Variant(p, tiny(), CORPUS, 100, 7.0) for name, p in own.items()}
    known = []

    def found(noise, n_seeds, n_controls, n_cells, n_tests, **_):
        known.append((noise.of_tuning, n_seeds, n_controls, n_cells, n_tests))
        return noise.of_tuning, 2 * noise.of_tuning

    noise = analysis.Noise("page", "", 100, 1e-4, 0.01)
    monkeypatch.setattr(module, "noise_of", lambda *_: noise)
    monkeypatch.setattr(module, "runs_from_csv", lambda _: [])
    monkeypatch.setattr(module, "expected_difference", found)
    text = module._what_can_be_found(plan, variants)
    assert known == [(0.01, 5, 1, 1, 2), (0.02, 5, 1, 1, 2)]  # the placebo is a check only
    assert "of the least precise comparison (80 % power): 0.0200 nats per token" in text
    module._what_can_be_found(
        dataclasses.replace(plan, budget=Budget(tuning_seeds=2, seeds=5, placebos=1)), variants
    )
    assert known[2:] == [(0.01, 5, 2, 1, 2), (0.02, 5, 2, 1, 2)]


def test_variants_of_other_rates_lists_or_cells_are_not_the_same():
    refuse_duplicates(
        variants_of({"a": {}, "b": {}}, {"a": (2e-3,), "b": (4e-3,)}),
        dict.fromkeys("ab", "the same"),
    )
    variants = variants_of({"a": {}, "b": {}}, {"a": (2e-3,), "b": (2e-3,)})
    lists = {
        "a": {LEARNING_RATE: (2e-3,), DECAY: (0.1,)},
        "b": {LEARNING_RATE: (2e-3,), DECAY: (0.1, 0.3)},
    }
    for changes in (
        {n: {"lists": lists[n]} for n in "ab"},
        {"a": {"arm": "a"}, "b": {"arm": "b", "cell": "large"}},
    ):
        plans = {name: dataclasses.replace(variants[name].plan, **changes[name]) for name in "ab"}
        others = {name: dataclasses.replace(variants[name], plan=plans[name]) for name in "ab"}
        refuse_duplicates(others, dict.fromkeys("ab", "the same"))
    plans["a"] = dataclasses.replace(plans["a"], arm="b")  # the size has no effect
    others["a"] = dataclasses.replace(others["a"], plan=plans["a"])
    with pytest.raises(UserError, match="values of the budget"):
        refuse_duplicates(others, dict.fromkeys("ab", "the same"))


def test_variants_that_differ_in_how_they_are_executed_are_refused(monkeypatch):
    """Their programs differ, but not what they compute."""
    monkeypatch.setattr("lm.sweeps.variants.data.open_corpus", lambda *_, **__: CORPUS)
    configs = {"a": tiny(), "b": tiny(model={"scan_layers": True})}
    with pytest.raises(UserError, match=SAME):
        module.resolve_variants(
            plan_of({name: planned(config) for name, config in configs.items()}), print
        )


def test_a_variant_that_cannot_be_traced_does_not_stop_the_others(monkeypatch):
    def broken(config, corpus, warm):
        if config.model.norm == "layer":
            raise TypeError("dot_general requires contracting dimensions")
        return config.model.norm, "the loss does not depend on w"

    monkeypatch.setattr(module, "fingerprint", broken)
    lines = []
    variants = variants_of({"a": {"model.norm": "layer"}, "b": {}}, {"a": (1e-3,), "b": (1e-3,)})
    assert module.refuse_idle_changes(variants, lines.append) == {"b"}
    assert lines == [
        "WARNING: variant 'a' cannot be traced: TypeError: dot_general requires contracting "
        "dimensions",
        "WARNING: variant 'b': the loss does not depend on w",
    ]


def test_the_cost_of_all_training_and_the_runs_of_a_plan():
    """4 rates with 2 tuning seeds and 5 fresh seeds are 13 runs; one rate with 5 fresh seeds is 5."""
    config = tiny(train={"steps": 10, "batch_size": 4, "seq_len": 16})
    costs = {"tuned": ((1e-3, 2e-3, 4e-3, 8e-3), 7.0), "given": ((1e-3,), 100.0)}
    variants = {
        n: Variant(planned(config, {}, rates), config, CORPUS, 1, cost)
        for n, (rates, cost) in costs.items()
    }
    described = describe_variants(plan_of({name: v.plan for name, v in variants.items()}), variants)
    assert f"training: {(13 * 7.0 + 5 * 100.0) * 10 * 4 * 16:.3g} FLOPs" in described
    assert "8 runs to tune (2 tuning seeds)" in described
    assert "10 runs at the tuned values" in described


DIFFERENT = [{"model": {"rope_theta": 500.0}}, {"model": {"window_pattern": (7,)}}]
DIFFERENT_TOO = [
    {"train": {"seed": 1}}, {"train": {"steps": 21}}, {"train": {"z_loss": 1e-4}}, {"model": {"init": "he"}},
    {"model": {"embed_std": 0.5}}, {"model": {"norm": "layer"}}, {"model": {"dropout": 0.1}},
    {"optimizer": {"weight_decay": 0.0}}, {"optimizer": {"b2": 0.9}}, {"data": {"order": "epochs"}},
    {"data": {"order": "epochs", "shuffle": False}},
]  # fmt: skip
EQUAL = [
    {"model": {"window_pattern": (8,)}},
    {
        "model": {
            "n_experts": 4,
            "experts_per_token": 1,
            "shared_expert": True,
            "moe_first_layer": 1,
            "router_z": 0.1,
        }
    },
]
EQUAL_TOO = [
    {"model": {"norm_algorithm": "welford"}}, {"model": {"norm_bias": False}}, {"model": {"window_pattern": (0, 100)}},
    {"model": {"rope_pattern": (1, 1)}}, {"model": {"sinusoidal_order": "cosine_first"}}, {"model": {"d_ff": 24}},
    {"optimizer": {"learning_rate": 2e-3}}, {"optimizer": {"momentum": 0.9}}, {"data": {"shuffle": False}},
    {"log": {"every": 3}},
]  # fmt: skip


@pytest.mark.parametrize(
    ("n_layers", "different", "equal"), [(1, DIFFERENT, EQUAL), slow(2, DIFFERENT_TOO, EQUAL_TOO)]
)
def test_fingerprints_differ_if_and_only_if_the_results_may(n_layers, different, equal):
    """Equal: windows as long as the sequence, options of LayerNorm under RMSNorm, ..."""

    def of(sections):
        model = {"n_layers": n_layers} | sections.get("model", {})
        return fingerprint(tiny(**sections | {"model": model}), CORPUS)[0]

    base = of({})
    assert [c for c in different if of(c) == base] == []
    assert [c for c in equal if of(c) != base] == []


@pytest.mark.slow
def test_an_unused_hyperparameter_does_not_change_the_fingerprint_and_another_corpus_does():
    """A constant schedule does not use final_fraction."""
    constant = {"schedule": "constant", "final_fraction": 0.1}
    twice = [
        fingerprint(tiny(optimizer=constant | more), CORPUS)
        for more in ({}, {"final_fraction": 0.5})
    ]
    assert twice[0] == twice[1]
    assert fingerprint(tiny(optimizer=constant | {"weight_decay": 0.0}), CORPUS)[0] != twice[0][0]
    assert (
        fingerprint(tiny(optimizer=constant), dataclasses.replace(CORPUS, fingerprint="other"))[0]
        != twice[0][0]
    )


def test_the_config_of_a_run_has_its_point_and_its_seed():
    lists = {LEARNING_RATE: (1e-3, 2e-3), "optimizer.b2": (0.9, 0.99)}
    plan = PlannedVariant("", "", {}, lists, range(1), range(1), None, {})
    variant = Variant(plan, tiny(), CORPUS, 1, 7.0)
    expected = tiny(optimizer={"learning_rate": 3e-3, "b2": 0.97}, train={"seed": 7})
    assert variant.run_config((3e-3, 0.97), 7) == expected
