"""Defects that the campaign found. Each test fails without its correction."""

import asyncio
import gc
import json
import logging
import os
import sys
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from lm.errors import UserError
from lm.files import refuse_links
from lm.workdir.checkpoints import Checkpoints
from lm.workdir.metrics import MetricsWriter
from lm.workdir.orbax_errors import quieten_orbax


def save(workdir, losses: dict[int, float]) -> None:
    """Write checkpoints of one array with these validation losses, and the metrics of a run that has them."""
    checkpoints = Checkpoints(workdir, keep=9)
    for step, loss in losses.items():
        checkpoints.score(step, loss)
        checkpoints.save(step, {"x": np.float32(step)}, {})
    checkpoints.close()
    lines = [{"step": step, "loss": 3.0} for step in range(1, max(losses) + 1)]
    lines += [{"step": step, "split": "validation", "loss": loss} for step, loss in losses.items()]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(("before", "after"), [('"4": 2.5', '"4": 7.5'), ('"4": 2.5', '"5": 2.5')])
def test_a_changed_digit_in_val_losses_is_found(tmp_path, before, after):
    save(tmp_path, {4: 2.5, 8: 2.75})
    path = tmp_path / "val_losses.json"
    path.write_text(path.read_text().replace(before, after))
    lines = []
    checkpoints = Checkpoints(tmp_path, keep=1, say=lines.append)
    assert [f"{path} is corrupted; 2 validation losses" in line for line in lines] == [True]
    checkpoints.save(12, {"x": np.float32(12)}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [4, 12]  # the best one, and the newest
    checkpoints.close()


def test_a_changed_digit_in_the_metrics_is_reported(tmp_path):
    def resume(step=2):
        return MetricsWriter(tmp_path, resume_step=step, tensorboard=False)

    with closing(resume(None)) as writer:
        for step in (1, 2, 3):
            writer.write({"step": step, "loss": 2.5})
        facts = writer.n_lines(2), writer.checksum(2)
    with closing(resume()) as writer:
        assert writer.gap(2, *facts) is None
        writer.write({"step": 3, "loss": 2.5})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace("2.5", "2.6", 1))
    with closing(resume()) as writer:
        assert "its lines up to step 2 are not those that were written" in writer.gap(2, *facts)
        assert writer.gap(2, facts[0]) is None  # a checkpoint of an earlier version has no checksum


@pytest.mark.parametrize("content", ["[]", '{"item_handlers": 3}', '{"commit_timestamp_nsecs": 1' + "0" * 40 + "}"])
def test_a_damaged_file_of_orbax_does_not_prevent_resuming(tmp_path, content):
    save(tmp_path, {4: 2.5, 8: 2.75})
    (tmp_path / "checkpoints" / "4" / "_CHECKPOINT_METADATA").write_text(content)
    lines = []
    checkpoints = Checkpoints(tmp_path, say=lines.append)
    assert ["_CHECKPOINT_METADATA is corrupted" in line for line in lines] == [True]
    step, state, _ = checkpoints.restore({"x": np.float32(0)})
    assert (step, float(state["x"])) == (8, 8.0)
    checkpoints.close()


@pytest.mark.parametrize(("file", "logged"), [("site-packages/orbax/checkpoint/path.py", 0), ("lm/model.py", 1)])
def test_exceptions_of_a_failed_save_that_nothing_waited_for_are_not_logged(caplog, file, logged):
    """asyncio logs them at garbage collection, possibly after the command has reported the full disk."""
    quieten_orbax()
    try:
        exec(compile("raise FileNotFoundError", file, "exec"))
    except FileNotFoundError as error:
        future = asyncio.new_event_loop().create_future()
        future.set_exception(error)
    del future
    gc.collect()
    assert len([record for record in caplog.records if record.name == "asyncio"]) == logged


@pytest.mark.parametrize(("file", "shown"), [("site-packages/orbax/checkpoint/path.py", 0), ("lm/model.py", 1)])
def test_reads_of_a_corrupted_checkpoint_that_nothing_awaits_print_nothing(monkeypatch, file, shown):
    found, scope = [], {}
    exec(compile("async def read(): pass", file, "exec"), scope)
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    quieten_orbax()
    coroutine = scope["read"]()
    sys.unraisablehook(SimpleNamespace(exc_value=Exception("a read failed"), object=coroutine))
    coroutine.close()
    assert len(found) == shown


def test_a_named_pipe_in_a_workdir_is_refused(tmp_path):
    """Reading a pipe would wait forever."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config\.json is neither a file nor a directory"):
        refuse_links([tmp_path / "config.json"])
