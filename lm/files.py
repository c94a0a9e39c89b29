"""Small files: strict JSON, atomic replacement of text files, and locks of directories."""

import contextlib
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock

from lm.errors import TemporaryError, UserError


def to_json(value, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and the infinities become the strings "NaN", "Infinity" and "-Infinity".

    Protocol Buffers' JSON mapping uses the same names, and `float()` reads them. Most readers refuse the bare words
    that Python writes by default, and null could not be told from a value that was not measured.

    >>> to_json({"loss": float("nan"), "steps": 3})
    '{"loss": "NaN", "steps": 3}'
    """
    return json.dumps(_strict(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _strict(value):
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if hasattr(value, "item"):  # numpy and JAX scalars
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def write_text(path: Path, text: str) -> None:
    """Replace a file with UTF-8 text atomically; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash at any moment it holds either the old text or the new text.

    If writing fails, nothing is left behind.
    """
    # With the host's name, because process ids repeat across containers.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.partial")
    with name_errors(path):
        try:
            with open(partial, "wb", opener=without_links) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY)  # the new name is durable once the directory is
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextlib.contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Name this file in errors of the system, such as a full disk: writing to an open file does not."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def without_links(path: str, flags: int) -> int:
    """Open a file, but do not follow a symbolic link at the end of its path; the `opener` of `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def check_in_place(file: int, path: Path) -> None:
    """Raise TemporaryError if `path` no longer names the open file: it or its directory was deleted or moved.

    Args:
        file: a file descriptor.
        path: where the file was opened.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return
    raise TemporaryError(f"{path} was deleted, moved or replaced by another program while this run was writing to it")


def lock(directory: Path, option: str = "--workdir") -> contextlib.AbstractContextManager:
    """Acquire the lock of a directory. The result is a context manager that releases it.

    The lock is also released when the process ends.

    Args:
        directory: an existing directory; the lock is the file .lock in it, which stays there.
        option: the command-line option by which the user named the directory, for the error.

    Raises:
        TemporaryError: if another process holds the lock.
        UserError: if .lock is a symbolic link.
    """
    path = directory / ".lock"
    refuse_links([path])
    acquired = filelock.FileLock(path, timeout=0)
    try:
        held = acquired.acquire()
    except filelock.Timeout:
        holder = path.read_text(encoding="utf-8").strip() or "another process"
        raise TemporaryError(
            f"{option} {directory} is in use by {holder}; wait until it ends, or use another directory"
        ) from None
    with open(path, "w", encoding="utf-8", opener=without_links) as file:
        file.write(f"process {os.getpid()} on {platform.node()}")
    return held


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise UserError if one of the paths, or anything below it, is a symbolic link: it can lead outside."""
    for path in paths:
        for found in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
            if found.is_symlink():
                raise UserError(
                    f"{found} is a symbolic link: writing or deleting there could change files elsewhere; "
                    "replace it by what it names, or remove it"
                )
