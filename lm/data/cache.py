"""What is computed once and kept: directories that appear whole or not at all, and the token files inside them."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lm import files
from lm.errors import UserError

_REMEMBER = 64 * 2**20  # hashing a smaller file costs less than looking up its hash is worth


def user_cache(cache_dir: str | None) -> Path:
    """Where caches go: the configured directory, or `lm` in the user's cache directory."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lm"


def key_of(*parts) -> str:
    """sha256 of anything JSON can write: equal keys mean equal content."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path, cache: Path) -> str:
    """sha256 of a file's content; a large file is read once and remembered by its path, size and time of change."""
    stat = path.stat()
    remembered = cache / "digests" / key_of(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    if stat.st_size >= _REMEMBER and remembered.exists():
        return remembered.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stat.st_size >= _REMEMBER:
        write_file(remembered, digest)
    return digest


def write_file(path: Path, text: str) -> None:
    """Writes a small file so that readers see all of it or none, whoever else writes it meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
    except OSError as e:
        raise _unwritable(path, e) from None


def publish(directory: Path, write: Callable[[Path], None], setting: str = "config.data.cache_dir") -> None:
    """Makes `directory` with what write(temporary directory) puts there, atomically.

    The work happens in a hidden sibling that is renamed when every file is on the disk. When another process has
    published the same directory meanwhile, its copy stays and ours is discarded. `setting` is what the error tells the
    user to change when nothing can be written there.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as e:
        raise _unwritable(directory, e, setting) from None
    try:
        write(work)
        for path in [*work.rglob("*"), work]:
            _fsync(path)
        work.chmod(0o755)  # mkdtemp's are private
        try:
            os.rename(work, directory)
        except OSError:
            if not directory.is_dir():
                raise
        _fsync(directory.parent)
    except OSError as e:
        raise _unwritable(directory, e, setting) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(path: Path, error: OSError, setting: str = "config.data.cache_dir") -> UserError:
    return UserError(f"cannot write {path} ({error.strerror}); set {setting} to a directory that can be written")


def map_tokens(path: Path, dtype, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """A read-only memory map of a token file; OSError or ValueError where it is not there or not of that size."""
    dtype = np.dtype(dtype)
    expected = offset + int(np.prod(shape)) * dtype.itemsize
    if (size := path.stat().st_size) != expected:
        raise ValueError(f"{path.name} has {size} bytes and should have {expected}")
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r", offset, shape) if np.prod(shape) else np.empty(shape, dtype)
