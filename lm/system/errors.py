"""Errors for the user: commands print them without a traceback and map them to an exit code."""

import codecs
import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator

from lm.system.text_tables import message, say

# Errors of the system that are the same when a command is rerun: a folder in place of a file, for
# example.
LASTING = (errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


class UserError(Exception):
    """One or more mistakes that the user can correct.

    Each problem is a line that says what is wrong, where, and what would be right.
    """

    code = 2  # the exit code

    def __init__(self, *problems: str):
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return message("\n".join(self.problems))


class TemporaryError(UserError):
    """An error that may be gone when the command is rerun: a failed disk, a directory in use.
    Launchers retry.
    """

    code = 1


class Unavailable(UserError):
    """An error for a text that needs a network. It is the only error for which `data.offline` names
    a fallback.
    """


def first_line(error: BaseException) -> str:
    """Describe an error in one line: its type and the first line of its message, shortened.

    Errors of TensorStore, which Orbax wraps, are pages long. `tokenizers` raises plain Exception.

    >>> first_line(ValueError("no such dtype" + chr(10) + "a page of details"))
    'ValueError: no such dtype'
    >>> first_line(MemoryError())
    'MemoryError'
    """
    error = error.__cause__ or error
    line = f"{error}".strip().partition("\n")[0][:300]
    name = type(error).__name__
    return (line if type(error) is Exception else f"{name}: {line}") if line else name


def with_exit_code(command: Callable[..., int]) -> Callable[..., int]:
    """Decorate a command: errors that are meant for the user are printed, and the command returns
    an exit code.

    Exit codes: the command's own; 2 for a mistake of the user, also for a folder in place of a
    file; 1 for a temporary error, such as a full disk or a directory that cannot be read; 130 for
    Ctrl-C; 141 if the reader of the output went away, as for other programs. Output that cannot be
    written, to a full disk for example, is an error, too, unless it is that of long work.

    >>> @with_exit_code
    ... def main() -> int:
    ...     raise UserError("--steps must be at least 1")
    >>> main()
    2
    """

    @functools.wraps(command)
    def run(*args, **kwargs) -> int:
        _open_streams()
        _print_every_text()
        try:
            try:
                code = command(*args, **kwargs)
            except SystemExit:  # of argparse, which has printed its help
                if error := _flush_stdout():
                    raise error from None
                raise
            if error := _flush_stdout():
                raise error
            return code
        except UserError as error:
            return _fail(error.code, str(error))
        except BrokenPipeError:
            _silence(sys.stdout)
            return 141
        except OSError as error:
            with contextlib.suppress(BrokenPipeError):
                error = _flush_stdout() or error
            code = UserError.code if error.errno in LASTING else TemporaryError.code
            return _fail(code, f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            return _fail(130, "interrupted")
        except Exception as error:
            if processes := sys.modules.get("lm.parallel.processes"):
                processes.leave_after(error)
            raise

    return run


def _open_streams() -> None:
    """Open /dev/null for each standard stream that the shell closed (`>&-`).

    Python has None for it, and the next file that is opened has its number: libraries would write
    messages into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            try:
                os.fstat(number)  # a file has the number already
            except OSError:
                os.dup2(null, number)
            setattr(sys, name, open(null, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115 - to the end


def _flush_stdout() -> OSError | None:
    """Write what standard output still holds; returns an error that names it if this fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence(sys.stdout)  # Python would try again when it exits
        return OSError(error.errno, f"standard output cannot be written: {error.strerror}")
    return None


def _print_every_text() -> None:
    """Let standard output and standard error escape what their encoding lacks, as JSON does:
    printing never fails.
    """

    def escape(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end

    codecs.register_error("json", escape)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="json")


def _silence(stream) -> None:
    """Let what is written to a stream, and what it still holds, vanish."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in tests
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _Lasting:
    """A stream that falls silent when its reader goes away or its disk is full."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable, *arguments):
        try:
            return action(*arguments)
        except OSError as error:
            if error.errno not in (
                errno.EPIPE,
                errno.EIO,
                errno.ENOSPC,
                errno.EDQUOT,
            ):  # EIO: a terminal was closed
                raise
            _silence(self._stream)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Return a context for long work, which continues when nothing reads its output, or its output
    cannot be stored.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Lasting, streams)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = streams


def keep_stdout_to_python() -> None:
    """Let what libraries print vanish, and keep what Python prints: Gloo greets each process by a
    line.
    """
    stream = sys.stdout._stream if isinstance(sys.stdout, _Lasting) else sys.stdout
    with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in tests
        stream.flush()
        descriptor = os.dup(stream.fileno())
        encoding = stream.encoding
        own = open(descriptor, "w", 1, encoding, errors="json")  # noqa: SIM115 - to the end
        _silence(stream)
        if isinstance(sys.stdout, _Lasting):
            sys.stdout._stream = own
        else:
            sys.stdout = own


def _fail(code: int, message: str) -> int:
    try:
        say(message, sys.stderr)
    except OSError:  # nobody can be told
        _silence(sys.stderr)
    if processes := sys.modules.get(
        "lm.parallel.processes"
    ):  # one of several processes must not wait for the others
        processes.leave(code, message)
    return code
