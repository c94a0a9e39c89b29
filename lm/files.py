"""Small files on disk: strict JSON, and text that is replaced in one step."""

import json
import math
import os
import platform
from pathlib import Path


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
