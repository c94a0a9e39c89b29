"""Checkpoints: every kind of corruption is detected, and system failures are not reported as corruption."""

import errno
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from checkpointing import State, assert_same, data_file, directories, make_state, save_steps

from lm.errors import TemporaryError, UserError
from lm.workdir.checkpoints import Checkpoints, restore_params


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
    printed = []
    checkpoints = Checkpoints(tmp_path, say=printed.append)
    for step in (1, 2, 3):
        checkpoints.save(step, big_state(step), {"data": f"position {step}"})
    checkpoints.close()
    damage(tmp_path / "checkpoints" / "3")
    with pytest.raises(UserError, match=r"step 3 .* is corrupted .*; choose another step: \[2\]"):
        restore_params(tmp_path, 3)

    checkpoints = Checkpoints(tmp_path, say=printed.append)
    step, state, meta = checkpoints.restore(jax.eval_shape(lambda: big_state(0)))
    assert (step, meta) == (2, {"data": "position 2"})
    assert_same(state, big_state(2))
    (line,) = printed
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
@pytest.mark.parametrize("read", [(Path, "read_bytes"), (ocp.PyTreeCheckpointHandler, "restore")])
def test_a_checkpoint_that_the_system_cannot_read_is_not_reported_as_corrupted(tmp_path, monkeypatch, read, error):
    """We read the record of a checkpoint, and Orbax reads the arrays: either can fail."""
    save_steps(tmp_path, [1, 2])

    def fail(*_, **__):
        raise error

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(*read, fail)
        with pytest.raises(TemporaryError, match=r"checkpoint of step 2 in .* could not be read"):
            checkpoints.restore(make_state())
    assert checkpoints.restore(make_state())[0] == 2
    checkpoints.close()
    assert directories(tmp_path) == {"1", "2"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_that_cannot_be_opened_is_not_corrupted(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, big_state(step), {})
    checkpoints.close()
    path = data_file(tmp_path / "checkpoints" / "2")
    content = path.read_bytes()
    path.unlink()
    path.symlink_to(path.name)  # opening it fails with ELOOP, for root too
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TemporaryError, match="could not be read"):
        checkpoints.restore(big_state(0))
    path.unlink()
    path.write_bytes(content)
    assert checkpoints.restore(big_state(0))[0] == 2
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


def test_nothing_is_renamed_if_no_checkpoint_is_intact(tmp_path):
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
