"""Checkpoints: bit-exact restore, which ones are kept, and mismatches."""

import logging
import math
import shutil
from contextlib import closing

import jax
import jax.numpy as jnp
import optax
import pytest
from checkpointing import assert_same, directories, make_state, save_steps

from lm.system.errors import UserError
from lm.workdir import checkpoints
from lm.workdir.checkpoints import Checkpoints, restore_params


def test_states_are_restored_bit_for_bit(tmp_path):
    half = make_state(3, dtype=jnp.bfloat16)
    half.params["embed"] = half.params["embed"].at[0].set(jnp.nan).at[1].set(-0.0)
    for name, state in {"32 bits": make_state(5), "16 bits": half}.items():
        with closing(Checkpoints(tmp_path / name)) as saver:
            assert saver.restore(state) is None  # there is none yet
            assert saver.save(5, state, {"n": 1})
            assert not saver.save(5, make_state(6), {"n": 2})  # a step is saved once
            step, restored, meta = saver.restore(jax.eval_shape(lambda: state))  # noqa: B023
            assert (step, meta) == (5, {"n": 1})
            assert_same(restored, state)


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    overwrite = jax.jit(
        lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0
    )
    with closing(Checkpoints(tmp_path)) as saver:
        state = make_state(1)
        saver.save(1, state, {})
        jax.block_until_ready(overwrite(state))
        assert_same(saver.restore(make_state())[1], make_state(1))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_the_next_api_of_orbax_reads_a_checkpoint(tmp_path):
    """Version 1 of it, which is to be the only one, without any code of this project."""
    try:
        from orbax.checkpoint import v1
    except ImportError:  # its name until 1.0
        from orbax.checkpoint.experimental import v1
    save_steps(tmp_path, [2])
    read = v1.load_checkpointables(tmp_path / "checkpoints" / "2")
    assert read["meta"]["meta"] == {"data": "position 2"}
    written = make_state(2)
    assert_same(read["state"]["params"], written.params)
    assert_same(read["state"]["seed"], written.seed)
    adam = read["state"]["opt_state"]["1"]["inner_state"]["0"]
    assert_same(adam["count"], written.opt_state[1].inner_state[0].count)


def test_the_newest_and_the_best_are_kept(tmp_path):
    losses = {1: 3.0, 2: 2.0, 6: 2.5}
    saver = Checkpoints(tmp_path, keep=2)
    for step in range(1, 8):
        if step in (3, 6):
            saver.close()
            saver = Checkpoints(tmp_path, keep=2)
        saver.val_losses = {s: loss for s, loss in losses.items() if s <= step}
        assert saver.is_best(step) == (step in (1, 2))
        saver.save(step, make_state(step), {})
    saver.close()
    assert directories(tmp_path) == {"2", "6", "7"}


def test_the_best_step_follows_from_the_metrics(tmp_path, capsys):
    """A loss that is not finite is never the best; without the metrics, none is, and a warning says
    so.
    """
    save_steps(tmp_path, range(1, 5), {1: 3.0, 2: 2.0, 3: math.nan, 4: 2.5}, keep=9)
    assert restore_params(tmp_path, "best")[0] == 2
    (tmp_path / "metrics.jsonl").unlink()
    meta = {"config": {"log": {"every": 2}}}
    with closing(Checkpoints(tmp_path, keep=9)) as saver:
        saver.save(5, make_state(5), meta)
    assert restore_params(tmp_path, "best")[0] == 5
    out, err = capsys.readouterr()
    # a command may write its results to stdout
    assert (out, "steps 1 to 5 are missing" in err) == (
        "",
        True,
    )


def test_checkpoints_that_are_protected_held_or_linked_by_the_owner_are_kept(tmp_path):
    save_steps(tmp_path / "run", [1, 2, 3], keep=3)
    shutil.move(tmp_path / "run" / "checkpoints" / "1", tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoints" / "1").symlink_to(tmp_path / "elsewhere")
    with closing(Checkpoints(tmp_path / "run", keep=1)) as saver:
        saver.protected = {2}
        for step, held in ((4, [3]), (5, [3]), (6, [])):  # while a mirror copies step 3
            saver.hold(held)
            saver.save(step, make_state(step), {})
            saver.wait()
            assert directories(tmp_path / "run") == {"1", "2", f"{step}", *map(str, held)}
    assert_same(restore_params(tmp_path / "run", 1)[1], make_state(1).params)


def test_params_alone_can_be_read(tmp_path, monkeypatch):
    save_steps(tmp_path, [1, 2], {1: 0.5, 2: 0.75})
    # an array may be larger than what is read at once
    monkeypatch.setattr(checkpoints, "MIN_IN_FLIGHT", 1)
    for choice, step in [("latest", 2), ("best", 1), (1, 1), (2, 2)]:
        found, params, meta = restore_params(tmp_path, choice)
        assert (found, meta) == (step, {"data": f"position {step}"})
        assert_same(params, make_state(step).params)
    with pytest.raises(UserError, match=r"no checkpoint of step 3; there are \[1, 2\]"):
        restore_params(tmp_path, 3)
    with pytest.raises(UserError, match="there is no run"):
        restore_params(tmp_path / "elsewhere")


def test_a_directory_that_cannot_be_written_to_is_a_user_error(tmp_path):
    saver = Checkpoints(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="could not be written to"):  # noqa: PT012 - it may come late: saving is async
        saver.save(1, make_state(1), {})
        saver.wait()


def test_orbax_is_quiet(tmp_path, capfd, caplog):
    with caplog.at_level(logging.DEBUG):
        save_steps(tmp_path, [1], {1: 1.0})
    assert [record for record in caplog.records if record.name == "absl"] == []
    assert capfd.readouterr() == ("", "")


MISMATCHES = {
    "step: dtype is int32 in the checkpoint and float32 in the model": lambda s: s.replace(
        step=jnp.float32(0)
    ),
    "params/embed: dtype is float32": lambda s: s.replace(
        params=make_state(dtype=jnp.bfloat16).params
    ),
    r"params/embed: shape is \[10, 3\] .* \[10, 4\]": lambda s: s.replace(
        params=make_state(width=4).params
    ),
    "params/bias: not in the checkpoint": lambda s: s.replace(params=s.params | {"bias": s.seed}),
    "params/blocks/w: only in the checkpoint": lambda s: s.replace(
        params={"embed": s.params["embed"]}
    ),
    "opt_state/.*: only in the checkpoint": lambda s: s.replace(
        opt_state=optax.sgd(0.1).init(s.params)
    ),
}


def test_a_checkpoint_of_another_model_is_refused_and_not_renamed(tmp_path):
    save_steps(tmp_path, [1, 2])
    with closing(Checkpoints(tmp_path)) as saver:
        for message, change in MISMATCHES.items():
            with pytest.raises(UserError, match=message):
                saver.restore(jax.eval_shape(lambda change=change: change(make_state())))
    assert directories(tmp_path) == {"1", "2"}
