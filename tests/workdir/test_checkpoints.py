"""Checkpoints: bit-exact restore, which ones are kept, mismatches, and kills during a save."""

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpointing import assert_same, directories, make_state, save_steps

from lm.errors import UserError
from lm.workdir import checkpoints
from lm.workdir.checkpoints import Checkpoints, restore_params

# ---- Saving and restoring ------------------------------------------------------------------------------------------


def test_a_state_is_restored_bit_for_bit(tmp_path):
    save_steps(tmp_path, [5], {5: 1.25})
    checkpoints = Checkpoints(tmp_path)
    step, state, meta = checkpoints.restore(jax.eval_shape(make_state))
    assert (step, meta) == (5, {"data": "position 5"})
    assert_same(state, make_state(5))
    checkpoints.close()


def test_without_a_checkpoint_nothing_is_restored(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(make_state()) is None
    checkpoints.close()


def test_16_bit_states_are_restored_bit_for_bit(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = make_state(3, dtype=jnp.bfloat16)
    state.params["embed"] = state.params["embed"].at[0].set(jnp.nan).at[1].set(-0.0)
    checkpoints.save(3, state, {})
    assert_same(checkpoints.restore(state)[1], state)
    checkpoints.close()


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0)
    checkpoints, state = Checkpoints(tmp_path), make_state(1)
    checkpoints.save(1, state, {})
    jax.block_until_ready(overwrite(state))
    assert_same(checkpoints.restore(make_state())[1], make_state(1))
    checkpoints.close()


def test_a_step_is_saved_once(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save(1, make_state(1), {"n": 1})
    assert not checkpoints.save(1, make_state(2), {"n": 2})
    assert checkpoints.restore(make_state())[2] == {"n": 1}
    checkpoints.close()


@pytest.mark.parametrize("reopen", [False, True])
def test_the_newest_and_the_best_are_kept(tmp_path, reopen):
    losses = {1: 3.0, 2: 2.0, 4: math.nan, 5: -math.inf, 6: 2.5}
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 8):
        if reopen and step in (3, 6):
            checkpoints.close()
            checkpoints = Checkpoints(tmp_path, keep=2)
        if step in losses:
            assert checkpoints.score(step, losses[step]) == (step in (1, 2))
        checkpoints.save(step, make_state(step), {})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 6, 7]  # neither step 4 nor 5, nor the ones without a loss
    assert json.loads((tmp_path / "val_losses.json").read_text()) == {"1": 3.0, "2": 2.0, "6": 2.5}
    checkpoints.close()
    assert directories(tmp_path) == {"2", "6", "7"}
    assert restore_params(tmp_path, "best")[0] == 2


def test_without_validation_losses_only_the_newest_are_kept(tmp_path):
    save_steps(tmp_path, range(1, 6), keep=1)
    assert directories(tmp_path) == {"5"}
    checkpoints = Checkpoints(tmp_path)
    assert not (tmp_path / "val_losses.json").exists()
    checkpoints.close()
    assert restore_params(tmp_path, "best")[0] == 5


def damage_val_losses(path: Path, damage: str) -> None:
    path.unlink() if damage == "missing" else path.write_text(damage)


@pytest.mark.parametrize("damage", ["missing", "", "{}", "null", '["1"]', '{"1": "x"}', '{"1": 2.0'])
def test_lost_validation_losses_are_rebuilt_from_the_metrics(tmp_path, capsys, damage):
    save_steps(tmp_path, [1, 2, 3], {1: 1.0, 2: 3.0})
    lines = [{"step": step, "split": "validation", "loss": loss} for step, loss in [(1, 1.0), (2, 3.0)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    damage_val_losses(tmp_path / "val_losses.json", damage)
    capsys.readouterr()
    assert restore_params(tmp_path, "best")[0] == 1
    assert capsys.readouterr().out == ""  # a command may write its results there
    save_steps(tmp_path, [4, 5], {4: 2.0})
    assert directories(tmp_path) == {"1", "4", "5"}
    assert json.loads((tmp_path / "val_losses.json").read_text()) == {"1": 1.0, "2": 3.0, "4": 2.0}


@pytest.mark.parametrize("damage", ["missing", '{"1": 2.0'])
@pytest.mark.parametrize("metrics", [None, "", "torn\n"])
def test_without_validation_losses_and_metrics_no_older_checkpoint_is_deleted(tmp_path, damage, metrics):
    save_steps(tmp_path, [1, 2, 3], {1: 1.0, 2: 3.0})
    damage_val_losses(tmp_path / "val_losses.json", damage)
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    save_steps(tmp_path, [4, 5, 6], {4: 2.0, 5: 4.0})
    assert directories(tmp_path) == {"1", "2", "3", "4", "5", "6"}


def test_params_alone_can_be_read(tmp_path):
    save_steps(tmp_path, [1, 2], {1: 0.5, 2: 0.75})
    for choice, step in [("latest", 2), ("best", 1), (1, 1), (2, 2)]:
        found, params, meta = restore_params(tmp_path, choice)
        assert (found, meta) == (step, {"data": f"position {step}"})
        assert_same(params, make_state(step).params)
    with pytest.raises(UserError, match=r"no checkpoint of step 3; there are \[1, 2\]"):
        restore_params(tmp_path, 3)
    with pytest.raises(UserError, match="holds no checkpoint"):
        restore_params(tmp_path / "elsewhere")


def test_a_leaf_may_be_larger_than_what_is_usually_read_and_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "MIN_IN_FLIGHT", 1)
    state = make_state(3)
    with contextlib.closing(Checkpoints(tmp_path, in_flight=checkpoints.bytes_in_flight(state))) as saver:
        saver.save(3, state, {})
    _, params, _ = restore_params(tmp_path, 3)
    assert_same(params, state.params)


def test_a_directory_that_cannot_be_written_to_is_a_user_error(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="could not be written to"):  # noqa: PT012 - it may come late: saving is async
        checkpoints.save(1, make_state(1), {})
        checkpoints.wait()


def test_orbax_is_quiet(tmp_path, capfd, caplog):
    with caplog.at_level(logging.DEBUG):
        save_steps(tmp_path, [1], {1: 1.0})
    assert [record for record in caplog.records if record.name == "absl"] == []
    assert capfd.readouterr() == ("", "")


# ---- A mismatch is not corruption ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.replace(step=jnp.float32(0)), "step: dtype is int32 in the checkpoint and float32 in the model"),
        (lambda s: s.replace(params=make_state(dtype=jnp.bfloat16).params), "params/embed: dtype is float32"),
        (lambda s: s.replace(params=make_state(width=4).params), r"params/embed: shape is \[10, 3\] .* \[10, 4\]"),
        (lambda s: s.replace(params=s.params | {"bias": s.seed}), "params/bias: not in the checkpoint"),
        (lambda s: s.replace(params={"embed": s.params["embed"]}), "params/blocks/w: only in the checkpoint"),
        (lambda s: s.replace(opt_state=optax.sgd(0.1).init(s.params)), "opt_state/.*: only in the checkpoint"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused_and_not_renamed(tmp_path, change, message):
    save_steps(tmp_path, [1, 2])
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(UserError, match=message):
        checkpoints.restore(jax.eval_shape(lambda: change(make_state())))
    checkpoints.close()
    assert directories(tmp_path) == {"1", "2"}


# ---- Kills during a save -----------------------------------------------------------------------------------------


SAVE_FOREVER = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp
from lm.workdir.checkpoints import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
state = {"params": {"w": jnp.zeros((500, 2000))}, "step": jnp.int32(0)}
first = 0
if checkpoints.steps():
    first, state, meta = checkpoints.restore(state)
    assert meta == {"step": first} and int(state["step"]) == first and (state["params"]["w"] == first).all()
print(first, flush=True)
for step in range(first + 1, 10**6):
    w = jnp.full_like(state["params"]["w"], step)
    checkpoints.save(step, {"params": {"w": w}, "step": jnp.int32(step)}, {"step": step})
"""


def killed_while_saving(workdir: Path) -> int:
    """Run SAVE_FOREVER, kill it while it writes its third checkpoint, and return the step at which it started."""
    process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(workdir)], stdout=subprocess.PIPE, text=True)
    try:
        first = int(process.stdout.readline())
        while process.poll() is None:
            unfinished = (workdir / "checkpoints").glob("*.orbax-checkpoint-tmp")
            if any(int(path.name.split(".")[0]) > first + 2 for path in unfinished):
                break
            time.sleep(0.0005)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    return first


def check_kills(workdir: Path, kills: int) -> None:
    target = {"params": {"w": jnp.zeros((500, 2000))}, "step": jnp.int32(0)}
    before = 0
    for _ in range(kills):
        assert killed_while_saving(workdir) == before
        printed = []
        checkpoints = Checkpoints(workdir, say=printed.append)
        before, state, meta = checkpoints.restore(target)
        checkpoints.close()
        assert before >= 1
        assert meta == {"step": before}
        assert int(state["step"]) == before
        assert (np.asarray(state["params"]["w"]) == before).all()
        assert printed == []  # an unfinished save is no corruption: the one before it is the newest
        assert not any("tmp" in name for name in directories(workdir))


def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path):
    check_kills(tmp_path, 1)


@pytest.mark.slow
def test_repeated_kills_during_saves_leave_the_checkpoint_before(tmp_path):
    check_kills(tmp_path, 5)
