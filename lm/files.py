"""Small files: strict JSON, atomic replacement of text files, and locks of directories."""

import contextlib
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

import filelock

from lm.errors import TemporaryError, UserError

COUNT = range(2**63)  # an `expected` of `read_json`: a number of things, a size, a step


def to_json(value, *, indent: int | None = None) -> str:
    """Return strict JSON: NaN and the infinities become the strings "NaN", "Infinity" and "-Infinity".

    Protocol Buffers' JSON mapping uses the same names, and `float()` reads them. Python writes bare NaN and Infinity by
    default, which most readers refuse; null already means a value that was not measured.

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


def read_json(path: Path, expected: Any = dict, advice: str = "restore or delete it") -> Any:
    """Read a JSON file and check the shape of its content.

    Args:
        path: the file.
        expected: the shape of the content; see `parse_json`.
        advice: what the user can do about a corrupted file, for the error.

    Returns:
        The content, which has the expected shape and may have more keys.

    Raises:
        UserError: the file was read, but is not JSON or has another shape.
        OSError: the file is missing or cannot be read, which says nothing about its content.
    """
    content = Path(path).read_bytes()
    try:
        return parse_json(content, expected)
    except ValueError as error:
        raise UserError(f"{path} is corrupted: {error}; {advice}") from None


def parse_json(content: str | bytes, expected: Any = dict) -> Any:
    """Parse JSON and check its shape.

    Args:
        content: JSON in UTF-8.
        expected: a type (`float` accepts integers and what `to_json` writes for numbers that are not finite); a range
            of integers, such as `COUNT`; None for null; {"key": shape} for an object with at least these keys;
            {str: shape} for an object with any keys; [shape] for a list of any length; or a tuple of alternatives.

    Raises:
        ValueError: it is not JSON or has another shape; the message says where.

    >>> parse_json('{"steps": 3, "losses": [2.5, "NaN"]}', {"steps": COUNT, "losses": [float]})
    {'steps': 3, 'losses': [2.5, 'NaN']}
    >>> parse_json('{"steps": "3"}', {"steps": (COUNT, None)})
    Traceback (most recent call last):
    ValueError: steps is '3', not an integer of at least 0 or null
    """
    if not content.strip():
        raise ValueError("it is empty")
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None
    _check_shape(value, expected, "")
    return value


def _check_shape(value, expected, where: str) -> None:
    """Raise ValueError if the value at `where` has another shape."""
    alternatives = expected if isinstance(expected, tuple) else (expected,)
    shape = next((shape for shape in alternatives if _is_a(value, shape)), alternatives)
    if shape is alternatives:
        wanted = " or ".join(map(_name_of, alternatives))
        raise ValueError(f"{where or 'its content'} is {_shown(value)}, not {wanted}")
    items = {}
    if isinstance(shape, list):
        items = {f"{where}[{i}]": (item, shape[0]) for i, item in enumerate(value)}
    elif isinstance(shape, dict):
        shapes = dict.fromkeys(value, shape[str]) if str in shape else shape
        if missing := [key for key in shapes if key not in value]:
            raise ValueError(f"{where or 'its content'} has no {missing[0]!r}")
        items = {f"{where}.{key[:80]}".lstrip("."): (value[key], shapes[key]) for key in shapes}
    for name, (item, expected_item) in items.items():
        _check_shape(item, expected_item, name)


def _is_a(value, shape) -> bool:
    """Return whether a value is of the type of a shape; what lists and objects contain is not checked."""
    if shape is None or isinstance(value, bool):
        return value is None if shape is None else shape is bool
    if isinstance(shape, range):
        return isinstance(value, int) and value in shape
    if shape is int:
        return isinstance(value, int) and -(2**63) <= value < 2**63
    if shape is float:
        finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
        return finite or value in ("NaN", "Infinity", "-Infinity")
    return isinstance(value, type(shape) if isinstance(shape, list | dict) else shape)


def _name_of(shape) -> str:
    if isinstance(shape, range):
        return f"an integer of at least {shape.start}"
    names = {dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a number", None: "null"}
    return names.get(type(shape) if isinstance(shape, list | dict) else shape, "true or false")


def _shown(value) -> str:
    names = {dict: "an object", list: "a list", bool: str(value).lower(), type(None): "null"}
    return names.get(type(value)) or repr(value[:40] if isinstance(value, str) else value)[:80]


def write_text(path: Path, text: str) -> None:
    """Replace a file with UTF-8 text atomically; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash at any moment it holds either the old text or the new text."""
    # With the host's name, because process ids repeat across containers.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    directory = os.open(path.parent, os.O_RDONLY)  # the new name is durable once the directory is
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def lock(directory: Path, option: str = "--workdir") -> contextlib.AbstractContextManager:
    """Acquire the lock of a directory. The result is a context manager that releases it.

    The lock is also released when the process ends.

    Args:
        directory: an existing directory; the lock is the file .lock in it, which stays there.
        option: the command-line option by which the user named the directory, for the error.

    Raises:
        TemporaryError: if another process holds the lock.
    """
    acquired = filelock.FileLock(directory / ".lock", timeout=0)
    try:
        held = acquired.acquire()
    except filelock.Timeout:
        holder = (directory / ".lock").read_text(encoding="utf-8").strip() or "another process"
        raise TemporaryError(
            f"{option} {directory} is in use by {holder}; wait until it ends, or use another directory"
        ) from None
    (directory / ".lock").write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
    return held
