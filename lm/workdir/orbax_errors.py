"""What errors of Orbax and TensorStore mean: a corrupted checkpoint, or a failure of the system."""

import functools
import logging
import os
import re
import sys
from pathlib import Path

from lm.system.errors import TemporaryError, first_line


class Corrupted(Exception):
    """A corrupted checkpoint: its content was read and is wrong, or parts are missing."""


# What TensorStore and XLA print for failures of the system.
_SYSTEM_FAILURE = re.compile(
    r"PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|Out of memory"
    r"|os_error_code='(?!2'|20'|21')\d+'"  # other than ENOENT, ENOTDIR and EISDIR
)


def unreadable(directory: Path, step: int, part: str, error: Exception) -> Exception:
    """Return the exception for a part ("arrays") of a checkpoint whose reading raised `error`.

    TemporaryError if the system failed (permissions, a disk, memory, open files): the content may
    be intact. Else Corrupted.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            missing = FileNotFoundError | NotADirectoryError | IsADirectoryError
            failed = bool(cause.errno) and not isinstance(cause, missing)
        else:
            failed = isinstance(cause, MemoryError) or bool(_SYSTEM_FAILURE.search(str(cause)))
        if failed:
            return TemporaryError(
                f"the checkpoint of step {step} in {directory} could not be read: "
                f"{first_line(cause)}"
            )
        cause = cause.__cause__ or cause.__context__
    return Corrupted(f"its {part} cannot be read: {first_line(error)}")


def disk_failure(error: BaseException) -> str | None:
    """Return the system's message for a failure that TensorStore reports, such as a full disk."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else None


def quieten_orbax() -> None:
    """Drop Orbax's log: dozens of lines per save, and a traceback for each part that fails.

    Orbax raises each error that it logs, and this module reports it.
    """
    if _is_not_orbax not in logging.getLogger("absl").filters:
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_orbax)
        sys.unraisablehook = functools.partial(_drop_late_callbacks, sys.unraisablehook)


def _drop_late_callbacks(hook, unraisable) -> None:
    """Pass an exception to a hook, except late exceptions of a save or read that Orbax has given
    up.

    Late exceptions come from a TensorStore thread that ends afterwards, or from a read that nothing
    awaits.
    """
    error = unraisable.exc_value
    code = getattr(unraisable.object, "cr_code", None)
    late_thread = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    if not (late_thread or (code and "orbax" in code.co_filename)):
        hook(unraisable)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    """Return whether neither the file nor the text or traceback of a record is of Orbax.

    asyncio logs the exceptions of Orbax's tasks that nothing waited for after the first one failed.
    """
    return "orbax" not in record.pathname and "orbax" not in logging.Formatter().format(record)
