"""Defects that the campaign found. Each test fails without its correction."""

import asyncio
import gc
import logging
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from checkpointing import make_state, save_steps

from lm.workdir.checkpoints import Checkpoints
from lm.workdir.orbax_errors import quieten_orbax


@pytest.mark.parametrize(
    "content", ["[]", '{"item_handlers": 3}', '{"commit_timestamp_nsecs": 1' + "0" * 40 + "}"]
)
def test_a_damaged_file_of_orbax_does_not_prevent_resuming(tmp_path, content):
    save_steps(tmp_path, [4, 8])
    (tmp_path / "checkpoints" / "4" / "_CHECKPOINT_METADATA").write_text(content)
    lines = []
    with closing(Checkpoints(tmp_path, say=lines.append)) as checkpoints:
        assert ["_CHECKPOINT_METADATA is corrupted" in line for line in lines] == [True]
        assert checkpoints.restore(make_state())[0] == 8


@pytest.mark.parametrize(
    ("file", "logged"), [("site-packages/orbax/checkpoint/path.py", 0), ("lm/model.py", 1)]
)
def test_exceptions_of_a_failed_save_that_nothing_waited_for_are_not_logged(caplog, file, logged):
    """asyncio logs them at garbage collection, possibly after the command has reported the full
    disk.
    """
    quieten_orbax()
    try:
        exec(compile("raise FileNotFoundError", file, "exec"))
    except FileNotFoundError as error:
        future = asyncio.new_event_loop().create_future()
        future.set_exception(error)
    del future
    gc.collect()
    assert len([record for record in caplog.records if record.name == "asyncio"]) == logged


@pytest.mark.parametrize(
    ("file", "shown"), [("site-packages/orbax/checkpoint/path.py", 0), ("lm/model.py", 1)]
)
def test_reads_of_a_corrupted_checkpoint_that_nothing_awaits_print_nothing(
    monkeypatch, file, shown
):
    found, scope = [], {}
    exec(compile("async def read(): pass", file, "exec"), scope)
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    quieten_orbax()
    coroutine = scope["read"]()
    sys.unraisablehook(SimpleNamespace(exc_value=Exception("a read failed"), object=coroutine))
    coroutine.close()
    assert len(found) == shown
