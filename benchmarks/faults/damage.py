"""Damage one file in six ways."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

WAYS = ("emptied", "cut in half", "one byte flipped", "zeroed", "replaced", "deleted")
OTHER_JSON = (None, 3, "text", [], [1, 2, 3], {}, {"steps": "many"}, [{}], [[]], 1e308, True)


def files_below(directory: Path) -> list[Path]:
    """Return the sorted non-empty files of a directory, except locks."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return [
        path
        for path in paths
        if path.name != ".lock" and not path.name.endswith(".lock") and path.stat().st_size
    ]


def damage(path: Path, way: str, draw: random.Random) -> None:
    """Damage a file in one of WAYS; "replaced" writes other valid JSON, or random bytes."""
    content = path.read_bytes()
    if way == "deleted":
        path.unlink()
        return
    if way == "emptied":
        content = b""
    elif way == "cut in half":
        content = content[: len(content) // 2]
    elif way == "zeroed":
        content = bytes(len(content))
    elif way == "one byte flipped":
        i = draw.randrange(len(content))
        content = content[:i] + bytes([content[i] ^ draw.randrange(1, 256)]) + content[i + 1 :]
    else:
        content = replaced(content, draw)
    path.write_bytes(content)


def replaced(content: bytes, draw: random.Random) -> bytes:
    """Return other content: if it is JSON, JSON of another shape or with a changed value."""
    try:
        value = json.loads(content)
    except ValueError:
        return draw.randbytes(len(content))
    places = list(_places(value))
    if not places or draw.random() < 0.5:
        return json.dumps(draw.choice([other for other in OTHER_JSON if other != value])).encode()
    container, key = draw.choice(places)
    container[key] = draw.choice([other for other in OTHER_JSON if other != container[key]])
    return json.dumps(value).encode()


def _places(value) -> Iterator[tuple]:
    """Yield (container, key) of every value inside nested lists and objects."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield value, key
        yield from _places(item)


def fingerprint(directory: Path) -> str:
    """Return a digest of all names and contents below a directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        digest.update(
            f"{path.relative_to(directory)}\0".encode()
            + (path.read_bytes() if path.is_file() else b"")
        )
    return digest.hexdigest()
