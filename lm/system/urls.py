"""URLs of text and of mirrors, through fsspec, which the extra [data] installs; time limits for
silent servers.
"""

import functools
import importlib
import queue
import re
import threading
from collections.abc import Callable
from typing import Any

from lm.system.errors import UserError


def is_url(path: str) -> bool:
    """Return whether a path has a scheme, such as gs://BUCKET/FILE."""
    return re.match(r"[a-z][a-z0-9+.-]*://", path, re.IGNORECASE) is not None


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it; what it does behind a network has
    a time limit.

    Raises:
        UserError: its driver is not installed.
        TimeoutError: its server does not answer.
    """
    fsspec = optional("fsspec", url)
    try:
        system, path = answered(fsspec.core.url_to_fs, url)
    # a driver of a file system inside of another one, such as zip://, raises the last two
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{url}: there is no driver for it ({error})") from None
    return (system if local_path(url) else _Answering(system)), path


def local_path(url: str) -> str:
    """Return the path on this machine that a URL names, "" if it names none.

    >>> local_path("file:///runs/a"), local_path("s3://bucket/a")
    ('/runs/a', '')
    """
    scheme, _, path = url.partition("://")
    return path if scheme in ("file", "local") else ""


ANSWER_SECONDS = 120.0  # how long a server may be silent
SLOWEST = 50_000.0  # bytes per second: what is sent in one piece may take longer


def answered(
    function: Callable, *args, seconds: float | None = None, progresses: bool = False, **kwargs
) -> Any:
    """Call a function that waits for a server, and return its result.

    Each library has limits of its own, or none, so it is called in a thread, which is left behind
    if it takes too long.

    Args:
        seconds: the limit; None: ANSWER_SECONDS after the call or its last progress.
        progresses: the function copies a file, and reports its progress to a callback of fsspec.

    Raises:
        TimeoutError: it took longer.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()  # of (whether it is the end, result, error)
    limit = seconds or ANSWER_SECONDS + sum(len(x) for x in args if isinstance(x, bytes)) / SLOWEST

    def call() -> None:
        try:
            done.put((True, function(*args, **kwargs), None))
        except BaseException as error:
            done.put((True, None, error))

    if progresses:
        kwargs["callback"] = _progress(lambda: done.put((False, None, None)))
    threading.Thread(target=call, name="lm-answer", daemon=True).start()
    ended = False
    while not ended:
        try:
            ended, result, error = done.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError(
                f"no answer within {limit:.0f} s; check the network and the address, and try again"
            ) from None
    if error:
        raise error
    return result


def _progress(report: Callable[[], None]) -> Any:
    """Return a callback of fsspec that reports each part of a file that was copied."""
    from fsspec.callbacks import Callback

    class Progress(Callback):
        def call(self, *_, **__):
            report()

    return Progress()


class _Answering:
    """A file system, or a file of it, whose methods raise TimeoutError if the server does not
    answer.
    """

    def __init__(self, target: Any):
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value
        if name == "open":
            return lambda *args, **kwargs: _Answering(answered(value, *args, **kwargs))
        return functools.partial(answered, value, progresses=name in ("get_file", "put_file"))


def optional(module: str, path: str) -> Any:
    """Import a module of the extra [data]; raises UserError, with the command, if it is not
    installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(
            f"{path}: it needs {package}; pip install -e '.[data]' installs it"
        ) from None
