"""Locks: one holder at a time, released by any death of its process, also where the file system has
no flock.
"""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from running import ROOT

from lm.system import locks
from lm.system.errors import TemporaryError
from lm.system.locks import InUse, lock


def failing(number: int):
    """Return a system call that fails."""

    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture(params=["flock", "ENOSYS", "EOPNOTSUPP"])
def file_system(request, monkeypatch):
    """A file system with flock, and two without."""
    if request.param != "flock":
        monkeypatch.setattr("fcntl.flock", failing(getattr(errno, request.param)))
    return request.param


HOLD = """
import errno, fcntl, sys, time
from pathlib import Path
def fail(*_):
    raise OSError(getattr(errno, sys.argv[2]), "")
if sys.argv[2] != "flock":
    fcntl.flock = fail
from lm.system.locks import lock
held = lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_one_process_holds_a_lock_until_it_is_released_or_killed(tmp_path, file_system):
    in_use = rf"--output {tmp_path} is in use by process {os.getpid()} on .*; wait until"
    with lock(tmp_path), pytest.raises(InUse, match=in_use):
        lock(tmp_path, "--output")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    command = [sys.executable, "-c", HOLD, str(tmp_path), file_system]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(
                InUse, match=f"is in use by process {process.pid} on .*; wait until it ends"
            ):
                lock(tmp_path, timeout=0.2)
        finally:
            process.send_signal(signal.SIGKILL)
    lock(tmp_path, timeout=10).close()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_of_many_threads_that_lock_at_once_one_at_a_time_succeeds(tmp_path, file_system):
    inside, most, n_held, end = [], [], [], time.monotonic() + 1.0

    def work():
        while time.monotonic() < end:
            try:
                with lock(tmp_path, timeout=1):
                    inside.append(1)
                    most.append(len(inside))
                    time.sleep(random.uniform(0, 0.001))
                    inside.pop()
                    n_held.append(1)
            except InUse:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert max(most) == 1
    assert len(n_held) > 5


@pytest.mark.parametrize("change", ["boot", "host"])
def test_where_a_holder_cannot_be_seen_the_file_to_delete_is_named(tmp_path, monkeypatch, change):
    """It ran on another host, in another container, or before the machine started again."""
    monkeypatch.setattr("fcntl.flock", failing(errno.ENOSYS))
    with monkeypatch.context() as patch:
        patch.setattr(locks, "_machine", lambda: "01234567")
        if change == "host":
            patch.setattr(locks.platform, "node", lambda: "elsewhere/2")
        lock(tmp_path).pop_all()  # killed: nothing is released
    with pytest.raises(
        InUse, match=f"process {os.getpid()} on .*delete .* if it has ended"
    ) as error:
        lock(tmp_path)
    (record,) = set(tmp_path.iterdir()) - {tmp_path / ".lock"}
    assert str(record) in str(error.value)
    record.unlink()
    lock(tmp_path).close()


def test_an_id_that_another_process_has_now_is_not_taken_for_the_holder(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", failing(errno.ENOSYS))
    with monkeypatch.context() as patch:
        patch.setattr(locks, "_started", lambda pid: "1")
        lock(tmp_path).pop_all()
    lock(tmp_path).close()


@pytest.mark.parametrize("name", ["ENOLCK", "EIO", "ESTALE", "EPERM", "EINTR", "EINVAL"])
def test_a_lock_service_that_fails_is_one_line_with_the_file_and_the_last_holder(
    tmp_path, monkeypatch, name
):
    lock(tmp_path).close()
    monkeypatch.setattr("fcntl.flock", failing(number := getattr(errno, name)))
    with pytest.raises(TemporaryError) as error:
        lock(tmp_path)
    assert not isinstance(error.value, InUse)
    for part in (
        f"{tmp_path}/.lock",
        os.strerror(number),
        f"process {os.getpid()} on",
        "rerun the command",
    ):
        assert part in str(error.value)
