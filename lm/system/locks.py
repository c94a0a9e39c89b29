"""Locks of directories and files: one process at a time, also where a file system has no locks.

A lock is `flock` of a file, which the kernel releases when the process ends, however it ends. NFS
and cluster file systems carry it to all hosts. Where `flock` is not supported (Lustre without the
mount option flock, some FUSE file systems), each process makes a record, a file whose name says who
holds the lock, and looks for the records of others: of two processes, the later one sees the record
of the earlier one. A record of a killed process is recognized and deleted on the machine where it
was made; elsewhere nobody can know, and the error names the file to delete.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import os
import platform
import random
import re
import secrets
import sys
import time
import zlib
from pathlib import Path

from lm.system.errors import TemporaryError, UserError
from lm.system.files import open_regular, without_links

# the file system has no flock, and never will
_UNSUPPORTED = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
)
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.1  # `is_locked` holds a lock for less
# processes that start together see each other's records; all but one then withdraw, rarely all
_ATTEMPTS = 3


class InUse(TemporaryError):
    """Another process holds the lock."""


def lock(directory: Path, option: str = "--workdir", timeout: float = 0) -> contextlib.ExitStack:
    """Acquire the lock of an existing directory, the file .lock in it, which stays there.

    The result is a context manager that releases it. It is also released when the process ends.

    Args:
        option: the command-line option by which the user named the directory, for the error.
        timeout: how many seconds to wait for another process.

    Raises:
        InUse: if another process holds the lock.
        TemporaryError: if the file system fails.
        UserError: if .lock is a symbolic link.
    """
    path = directory / ".lock"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path} is not a file but a link, a directory or a device; remove it")
    deadline = time.monotonic() + max(timeout, _LOOK_SECONDS)
    while True:
        try:
            held = _acquire(path)
            break
        except InUse as error:
            if time.monotonic() >= deadline:
                raise InUse(
                    f"{option} {directory} is in use by {error}, or use another directory"
                ) from None
        except OSError as error:
            raise TemporaryError(
                f"{option} {directory}: {path}, last held by {_holder(path)}, cannot be locked: "
                f"{error.strerror}; check the file system and its lock service, and rerun the "
                "command, or use a directory on another disk"
            ) from None
        time.sleep(_POLL_SECONDS)
    with open(path, "w", encoding="utf-8", opener=without_links) as file:
        file.write(_here())
    return held


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the lock of a directory, as far as this can be seen from here."""
    path = directory / ".lock"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment; `lock` waits for longer
    except BlockingIOError:
        return True
    except OSError:
        return any(not record.is_dead() for record in _records(path))
    finally:
        os.close(file)
    return False


def _acquire(path: Path) -> contextlib.ExitStack:
    try:
        return flock(path)
    except BlockingIOError:
        raise InUse(f"{_holder(path)}; wait until it ends") from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return _record(path)


def flock(path: Path) -> contextlib.ExitStack:
    """Lock a file, which is made if it is missing, for this process.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    held = contextlib.ExitStack()
    held.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        held.close()
        raise
    return held


def _here() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _holder(path: Path) -> str:
    """Return who has written to a lock file."""
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        if name := file.read(200).decode(errors="replace").strip():
            return name
    return "another process"


# ---- Records, where the file system has no flock -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Record:
    """Who holds a lock: the parts of the name of a file beside it."""

    pid: int
    started: str  # of the process, in ticks since the machine started: ids are used again
    machine: str  # `_machine()`
    token: str  # a process may take a lock more than once, in threads
    host: str

    def file(self, path: Path) -> Path:
        return path.with_name(
            f"{path.name}.{self.pid}.{self.started}.{self.machine}.{self.token}.{self.host}"
        )

    def is_dead(self) -> bool:
        """Return whether its process is known to have ended."""
        return self.machine == _machine() and _started(self.pid) != self.started


@functools.cache
def _machine() -> str:
    """Return a name of this start of this machine and of this container, in which a process id
    names one process.

    Where Linux does not say it, the name is a new one: no record can then be called dead.
    """
    parts = [platform.node()]
    if sys.platform == "linux":
        try:
            parts += [
                Path("/proc/sys/kernel/random/boot_id").read_text(),
                os.readlink("/proc/self/ns/pid"),
            ]
        except OSError:
            parts = [secrets.token_hex(16)]
    return f"{zlib.crc32(repr(parts).encode()):08x}"


def _started(pid: int) -> str:
    """Return when a process started, "0" where the system has no /proc, or "" if there is no such
    process.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:  # of another user
        pass
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return "0"
    return "" if state in "ZX" else fields[18]  # of a zombie nothing is left but its id


def _records(path: Path) -> list[_Record]:
    """Return the records of a lock."""
    form = re.compile(re.escape(path.name) + r"\.(\d+)\.(\d+)\.([0-9a-f]{8})\.([0-9a-f]{8})\.(.*)")
    found = (form.fullmatch(name) for name in sorted(os.listdir(path.parent)))
    return [_Record(int(match[1]), *match.groups()[1:]) for match in found if match]


def _record(path: Path) -> contextlib.ExitStack:
    """Hold a lock by a record; raises InUse if there is one of another process that may be running."""
    host = re.sub(r"[^\w.-]", "_", platform.node())[:64]
    own = _Record(os.getpid(), _started(os.getpid()), _machine(), secrets.token_hex(4), host)
    for _ in range(_ATTEMPTS):
        with contextlib.ExitStack() as made:
            own.file(path).touch(exist_ok=False)
            made.callback(own.file(path).unlink, missing_ok=True)
            path.touch()  # as with flock
            others = [record for record in _records(path) if record != own]
            for record in others:
                if (
                    record.is_dead()
                ):  # its name is never used again, so a new record is not deleted here
                    record.file(path).unlink(missing_ok=True)
            alive = [record for record in others if not record.is_dead()]
            if not alive:
                return made.pop_all()
        time.sleep(random.uniform(0, _POLL_SECONDS))
    other = alive[0]
    by = f"process {other.pid} on {other.host}; wait until it ends"
    if other.machine != _machine():
        by += f", delete {other.file(path)} if it has ended (this cannot be seen from here)"
    raise InUse(by)
