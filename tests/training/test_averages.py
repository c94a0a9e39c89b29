"""Averages of parameters: what is evaluated, saved and loaded is what the equations say."""

import re

import chex
import jax
import numpy as np
import optax
import pytest
from running import metrics_of
from tiny import jit_step, state_of, tiny

import lm
from lm import optimizers
from lm.config import to_dict
from lm.parameters import flat
from lm.step import ema_params
from lm.system.errors import UserError
from lm.training.finish import joined
from lm.workdir.checkpoints import Checkpoints, restore_params

TOKENS = {"tokens": np.random.default_rng(0).integers(0, 19, (4, 9))}
RULES = {
    "muon": {},
    "normuon": {},
    "muonh": {"cautious_decay": True},
    "soap": {"soap_every": 2},
    "schedule_free": {"schedule": "constant"},
}


def test_the_ema_is_the_mean_of_the_parameters_after_each_step_with_geometric_weights():
    config = tiny(train={"ema": 0.8})
    states = [state_of(config)]
    for _ in range(4):
        states.append(jit_step(states[-1], TOKENS, config)[0])
    weights = 0.8 ** np.arange(3, -1, -1)
    average, after = flat(ema_params(states[-1])), [flat(state.params) for state in states[1:]]
    for path, x in average.items():
        np.testing.assert_allclose(
            x, np.average([p[path] for p in after], 0, weights), rtol=1e-5, atol=1e-6
        )


def test_a_run_of_the_earlier_schedule_free_is_evaluated_and_not_resumed(tmp_path, monkeypatch):
    """It was Optax's, whose state has other arrays. Its average is read as before; other weights
    cannot go on.
    """
    config = tiny(
        optimizer={"name": "schedule_free", "schedule": "constant", "warmup_steps": 2, "b2": 0.91}
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            optimizers,
            "schedule_free",
            lambda steps, rate, b1: optax.contrib.schedule_free(steps, rate, b1),
        )
        state = state_of(config)
        for _ in range(3):
            state, _ = jit_step(state, TOKENS, config)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {"config": to_dict(config)})
    checkpoints.wait()
    expected = optax.contrib.schedule_free_eval_params(state.opt_state[-1], state.params)
    chex.assert_trees_all_close(restore_params(tmp_path, 3)[1], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        UserError, match=f"--config.init_from={re.escape(str(tmp_path))}$"
    ) as refusal:
        checkpoints.restore(jax.eval_shape(lambda: state_of(config)))
    checkpoints.close()
    assert any("weight_sum: only in the checkpoint" in line for line in refusal.value.problems)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_resumes_to_the_same_bits_and_compiles_once(tmp_path, rule):
    config = tiny(
        optimizer={"name": rule, **RULES[rule]}, train={"ema": 0.9}, model={"n_layers": 1}
    )
    step = jax.jit(lambda state: jit_step(state, TOKENS, config)[0])
    states = [state_of(config)]
    for _ in range(4):
        states.append(step(states[-1]))
    assert step._cache_size() == 1
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, states[2], {})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)
    _, state, _ = checkpoints.restore(jax.eval_shape(lambda: states[0]))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, step(step(state)), states[4])


@pytest.mark.slow
def test_runs_evaluate_save_and_load_their_averages(train, tmp_path):
    """Evaluating the loaded average gives the loss in the metrics."""
    ema, free = tmp_path / "ema", tmp_path / "free"
    keys = (
        "--config.train.ema=0.9",
        "--config.checkpoint.keep=3",
        "--config.eval.final_splits=validation+test",
    )
    assert train(ema, *keys)[0] == 0
    rule = (
        "--config.optimizer.name=schedule_free",
        "--config.optimizer.schedule=constant",
        "--config.model.dropout=0",
    )
    once = ("--config.model.dropout=0", "--config.train.steps=0", "--config.eval.every=0")
    assert train(free, *rule)[0] == 0
    assert train(tmp_path / "again", *once, f"--config.init_from={free}")[0] == 0
    last = {
        d: [line for line in metrics_of(d) if "split" in line][-1]
        for d in (ema, free, tmp_path / "again")
    }
    assert last[tmp_path / "again"]["loss"] == pytest.approx(last[free]["loss"], rel=1e-5)
    steps = [flat(lm.load(ema, step).params) for step in (8, 12)]
    for path, x in flat(lm.load(ema, "mean:2").params).items():
        np.testing.assert_allclose(x, (steps[0][path] + steps[1][path]) / 2, rtol=1e-6, atol=1e-7)
    average = lm.load(ema, "ema")
    assert average.step == "ema_12"
    assert last[ema]["ema_loss"] != last[ema]["loss"]
    lines = {line["split"]: line for line in metrics_of(ema) if "split" in line}
    assert (
        joined([lines["validation"], lines["test"]]).items()
        <= lines["validation+test"].items()
        == last[ema].items()
    )
    with pytest.raises(UserError, match="--step ema"):
        lm.load(free, "ema")
    with pytest.raises(UserError, match="--step mean:9"):
        lm.load(ema, "mean:9")
