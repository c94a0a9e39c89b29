"""What errors of Orbax and TensorStore mean: a corrupted checkpoint, or a failure of the system; and Orbax's log."""

import contextlib
import functools
import logging
import os
import re
import sys
import traceback
from pathlib import Path

from lm.errors import TemporaryError, first_line
from lm.files import files_below, open_regular


class Corrupted(Exception):
    """A corrupted checkpoint: its content was read and is wrong, or parts are missing. The message says what."""


def unreadable(directory: Path, step: int, part: str, error: Exception) -> Exception:
    """Return the exception for a part of a checkpoint that cannot be read.

    Args:
        directory: the directory of the checkpoints.
        step: the step of the checkpoint.
        part: the part's name, for the message of Corrupted ("arrays").
        error: the exception that reading it raised.

    Returns:
        TemporaryError if the system failed (permissions, a disk, memory, open files): the content may be intact. Else
        Corrupted.
    """
    reason = _system_failure(error)
    if not reason:
        try:
            for path in files_below(directory / str(step)):  # raises for a folder without permission, unlike rglob
                with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
                    while file.read(2**24):
                        pass
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as found:
            reason = f"{found.strerror}: {found.filename}"
    if reason:
        return TemporaryError(f"the checkpoint of step {step} in {directory} could not be read: {reason}")
    return Corrupted(f"its {part} cannot be read: {first_line(error)}")


# What TensorStore and XLA print for failures of the system.
_SYSTEM_FAILURE = re.compile(
    r"PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|Out of memory"
    r"|os_error_code='(?!2'|20'|21')\d+'"  # other than ENOENT, ENOTDIR and EISDIR
)


def _system_failure(error: BaseException | None) -> str | None:
    """Return the system's failure behind an error, or None: the error is about the content, or a missing file."""
    while error is not None:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno and not missing):
            return f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError) and _SYSTEM_FAILURE.search(str(error)):
            return first_line(error)
        error = error.__cause__ or error.__context__
    return None


def disk_failure(error: BaseException) -> str | None:
    """Return the system's message for the failure that TensorStore reports in an error, such as a full disk."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(found[1])) if found else None


def quieten_orbax() -> None:
    """Drop Orbax's log: dozens of lines per save, and a traceback for each part of a checkpoint that cannot be written.

    Orbax raises each error that it logs, and this module reports it.
    """
    if _is_not_orbax not in logging.getLogger("absl").filters:
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_orbax)
        sys.unraisablehook = functools.partial(_drop_late_callbacks, sys.unraisablehook)


def _drop_late_callbacks(hook, unraisable) -> None:
    """Pass an exception to a hook, except late exceptions of a save or read that Orbax has given up.

    Late exceptions come from a TensorStore thread that ends afterwards, or from a read that nothing awaits.
    """
    error, code = unraisable.exc_value, getattr(unraisable.object, "cr_code", None)
    late_thread = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    if not (late_thread or (code and "orbax" in code.co_filename)):
        hook(unraisable)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    # asyncio logs the exceptions of Orbax's tasks that nothing waited for after the first one failed.
    return not (record.name == "asyncio" and _raised_by_orbax(record)) and "orbax" not in record.pathname


def _raised_by_orbax(record: logging.LogRecord) -> bool:
    """Return whether a record is about a task or an exception of Orbax."""
    frames = traceback.walk_tb(record.exc_info[2]) if record.exc_info else ()
    return "orbax" in record.getMessage() or any("orbax" in frame.f_code.co_filename for frame, _ in frames)
