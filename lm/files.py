"""Small files on disk: strict JSON, text that is replaced in one step, and a directory's lock."""

import json
import math
import os
import platform
from pathlib import Path

from lm.errors import Passing


def to_json(value, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and the infinities become the strings "NaN", "Infinity" and "-Infinity".

    These are the names Protocol Buffers' JSON mapping uses, and `float()` reads them back; the bare words Python
    writes by default are refused by most other readers, and null would not tell a NaN from a value not measured.
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
    """Replace a file in one step: after a crash at any moment it holds the old text or the new, whole."""
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.partial")  # containers' numbers are alike
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    directory = os.open(path.parent, os.O_RDONLY)  # the new name is durable once the directory is
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def lock(directory: Path, option: str = "--workdir"):
    """The lock of a directory, which the user named by `option`, as an open file: held until it is closed.

    Raises Passing if another process has it.
    """
    import fcntl  # POSIX only, as is everything that shares a directory

    file = open(directory / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held open for as long as the run lives
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise Passing(f"{option} {directory} is in use by {holder}; wait for it to end, or give another") from None
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return file
