"""Checkpoints: bit-exact restore, and detection of every kind of corruption."""

import errno
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

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from lm.errors import TemporaryError, UserError
from lm.training.checkpoints import Checkpoints, restore_params


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    seed: jax.Array


def make_state(step=0, *, width=3, dtype=jnp.float32):
    """Return a state like those of training: nested dicts, masked leaves, scalars. Its values depend on the step."""
    rng = np.random.default_rng(step)
    params = {
        "embed": jnp.asarray(rng.standard_normal((10, width)), dtype),
        "blocks": {"w": jnp.asarray(rng.standard_normal((2, 3, width)), dtype), "scale": jnp.ones((2, 3))},
    }
    mask = {"embed": False, "blocks": {"w": True, "scale": False}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1e-3), mask))
    return State(jnp.int32(step), params, optimizer.init(params), jnp.uint32(7))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save_steps(workdir, steps, val_losses=None, **options):
    checkpoints = Checkpoints(workdir, **options)
    for step in steps:
        checkpoints.save(step, make_state(step), {"data": f"position {step}"})
        if step in (val_losses or {}):
            checkpoints.score(step, val_losses[step])
    checkpoints.close()


def directories(workdir) -> set[str]:
    return {path.name for path in (workdir / "checkpoints").iterdir()}


# ---- Saving and restoring ------------------------------------------------------------------------------------------


def test_a_state_is_restored_bit_for_bit(tmp_path):
    save_steps(tmp_path, [5], {5: 1.25})
    checkpoints = Checkpoints(tmp_path)
    step, state, meta = checkpoints.restore(jax.eval_shape(make_state))
    assert (step, meta) == (5, {"data": "position 5"})
    assert_same(state, make_state(5))
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
def test_lost_validation_losses_are_rebuilt_from_the_metrics(tmp_path, damage):
    save_steps(tmp_path, [1, 2, 3], {1: 1.0, 2: 3.0})
    lines = [{"step": step, "split": "validation", "loss": loss} for step, loss in [(1, 1.0), (2, 3.0)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    damage_val_losses(tmp_path / "val_losses.json", damage)
    assert restore_params(tmp_path, "best")[0] == 1
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


# ---- Corruption ------------------------------------------------------------------------------------------------------


def data_file(step_directory: Path) -> Path:
    """Return the file with the arrays, which is the largest."""
    return max(step_directory.glob("state/**/d/*"), key=lambda path: path.stat().st_size)


def flip_a_byte(step_directory):
    path = data_file(step_directory)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)


def truncate(step_directory):
    path = data_file(step_directory)
    os.truncate(path, path.stat().st_size // 2)


def zero(step_directory):
    path = data_file(step_directory)
    path.write_bytes(bytes(path.stat().st_size))


def change_the_record(step_directory):
    path = step_directory / "meta" / "metadata"
    text = path.read_text()
    assert "position 3" in text
    path.write_text(text.replace("position 3", "position 4"))


def empty(step_directory):
    shutil.rmtree(step_directory)
    step_directory.mkdir()


def remove(name):
    def damage(step_directory):
        path = step_directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    damage.__name__ = f"remove_{name}"
    return damage


DAMAGE = [
    flip_a_byte, truncate, zero, change_the_record, empty,
    remove("state"), remove("meta"), remove("state/manifest.ocdbt"),
]  # fmt: skip


def big_state(step):
    """Return a state whose data file consists mostly of one array, of random values that do not compress."""
    return State(jnp.int32(step), {"w": jax.random.normal(jax.random.key(step), (64, 64))}, (), jnp.uint32(7))


# Orbax leaves its other reads unfinished when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_corruption_is_detected_and_the_newest_intact_checkpoint_is_restored(tmp_path, damage):
    said = []
    checkpoints = Checkpoints(tmp_path, say=said.append)
    for step in (1, 2, 3):
        checkpoints.save(step, big_state(step), {"data": f"position {step}"})
    checkpoints.close()
    damage(tmp_path / "checkpoints" / "3")
    with pytest.raises(UserError, match=r"step 3 .* is corrupted"):
        restore_params(tmp_path, 3)

    checkpoints = Checkpoints(tmp_path, say=said.append)
    step, state, meta = checkpoints.restore(jax.eval_shape(lambda: big_state(0)))
    assert (step, meta) == (2, {"data": "position 2"})
    assert_same(state, big_state(2))
    (line,) = said
    assert "WARNING: corrupted checkpoint of step 3" in line
    assert "renamed to 3.corrupted-1" in line
    assert line.endswith("falling back to step 2")
    assert "\n" not in line
    # The step can be saved again.
    assert checkpoints.save(3, big_state(3), {})
    assert_same(checkpoints.restore(big_state(0))[1], big_state(3))
    checkpoints.close()
    assert directories(tmp_path) == {"2", "3", "3.corrupted-1"}


def test_the_error_for_a_flipped_byte_names_the_leaf(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, big_state(1), {})
    checkpoints.wait()
    flip_a_byte(tmp_path / "checkpoints" / "1")
    with pytest.raises(UserError, match=r"checksums differ: params/w$"):
        checkpoints.restore(big_state(0))
    checkpoints.close()


READ_FAILURES = [
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.EMFILE, "Too many open files"),
    MemoryError(),
    ValueError("PERMISSION_DENIED: Error opening local file"),
    ValueError("UNKNOWN: Error reading local file Input/output error [os_error_code='5']"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes"),
]


@pytest.mark.parametrize("error", READ_FAILURES, ids=repr)
@pytest.mark.parametrize("handler", [ocp.JsonCheckpointHandler, ocp.PyTreeCheckpointHandler])
def test_a_checkpoint_that_the_system_cannot_read_is_not_called_corrupted(tmp_path, monkeypatch, handler, error):
    save_steps(tmp_path, [1, 2])

    def fail(*_, **__):
        raise error

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(handler, "restore", fail)
        with pytest.raises(TemporaryError, match=r"checkpoint of step 2 in .* could not be read"):
            checkpoints.restore(make_state())
    assert checkpoints.restore(make_state())[0] == 2
    checkpoints.close()
    assert directories(tmp_path) == {"1", "2"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_that_cannot_be_opened_is_not_corrupted(tmp_path):
    save_steps(tmp_path, [1, 2])
    path = data_file(tmp_path / "checkpoints" / "2")
    content = path.read_bytes()
    path.unlink()
    path.symlink_to(path.name)  # opening it is the error ELOOP, for root too
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TemporaryError, match="could not be read"):
        checkpoints.restore(make_state())
    path.unlink()
    path.write_bytes(content)
    assert checkpoints.restore(make_state())[0] == 2
    checkpoints.close()


def test_orbaxs_own_metadata_is_not_needed(tmp_path):
    # Our record has the shape and dtype of each array, so the checkpoint can still be verified.
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, big_state(step), {})
    checkpoints.wait()
    (tmp_path / "checkpoints" / "2" / "state" / "_METADATA").unlink()
    (tmp_path / "checkpoints" / "2" / "_CHECKPOINT_METADATA").write_text("{cut off")
    step, state, _ = checkpoints.restore(big_state(0))
    assert step == 2
    assert_same(state, big_state(2))
    checkpoints.close()


def test_when_none_is_intact_nothing_is_renamed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, big_state(step), {})
    checkpoints.wait()
    for step in (1, 2):
        flip_a_byte(tmp_path / "checkpoints" / str(step))
    with pytest.raises(UserError, match="no intact checkpoint") as error:
        checkpoints.restore(big_state(0))
    assert len(error.value.problems) == 3  # a headline, and a reason for each checkpoint
    checkpoints.close()
    assert directories(tmp_path) == {"1", "2"}  # otherwise the next --resume would start a new run


def test_an_explicit_step_does_not_fall_back(tmp_path):
    save_steps(tmp_path, [1, 2])
    empty(tmp_path / "checkpoints" / "2")
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(UserError, match="no intact checkpoint of step 2"):
        checkpoints.restore(make_state(), 2)
    assert checkpoints.restore(make_state(), 1)[0] == 1
    checkpoints.close()


SAVE_FOREVER = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp
from lm.training.checkpoints import Checkpoints
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
        said = []
        checkpoints = Checkpoints(workdir, say=said.append)
        before, state, meta = checkpoints.restore(target)
        checkpoints.close()
        assert before >= 1
        assert meta == {"step": before}
        assert int(state["step"]) == before
        assert (np.asarray(state["params"]["w"]) == before).all()
        assert said == []  # an unfinished save is no corruption: the one before it is the newest
        assert not any("tmp" in name for name in directories(workdir))


def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path):
    check_kills(tmp_path, 1)


@pytest.mark.slow
def test_repeated_kills_during_saves_leave_the_checkpoint_before(tmp_path):
    check_kills(tmp_path, 5)
