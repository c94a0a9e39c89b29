"""A shared file system may show a checkpoint later than another host lists it."""

import os
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from lm import files
from lm.training.checkpoints import Checkpoints


@pytest.mark.slow
def test_a_checkpoint_that_appears_late_is_restored(tmp_path, monkeypatch):
    state = {"step": jnp.int32(4), "w": jnp.arange(6.0)}
    checkpoints = Checkpoints(tmp_path, say=print)
    checkpoints.save(4, state, {"note": 1})
    checkpoints.wait()
    directory, hidden, listed = tmp_path / "checkpoints" / "4", tmp_path / "hidden", files._is_listed
    os.rename(directory, hidden)
    looked = threading.Event()

    def is_listed(path):
        found = listed(path)
        looked.set()
        return found

    def show():
        looked.wait(60)
        os.rename(hidden, directory)

    monkeypatch.setattr(files, "_is_listed", is_listed)
    thread = threading.Thread(target=show)
    thread.start()
    step, restored, _ = checkpoints.restore(state)
    thread.join()
    assert step == 4
    np.testing.assert_array_equal(restored["w"], state["w"])
    checkpoints.close()
