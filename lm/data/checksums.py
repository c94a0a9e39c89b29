"""Checksums of the files of a cache entry: one per block, so that a part of a very large file can be checked."""

import math
import os
import random
import zlib
from pathlib import Path

from lm.errors import UserError
from lm.files import COUNT, read_json, to_json

FILE = "checksums.json"
BLOCK = 2**20  # bytes per checksum
MAX_BLOCKS = 2**10  # of each file that are checked at once: 1 GiB, which takes about a second


def record(directory: Path) -> None:
    """Write the sizes and checksums of all files of a directory into its checksums.json."""
    recorded = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            blocks = [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]
        recorded[path.name] = {"size": path.stat().st_size, "crc32": blocks}
    (directory / FILE).write_text(to_json(recorded), encoding="utf-8")


def find_damage(directory: Path) -> str | None:
    """Compare the files of a directory with their checksums.

    A file of more than MAX_BLOCKS blocks is divided into MAX_BLOCKS equal parts, and one random block of each part is
    compared. Repeated calls compare other blocks.

    Returns:
        What is wrong with the first damaged file; None if there is none.

    Raises:
        OSError: a file cannot be read, which says nothing about its content.
    """
    try:
        recorded = read_json(directory / FILE, {str: {"size": COUNT, "crc32": [COUNT]}})
        present = {path.name for path in directory.iterdir()}
    except FileNotFoundError:  # also of the directory: another process may be rebuilding it
        return f"{FILE} is missing"
    except UserError:
        return f"{FILE} is not what was written"
    if unknown := present - recorded.keys() - {FILE}:
        return f"{FILE} does not list {min(unknown)}"
    return next(filter(None, (_damage_of(directory / name, **recorded[name]) for name in recorded)), None)


def _damage_of(path: Path, size: int, crc32: list[int]) -> str | None:
    try:
        with path.open("rb") as file:
            if (found := os.fstat(file.fileno()).st_size) != size:
                return f"{path.name} has {found} bytes instead of {size}"
            if len(crc32) != math.ceil(size / BLOCK):
                return f"{FILE} lists {len(crc32)} blocks of the {size} bytes of {path.name}"
            for i in _chosen(len(crc32)):
                file.seek(i * BLOCK)
                if zlib.crc32(file.read(BLOCK)) != crc32[i]:
                    return f"{path.name} has changed in the MiB at byte {i * BLOCK}"
    except FileNotFoundError:
        return f"{path.name} is missing"
    return None


def _chosen(n_blocks: int) -> list[int]:
    """Return the blocks to check: all of them, or one random block of each of MAX_BLOCKS parts.

    >>> _chosen(3)
    [0, 1, 2]
    """
    n_parts = min(n_blocks, MAX_BLOCKS)
    ends = [n_blocks * (i + 1) // n_parts for i in range(n_parts)]
    return [random.randrange(start, end) for start, end in zip([0, *ends], ends, strict=False)]
