"""The cache: directories that appear complete or not at all, and memory maps of the token files in them."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import platformdirs

from lm import files
from lm.errors import UserError

_MIN_CACHED_DIGEST = 64 * 2**20  # hashing a smaller file is cheaper than looking up its hash


def user_cache(cache_dir: str | None) -> Path:
    """Return the configured cache directory, else `lm` in the user's (on Linux $XDG_CACHE_HOME, or ~/.cache)."""
    return Path(cache_dir).expanduser() if cache_dir is not None else platformdirs.user_cache_path("lm")


def key_of(*parts) -> str:
    """Return the sha256 of any values that JSON can represent.

    >>> key_of("char", {"a": 1, "b": 2}) == key_of("char", {"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path, cache: Path) -> str:
    """Return the sha256 of a file; that of a large file is cached by path, size and modification time."""
    stat = path.stat()
    cached = cache / "digests" / key_of(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    if stat.st_size >= _MIN_CACHED_DIGEST and cached.exists():
        return cached.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stat.st_size >= _MIN_CACHED_DIGEST:
        write_file(cached, digest)
    return digest


def write_file(path: Path, text: str) -> None:
    """Write a small file atomically; concurrent writers do not mix. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
    except OSError as e:
        raise _write_error(path, e) from None


def publish(directory: Path, write: Callable[[Path], None], setting: str = "config.data.cache_dir") -> None:
    """Create a directory atomically.

    The files are written to a hidden sibling, which is renamed once they are all on disk. If another process has
    published the same directory in the meantime, its copy is kept and ours is discarded.

    Args:
        directory: the directory to create.
        write: writes the content into the temporary directory that it is called with.
        setting: what the error message advises to change if the directory cannot be written.

    Raises:
        UserError: the directory cannot be written.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as e:
        raise _write_error(directory, e, setting) from None
    try:
        write(work)
        for path in [*work.rglob("*"), work]:
            _fsync(path)
        work.chmod(0o755)  # mkdtemp creates private directories
        try:
            os.rename(work, directory)
        except OSError:
            if not directory.is_dir():
                raise
        _fsync(directory.parent)
    except OSError as e:
        raise _write_error(directory, e, setting) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_error(path: Path, error: OSError, setting: str = "config.data.cache_dir") -> UserError:
    return UserError(f"cannot write {path} ({error.strerror}); set {setting} to a writable directory")


def map_tokens(path: Path, dtype, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """Memory-map a token file for reading; raises OSError or ValueError if it is missing or has another size."""
    dtype = np.dtype(dtype)
    expected = offset + int(np.prod(shape)) * dtype.itemsize
    if (size := path.stat().st_size) != expected:
        raise ValueError(f"{path.name} has {size} bytes, expected {expected}")
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r", offset, shape) if np.prod(shape) else np.empty(shape, dtype)
