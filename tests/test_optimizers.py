"""Schedules and update rules: against Optax, formulas from the papers, and values computed by hand."""

import dataclasses
import functools
import json
import math
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from references import update_rules
from running import slow
from tiny import jit_gradients, redrawn, state_of, tiny, unstack_layers

from lm.config import OptimizerConfig
from lm.declarations import Parameter
from lm.optimizers import UPDATE_RULES, averaged, decay_mask, learning_rate_schedule, make_optimizer
from lm.parameters import flat, nest, parameter_table
from lm.step import train_step
from lm.training.layer_statistics import layer_statistics

# One parameter of each kind, because compiling all of them takes several times as long.
KEPT = (
    "embedding",
    "positions",
    "ffn_norm/scale_D",
    "ffn_norm/bias_D",
    "w_q_DHK",
    "w_o_HKD",
    "w_up_DF",
    "b_up_F",
)
KEPT += ("head/w_DV", "head/b_V")
AUTHORS = json.loads(
    pathlib.Path(update_rules.__file__).with_suffix(".json").read_text(encoding="utf-8")
)
EVERYTHING = {
    "norm": "layer",
    "positions": "learned",
    "attn_bias": True,
    "ffn_bias": True,
    "head_bias": True,
}


@pytest.mark.parametrize(
    ("keys", "expected"),  # computed by hand, for a peak of 1 and 100 steps
    [
        ({"schedule": "constant"}, {0: 1, 50: 1, 99: 1}),
        ({"schedule": "constant", "warmup_steps": 4}, {0: 1 / 5, 1: 2 / 5, 3: 4 / 5, 4: 1, 99: 1}),
        ({"schedule": "linear", "final_fraction": 0.0}, {0: 1, 25: 0.75, 50: 0.5, 100: 0, 150: 0}),
        ({"schedule": "linear", "warmup_steps": 20}, {20: 1, 60: 0.55, 100: 0.1}),
        ({"schedule": "cosine"}, {0: 1, 50: 0.55, 100: 0.1, 130: 0.1}),
        ({"schedule": "cosine", "warmup_steps": 40, "decay_steps": 80}, {39: 40 / 41, 40: 1, 60: 0.55, 80: 0.1}),
        ({"schedule": "cosine"}, {25: 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2}),
        ({"schedule": "wsd"}, {0: 1, 79: 1, 80: 1, 90: 0.55, 100: 0.1}),
        ({"schedule": "wsd", "warmup_steps": 10, "decay_fraction": 0.5}, {9: 10 / 11, 50: 1, 75: 0.55, 100: 0.1}),
        # A decay that would start during the warm-up starts at its end instead.
        ({"schedule": "wsd", "warmup_steps": 60, "decay_fraction": 0.9}, {59: 60 / 61, 60: 1, 80: 0.55, 100: 0.1}),
    ],
)  # fmt: skip
def test_learning_rates_at_known_steps(keys, expected):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, **keys), steps=100)
    for step, rate in expected.items():
        assert float(schedule(jnp.int32(step))) == pytest.approx(rate, abs=2e-6), step


def table_of(config):
    return {path: p for path, p in parameter_table(config.model).items() if path.endswith(KEPT)}


def parameters_of(config, seed=0):
    kept = {path: x for path, x in flat(redrawn(config.model, seed)).items() if path.endswith(KEPT)}
    return jax.device_get(nest(kept))


def updated(tx, grads_by_step, params):
    """Return the parameters after one update for each of these gradients."""

    @jax.jit
    def step(grads, state, params):
        change, state = tx.update(grads, state, params)
        return optax.apply_updates(params, change), state

    state = tx.init(params)
    for grads in grads_by_step:
        params, state = step(grads, state, params)
    return jax.device_get(params)


def updates(o, config, grads_by_step, params):
    return updated(make_optimizer(o, 100, table_of(config)), grads_by_step, params)


def gradients(config, n=3, scale=1.0):
    return [jax.tree.map(lambda x: scale * x, parameters_of(config, seed=i + 1)) for i in range(n)]


def test_adamw_equals_optax_adamw_with_the_decay_mask():
    config = tiny(model=EVERYTHING | {"n_layers": 1})
    o = OptimizerConfig(
        learning_rate=0.1, warmup_steps=2, weight_decay=0.3, clip_norm=None, eps=1e-3
    )
    table = table_of(config)
    mask = nest(
        {path: "_b_" not in f"_{path.rpartition('/')[2]}" and "norm" not in path for path in table}
    )
    mask |= {"embedding": False, "positions": False}
    ours = updates(o, config, gradients(config), parameters_of(config))
    theirs = optax.adamw(
        learning_rate_schedule(o, 100), b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.3, mask=mask
    )
    expected = updated(theirs, gradients(config), parameters_of(config))
    chex.assert_trees_all_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["norm", "bias", "embedding"])
def test_weight_decay_applies_to_weights_and_to_the_kinds_that_the_config_adds(kind):
    table = parameter_table(tiny(model=EVERYTHING).model)
    key = {"norm": "decay_norms", "bias": "decay_biases", "embedding": "decay_embeddings"}[kind]
    default, chosen = (
        flat(decay_mask(OptimizerConfig(**keys), table)) for keys in ({}, {key: True})
    )
    members = {
        "norm": {path for path in table if path.endswith(("scale_D", "scale_K"))},
        "bias": {path for path in table if path.rpartition("/")[2].startswith(("b_", "bias"))},
        "embedding": {"embedding", "positions"},
    }
    assert {path for path in table if not default[path]} == set.union(*members.values())
    assert {path for path in table if chosen[path] and not default[path]} == members[kind]


# (update, momentum) by gradient and momentum; Lion: Chen et al. 2023, algorithm 2.
RULES = {
    "sgd": ({}, lambda g, m: (g, m)),
    "sgd with momentum": (
        {"momentum": 0.9, "nesterov": False},
        lambda g, m: (g + 0.9 * m, g + 0.9 * m),
    ),
    "sgd with Nesterov": ({"momentum": 0.9}, lambda g, m: (1.9 * g + 0.81 * m, g + 0.9 * m)),
    "lion": ({}, lambda g, m: (np.sign(0.9 * m + 0.1 * g), 0.95 * m + 0.05 * g)),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_numbers_follow_their_formulas_and_decay_is_decoupled(rule):
    keys, formula = RULES[rule]
    config, clip = tiny(model={"n_layers": 1}), {"clip_norm": None}
    o = OptimizerConfig(
        name=rule[:4].strip(),
        learning_rate=0.1,
        schedule="constant",
        weight_decay=0.1,
        **clip,
        **keys,
    )
    params, grads = parameters_of(config), gradients(config)
    after = flat(updates(o, config, grads, params))
    for path, x in flat(params).items():
        x, m = np.float64(x), 0.0
        for g in grads:
            u, m = formula(np.float64(flat(g)[path]), m)
            x = x - 0.1 * (u + (0.0 if path == "embedding" or "norm" in path else 0.1) * x)
        np.testing.assert_allclose(after[path], x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-4, 10.0])
def test_gradients_are_clipped_to_the_global_norm(scale):
    config = tiny(model={"n_layers": 1})
    o = OptimizerConfig(
        name="sgd", learning_rate=1.0, schedule="constant", weight_decay=0.0, clip_norm=0.5
    )
    params, (grads,) = parameters_of(config), gradients(config, n=1, scale=scale)
    norm = math.sqrt(sum(float(np.sum(np.float64(g) ** 2)) for g in jax.tree.leaves(grads)))
    assert (norm > 0.5) == (scale == 10)
    expected = jax.tree.map(lambda p, g: p - g * min(1, 0.5 / norm), params, grads)
    chex.assert_trees_all_close(updates(o, config, [grads], params), expected, rtol=1e-5, atol=1e-6)


MUON = OptimizerConfig(
    name="muon",
    learning_rate=0.1,
    schedule="constant",
    adam_learning_rate=0.01,
    weight_decay=0.0,
    clip_norm=None,
)


def matrices_of(p, x) -> list[np.ndarray]:
    """Return the matrices, inputs x outputs, of a parameter whose layers are stacked and whose
    inputs come first.
    """
    assert p.axes.startswith("N" + p.contract)
    return [np.float64(layer).reshape(p.fan_in, -1) for layer in x]


MATRIX_RULES = {
    "muon": ({}, update_rules.muon),
    "muon without Nesterov": (
        {"nesterov": False},
        functools.partial(update_rules.muon, nesterov=False),
    ),
    "normuon": ({"name": "normuon"}, update_rules.normuon),
    "muonh": ({"name": "muonh"}, update_rules.muonh),
    "soap": ({"name": "soap", "soap_every": 2}, functools.partial(update_rules.soap, every=2)),
}


@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_rules_of_matrices_follow_their_papers(rule):
    """Muon is its author's: no bias correction of the momentum, and AdamW without Nesterov for all
    else.

    In float64, because SOAP's statistics square the condition of a gradient; and for SOAP with
    square matrices, because the eigenvectors of the eigenvalue 0 are arbitrary.
    """
    keys, theirs_of_matrix = MATRIX_RULES[rule]
    config = tiny(model=EVERYTHING | {"d_ff": 16 if rule == "soap" else 24})
    with jax.enable_x64(True):
        params, *grads = jax.tree.map(np.float64, [parameters_of(config), *gradients(config, n=4)])
        after = flat(updates(dataclasses.replace(MUON, **keys), config, grads, params))
    p, g = flat(params), [flat(g) for g in grads]
    for path, parameter in table_of(config).items():
        if parameter.kind == "weight" and not path.startswith("head"):
            ours, before, *gs = (matrices_of(parameter, x[path]) for x in (after, p, *g))
            theirs = [
                theirs_of_matrix(w, by_step, 0.1) for w, *by_step in zip(before, *gs, strict=True)
            ]
        else:
            ours, theirs = after[path], update_rules.adam(p[path], [x[path] for x in g], 0.01)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6, err_msg=path)


def test_muonh_keeps_the_norm_of_matrices_and_leaves_those_that_start_at_0_to_adam():
    config = tiny(model={"zero_init_residual": True})
    params, grads = parameters_of(config), gradients(config)
    o = dataclasses.replace(MUON, name="muonh", weight_decay=0.5)
    after, p = flat(updates(o, config, grads, params)), flat(params)
    norms = lambda x: np.sqrt(np.sum(np.square(np.float64(x)), axis=tuple(range(1, x.ndim))))  # noqa: E731
    kept = {path for path in p if np.allclose(norms(after[path]), norms(p[path]), rtol=1e-6)}
    assert kept == {"layers/attention/w_q_DHK", "layers/ffn/w_up_DF"}


@pytest.mark.slow
def test_soap_ends_on_several_cpu_devices(bench, tmp_path):
    """LAPACK splits the matrices of a batch over XLA's threads, and each thread waits: all of them,
    if all make one.
    """
    # as many threads as devices
    env = bench.env | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "NPROC": "2",
    }
    keys = "--config.optimizer.name=soap", "--config.model.n_layers=4", "--config.train.steps=2"
    with bench.start(tmp_path / "run", *keys, env=env) as run:
        try:
            assert run.wait(timeout=300) == 0, run.stdout.read()
        finally:
            run.kill()  # SIGTERM would not end it


@pytest.mark.parametrize(("slow_warmup_steps", "warmup"), [(None, 8), (3, 3)])
def test_ademamix_follows_its_algorithm_with_the_warmups_of_its_slow_average(
    slow_warmup_steps, warmup
):
    table = {"w": Parameter((3, 4), "DF", "weight", contract="D")}
    rng = np.random.default_rng(0)
    start = rng.standard_normal((3, 4))
    grads = rng.standard_normal((8, 3, 4))
    o = OptimizerConfig(
        name="ademamix",
        learning_rate=0.1,
        schedule="constant",
        weight_decay=0.0,
        clip_norm=None,
        slow_warmup_steps=slow_warmup_steps,
    )
    tx = make_optimizer(o, 8, table)
    params = {"w": jnp.asarray(start, jnp.float32)}
    state, update = tx.init(params), jax.jit(tx.update)
    expected = update_rules.ademamix(start, grads, 0.1, warmup)
    for g, x in zip(grads, expected, strict=True):
        change, state = update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        params = {"w": params["w"] + change["w"]}
        np.testing.assert_allclose(params["w"], x, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "case", AUTHORS["schedule_free"], ids=lambda case: f"warmup_{case['warmup_steps']}"
)
def test_schedule_free_follows_its_authors_package(case):
    """After every step, it trains at y and `averaged` returns x (references/make_update_rules.py)."""
    table = {"w": Parameter((3, 4), "DF", "weight", contract="D")}
    o = OptimizerConfig(
        name="schedule_free",
        learning_rate=0.1,
        schedule="constant",
        weight_decay=0.3,
        clip_norm=None,
    )
    o = dataclasses.replace(o, warmup_steps=case["warmup_steps"])
    tx, params = make_optimizer(o, 100, table), {"w": jnp.array(AUTHORS["start"], jnp.float32)}
    state, update = tx.init(params), jax.jit(tx.update)
    for i, (y, x) in enumerate(zip(case["y"], case["x"], strict=True)):
        change, state = update({"w": 2 * params["w"] - i}, state, params)
        params = {"w": params["w"] + change["w"]}
        np.testing.assert_allclose(
            params["w"], y, rtol=0, atol=1e-5, err_msg=f"y after {i + 1} steps"
        )
        np.testing.assert_allclose(
            averaged(params, state, o)["w"], x, rtol=0, atol=1e-5, err_msg=f"x, {i + 1} steps"
        )


def test_a_rule_of_optax_may_ask_for_the_loss(monkeypatch):
    """Polyak's step is loss / |gradient|^2 (Loizou et al. 2021, arXiv:2002.10542, with f* = 0)."""
    monkeypatch.setitem(
        UPDATE_RULES, "sgd", lambda o, schedule, table, steps: optax.polyak_sgd(1e9)
    )
    config = tiny(optimizer={"name": "sgd", "weight_decay": 0.0, "clip_norm": None})
    state, batch = state_of(config), {"tokens": jnp.arange(36).reshape(4, 9) * 5 % 19}
    means, grads = jit_gradients(state, batch, config)
    after, _ = jax.jit(lambda state: train_step(state, batch, config))(state)
    # which measures updates, too
    jax.eval_shape(lambda state: layer_statistics(state, batch, config), state)
    squares = sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads))
    expected = jax.tree.map(lambda p, g: p - means["loss"] / squares * g, state.params, grads)
    chex.assert_trees_all_close(after.params, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", slow("muonh")])
def test_cautious_decay_applies_where_the_update_does_not_increase_a_number(name):
    """Chen et al. 2025: x <- x - rate (u + lambda 1[u x >= 0] x)."""
    config = tiny(model={"n_layers": 1})
    params, grads = parameters_of(config), gradients(config, n=1)
    keys = {"name": name, "learning_rate": 0.1, "schedule": "constant", "clip_norm": None}
    plain = flat(updates(OptimizerConfig(**keys, weight_decay=0.0), config, grads, params))
    after = flat(
        updates(
            OptimizerConfig(**keys, weight_decay=0.5, cautious_decay=True), config, grads, params
        )
    )
    for path, parameter in table_of(config).items():
        x = np.float64(flat(params)[path])
        u = (x - plain[path]) / 0.1
        decays = parameter.kind == "weight" and (name == "sgd" or path.startswith("head"))
        expected = x - 0.1 * (u + 0.5 * decays * (u * x >= 0) * x)
        np.testing.assert_allclose(after[path], expected, rtol=1e-5, atol=1e-6, err_msg=path)


def test_muons_adam_learning_rate_follows_the_schedule():
    config = tiny(model={"n_layers": 1})
    o = OptimizerConfig(
        name="muon", learning_rate=0.1, adam_learning_rate=0.02, warmup_steps=3, weight_decay=0.0
    )
    params, (grads,) = parameters_of(config), gradients(config, n=1)
    change = np.abs(updates(o, config, [grads], params)["embedding"] - params["embedding"])
    np.testing.assert_allclose(np.median(change), 0.02 / 4, rtol=1e-3)


@pytest.mark.slow
def test_muon_updates_a_stack_as_separate_layers():
    config = tiny(model=EVERYTHING)
    params, grads = parameters_of(config), gradients(config, n=2)
    after = updates(MUON, config, grads, params)
    assert set(after) >= {"layers", "head", "embedding"}
    apart = {}
    for path, p in table_of(config).items():
        if p.layers is None:
            apart[path] = p
        for i in p.layers or ():
            apart[path.replace("layers/", f"layers_{i}/")] = p.of_one_layer()
    each = updated(
        make_optimizer(MUON, 100, apart), map(unstack_layers, grads), unstack_layers(params)
    )
    chex.assert_trees_all_close(unstack_layers(after), each, rtol=1e-5, atol=1e-6)
