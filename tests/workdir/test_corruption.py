"""Checkpoints: every kind of corruption is detected, and system failures are not reported as
corruption.
"""

import errno
import os
import shutil
from contextlib import closing

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from checkpointing import State, assert_same, data_file, directories, make_state, save_steps
from running import flip_a_bit

from lm.system.errors import TemporaryError, UserError
from lm.workdir import checkpoints as module
from lm.workdir.checkpoints import Checkpoints, restore_params


def change_the_record(step_directory):
    path = step_directory / "meta" / "metadata"
    text = path.read_text()
    assert "position 3" in text
    path.write_text(text.replace("position 3", "position 4"))


DAMAGE = {
    "flipped": lambda step: flip_a_bit(data_file(step)),
    "cut": lambda step: os.truncate(data_file(step), data_file(step).stat().st_size // 2),
    "zeros": lambda step: data_file(step).write_bytes(bytes(data_file(step).stat().st_size)),
    "another record": change_the_record,
    "empty": lambda step: (shutil.rmtree(step), step.mkdir()),
    "no state": lambda step: shutil.rmtree(step / "state"),
    "no meta": lambda step: shutil.rmtree(step / "meta"),
    "no manifest": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
}


def big_state(step):
    """Return a state whose data file consists mostly of one array, of random values that do not
    compress.
    """
    return State(
        jnp.int32(step), {"w": jax.random.normal(jax.random.key(step), (64, 64))}, (), jnp.uint32(7)
    )


def save_big(workdir, steps):
    with closing(Checkpoints(workdir, keep=9)) as saver:
        for step in steps:
            saver.save(step, big_state(step), {"data": f"position {step}"})


# Orbax leaves its other reads unfinished when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_corruption_is_detected_and_the_newest_intact_checkpoint_is_restored(tmp_path):
    save_big(tmp_path / "saved", (2, 3))
    for name, damage in DAMAGE.items():
        workdir, printed = shutil.copytree(tmp_path / "saved", tmp_path / name), []
        damage(workdir / "checkpoints" / "3")
        with pytest.raises(
            UserError, match=r"step 3 .* is corrupted .*; choose another step: \[2\]"
        ) as error:
            restore_params(workdir, 3)
        assert name != "flipped" or "checksums differ: params/w" in str(error.value)
        with closing(Checkpoints(workdir, say=printed.append)) as saver:
            step, state, meta = saver.restore(jax.eval_shape(lambda: big_state(0)))
            assert (step, meta) == (2, {"data": "position 2"})
            assert_same(state, big_state(2))
            (line,) = printed
            for part in (
                "WARNING: corrupted checkpoint of step 3",
                "3.corrupted-1",
                "falling back to step 2",
            ):
                assert part in line
            assert saver.save(3, big_state(3), {})  # the step can be saved again
            assert_same(saver.restore(big_state(0))[1], big_state(3))
        assert directories(workdir) == {"2", "3", "3.corrupted-1"}


READ_FAILURES = [
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.EMFILE, "Too many open files"),
    MemoryError(),
    ValueError("PERMISSION_DENIED: Error opening local file"),
    ValueError("UNKNOWN: Error reading local file Input/output error [os_error_code='5']"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes"),
]


@pytest.mark.parametrize("read", [(module, "read_bytes"), (ocp.PyTreeCheckpointHandler, "restore")])
def test_a_checkpoint_that_the_system_cannot_read_is_not_reported_as_corrupted(
    tmp_path, monkeypatch, read
):
    """We read the record of a checkpoint, and Orbax reads the arrays: either can fail."""
    save_steps(tmp_path, [1, 2])
    with closing(Checkpoints(tmp_path)) as saver:
        for error in READ_FAILURES:

            def fail(*_, error=error, **__):
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(*read, fail)
                with pytest.raises(
                    TemporaryError, match=r"checkpoint of step 2 in .* could not be read"
                ):
                    saver.restore(make_state())
        assert saver.restore(make_state())[0] == 2
    assert directories(tmp_path) == {"1", "2"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_that_cannot_be_opened_is_not_corrupted(tmp_path):
    save_big(tmp_path, (1, 2))
    path = data_file(tmp_path / "checkpoints" / "2")
    content = path.read_bytes()
    path.unlink()
    path.symlink_to(path.name)  # opening it fails with ELOOP, for root too
    with closing(Checkpoints(tmp_path)) as saver:
        with pytest.raises(TemporaryError, match="could not be read"):
            saver.restore(big_state(0))
        path.unlink()
        path.write_bytes(content)
        # Orbax's own, which is not needed
        (tmp_path / "checkpoints" / "2" / "state" / "_METADATA").unlink()
        assert saver.restore(big_state(0))[0] == 2


def test_a_folder_without_permission_is_not_corrupted(tmp_path, monkeypatch):
    save_big(tmp_path, (1, 2))
    closed = tmp_path / "checkpoints" / "2" / "state"
    scandir = os.scandir

    def refusing(path=".", *args):  # chmod does not stop root
        if str(path).startswith(str(closed)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path, *args)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError), closing(Checkpoints(tmp_path)):
        pass
    monkeypatch.undo()
    assert directories(tmp_path) == {"1", "2"}


def test_nothing_is_renamed_if_no_checkpoint_is_intact(tmp_path):
    save_big(tmp_path, (1, 2))
    for step in (1, 2):
        flip_a_bit(data_file(tmp_path / "checkpoints" / str(step)))
    with (
        closing(Checkpoints(tmp_path)) as saver,
        pytest.raises(UserError, match="no intact checkpoint") as error,
    ):
        saver.restore(big_state(0))
    assert len(error.value.problems) == 3  # a headline, and a reason for each checkpoint
    assert directories(tmp_path) == {"1", "2"}  # otherwise the next --resume would start a new run


def test_a_named_pipe_below_a_checkpoint_is_an_error_that_names_it(tmp_path):
    """Reading a pipe would wait forever."""
    save_steps(tmp_path, [1])
    os.mkfifo(tmp_path / "checkpoints" / "1" / "pipe")
    with pytest.raises(UserError, match="1/pipe is a pipe or a device"):
        Checkpoints(tmp_path)
    with pytest.raises(UserError, match="1/pipe is a pipe or a device"):
        restore_params(tmp_path)
