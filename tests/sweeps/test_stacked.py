"""Runs that are trained together, stacked in one program, equal runs trained one by one up to
rounding.
"""

import dataclasses
import io
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

from lm.config import MESH_AXES
from lm.cost.memory import memory_per_device
from lm.data import Corpus, Split
from lm.step import ema_params, eval_step, init_state, train_steps
from lm.sweeps import cpu_memory
from lm.sweeps.stacked import (
    TRACED,
    StackedRuns,
    group_by_program,
    make_programs,
    runs_that_fit,
    split_config,
    with_values,
)
from lm.training.batch_source import BatchSource

N_STEPS = 10
RULES = {
    "adamw": {"name": "adamw", "schedule": "cosine", "warmup_steps": 2},
    "muon": {"name": "muon", "schedule": "linear", "adam_learning_rate": 3e-3},
    "sgd": {"name": "sgd", "momentum": 0.9, "schedule": "wsd", "learning_rate": 0.1},
    "lion": {"name": "lion", "schedule": "constant"},
    "ademamix": {"name": "ademamix", "schedule": "cosine"},
    "schedule_free": {"name": "schedule_free", "schedule": "constant", "cautious_decay": True},
}


def members(rule: str):
    """Return two configs that differ in seed and in every traced key that the rule has."""
    base = tiny(optimizer=RULES[rule], model={"n_layers": 1})
    o = base.optimizer
    change = {
        "learning_rate": o.learning_rate / 3,
        "weight_decay": 0.3,
        "clip_norm": 0.2,
        "final_fraction": 0.5,
    }
    changes = [{}, change | ({"adam_learning_rate": 1e-3} if o.adam_learning_rate else {})]
    return [with_values(base, change, seed=3 * i) for i, change in enumerate(changes)]


def inputs_of(config):
    draw = np.random.default_rng(config.train.seed)
    shape = (N_STEPS, config.train.batch_size, config.train.seq_len + 1)
    return {"tokens": draw.integers(0, config.model.vocab_size, shape).astype(np.int32)}


def one_by_one(configs):
    run = jax.jit(train_steps, static_argnames="config")
    return [
        run(init_state(c, c.train.seed), None, inputs_of(c), np.int32(N_STEPS), c) for c in configs
    ]


def all_together(configs):
    program, values = split_config(configs[0])
    programs = make_programs(program, len(configs))
    values = {
        name: jnp.array([split_config(c)[1][name] for c in configs], "float32") for name in values
    }
    inputs = jax.tree.map(lambda *a: np.stack(a), *map(inputs_of, configs))
    states = programs.init(np.array([c.train.seed for c in configs], np.uint32))
    return programs.steps(states, None, inputs, values, np.int32(N_STEPS))


def test_the_program_has_the_options_of_the_compiler():
    config = members("adamw")[0]
    train = dataclasses.replace(config.train, compiler_options=("xla_no_such_option=1",))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        all_together([dataclasses.replace(config, train=train)])


def test_as_many_runs_are_vectorized_as_the_plan_fits_into_the_memory(monkeypatch):
    config = members("adamw")[0]
    assert runs_that_fit(config) == 1, "on a CPU"
    stats = {}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    needed = memory_per_device(config, gpu, dict.fromkeys(MESH_AXES, 1)).total
    for times, n in ((0.5, 1), (2.6, 2), (5.1, 4)):
        stats["bytes_limit"] = times * needed
        assert runs_that_fit(config) == n


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_ten_stacked_steps_equal_ten_separate_steps(rule):
    configs = members(rule)
    states, metrics = all_together(configs)
    for i, (state, alone) in enumerate(one_by_one(configs)):
        for name in ("loss", "grad_norm", "learning_rate"):
            np.testing.assert_allclose(
                metrics[name][i], alone[name], rtol=1e-5 if name == "grad_norm" else 1e-6
            )
        for a, b in zip(jax.tree.leaves(states.params), jax.tree.leaves(state.params), strict=True):
            np.testing.assert_allclose(a[i], b, atol=1e-5 * float(jnp.abs(b).max()))


def test_with_an_average_the_result_is_its_loss(tmp_path):
    config = tiny(train={"ema": 0.8, "steps": 4, "seed": 3}, model={"n_layers": 1})
    tokens = np.random.default_rng(0).integers(0, 19, 200).astype(np.uint16)
    corpus = Corpus(
        "text", {s: Split(s, tokens, 200, 200) for s in ("train", "validation", "test")}, None, ""
    )
    share = -(-2 // jax.device_count())
    runs = StackedRuns([config] * 2, corpus, tmp_path, runs_per_device=share, stream=io.StringIO())
    found = runs.train(SimpleNamespace(received=None))
    source = BatchSource(corpus.split("train"), config)
    state, _ = jax.jit(train_steps, static_argnames="config")(
        init_state(config, 3), source.resident, source.train(0, 4), np.int32(4), config
    )
    test = BatchSource(corpus.split("test"), config)
    step = jax.jit(eval_step, static_argnames="config")
    sums = [step(ema_params(state), test.resident, batch, config) for batch in test.evaluation(0)]
    loss = sum(float(s) for s, _ in sums) / sum(int(n) for _, n in sums)
    assert found[0]["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert found[0]["val_loss"] == found[0]["test_loss"]


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only on CPUs are micro-batches chosen")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_in_micro_batches_on_one_device_equals_a_separate_step_of_a_whole_batch(
    monkeypatch, dropout
):
    base = members("adamw")[0]
    config = dataclasses.replace(base, model=dataclasses.replace(base.model, dropout=dropout))
    monkeypatch.setattr(cpu_memory, "TOKENS", config.train.seq_len)
    monkeypatch.setattr(cpu_memory, "n_cores", jax.device_count)
    program, values = split_config(config)
    assert program.train.micro_batch_size == 1 < config.train.batch_size
    programs = make_programs(program, 1)
    inputs = jax.tree.map(lambda a: a[None], inputs_of(config))
    values = {name: jnp.array([value], "float32") for name, value in values.items()}
    state, metrics = programs.steps(
        programs.init(np.zeros(1, np.uint32)), None, inputs, values, np.int32(N_STEPS)
    )
    ((expected, alone),) = one_by_one([config])
    np.testing.assert_allclose(metrics["loss"][0], alone["loss"], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a[0], b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.slow
def test_every_traced_key_changes_the_result():
    """So the comparisons above can fail."""
    base = members("muon")[0]
    changed = {
        name: 1.5 * getattr(base.optimizer, name) for name in TRACED if name != "clip_norm"
    } | {"clip_norm": 0.1}
    configs = [base, *(with_values(base, {name: value}) for name, value in changed.items())]
    states, _ = all_together(configs)
    ends = [
        np.concatenate([np.ravel(x[i]) for x in jax.tree.leaves(states.params)])
        for i in range(len(configs))
    ]
    assert all(np.abs(end - ends[0]).max() > 1e-5 for end in ends[1:])


def test_runs_that_differ_only_in_seed_and_traced_keys_are_grouped():
    a, b = tiny(), tiny(train={"seed": 1}, optimizer={"learning_rate": 1.0})
    c, d = tiny(model={"qk_norm": True}), tiny(optimizer={"weight_decay": 0.0})
    assert group_by_program({"a": a, "c": c, "b": b, "d": d}, 4) == [["a", "b"], ["c"], ["d"]]
    assert group_by_program({"a": a, "b": b, "e": a}, 2) == [["a", "b"], ["e"]]
    assert split_config(a)[0] == split_config(b)[0]
    assert dataclasses.replace(a.train, seed=0) == split_config(a)[0].train
