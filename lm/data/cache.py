"""The cache: directories that appear complete or not at all, and digests of large files."""

import contextlib
import errno
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.system import files
from lm.system.errors import UserError
from lm.system.locks import flock

# version of the files in the cache; part of their names, so that each version has its own files
LAYOUT = 5
CHECKSUMS = "checksums.json"  # in each entry: the sha256 of its files
_POLL_SECONDS = 0.1
_MIN_CACHED_DIGEST = 64 * 2**20  # hashing a smaller file is cheaper than looking up its hash


def key_of(*parts) -> str:
    """Return the sha256 of any values that JSON can represent.

    >>> key_of("char", {"a": 1, "b": 2}) == key_of("char", {"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path, cache: Path) -> str:
    """Return the sha256 of a file; that of a large file is cached by its path and its `stat`.

    A program can set the modification time of a file, but not the time of its last change (ctime).
    """
    stat = path.stat()
    if stat.st_size < _MIN_CACHED_DIGEST:
        return sha256_of(path)
    identity = stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    cached = cache / "digests" / key_of(LAYOUT, str(path.resolve()), *identity)
    with contextlib.suppress(OSError, ValueError):  # it is missing or damaged
        digest, check = files.read_bytes(cached).decode().split()
        if check == key_of(digest):
            return digest
    digest = sha256_of(path)
    with contextlib.suppress(OSError):  # it takes time alone
        cached.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(cached, f"{digest} {key_of(digest)}")
    return digest


def make_entry(directory: Path, write: Callable[[Path], None], say: Callable[[str], None]) -> None:
    """Make sure that a cache entry exists and is intact; rebuild it if it is damaged.

    Of the processes that share the cache, the first to get the lock writes the entry: `write` puts
    its files into the temporary directory that it is called with. The others wait, which they
    `say`, and then use it. Raises UserError if the entry cannot be written, and OSError if it
    cannot be read: its content may be intact.
    """

    def write_entry(work: Path) -> None:
        write(work)
        recorded = {path.name: sha256_of(path) for path in sorted(work.iterdir())}
        (work / CHECKSUMS).write_text(files.to_json(recorded), encoding="utf-8")
        if damage and directory.is_dir() and find_damage(directory):  # no other process rebuilt it
            aside = work.with_name(f"{work.name}.damaged")
            directory.rename(aside)  # what other processes have mapped stays readable to them
            shutil.rmtree(aside, ignore_errors=True)

    if directory.is_dir() and find_damage(directory) is None:
        return
    with lock(directory, say) as waited:
        damage = None
        deadline = time.monotonic() + files.LATE_SECONDS * waited  # files may appear late
        while files.appears(directory, 0) and (damage := find_damage(directory)):
            if time.monotonic() >= deadline:
                say(f"WARNING: the cache entry {directory} is corrupted ({damage}); it is rebuilt")
                break
            time.sleep(_POLL_SECONDS)
        if damage or not directory.is_dir():
            publish(directory, write_entry)


def find_damage(directory: Path) -> str | None:
    """Return what is wrong with an entry, if anything; raises OSError if it cannot be read."""
    try:
        recorded = files.read_json(directory / CHECKSUMS, {str: str})
        unknown = {path.name for path in directory.iterdir()} - recorded.keys() - {CHECKSUMS}
    except FileNotFoundError as e:  # also of the directory: another process may be rebuilding it
        return f"{Path(e.filename).name} is missing"
    except (UserError, ValueError):  # also of a pipe
        return f"{CHECKSUMS} is not what was written"
    if unknown:
        return f"{CHECKSUMS} does not list {min(unknown)}"
    return next((f"{name} {problem}" for name, problem in changes(directory, recorded)), None)


def changes(directory: Path, recorded: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each file whose sha256 is not the recorded one, and why; OSError if unreadable."""
    for name, digest in recorded.items():
        try:
            if sha256_of(directory / name) != digest:
                yield name, "has another sha256 than when it was written"
        except FileNotFoundError:
            yield name, "is missing"
        except ValueError as error:
            yield name, f"cannot be a file of it: {error}"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file; raises ValueError for a pipe or a device."""
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Lock an entry; the context's value is whether this process waited for another one.

    On a file system without locks, several processes may write the same entry at the same time.
    This takes longer and gives the same result: the first entry is kept.
    """
    file = path.with_name(f".{path.name}.lock")
    waited = False
    with contextlib.ExitStack() as held:
        # If the directory is not writable, the caller raises a more specific error.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    held.enter_context(flock(file))
                    break
                except BlockingIOError:
                    if not waited:
                        say(f"waiting for another process to write {path}")
                    waited = True
                    time.sleep(_POLL_SECONDS)
        yield waited


def publish(
    directory: Path, write: Callable[[Path], None], setting: str = "--config.data.cache_dir=DIR"
) -> None:
    """Create a directory atomically; a UserError if it cannot be written advises on `setting`.

    `write` puts the files into a hidden sibling, which is renamed once they are all on disk. If
    another process has published the same directory in the meantime, its copy is kept and ours is
    discarded.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{directory.name}.", dir=directory.parent, ignore_cleanup_errors=True
        ) as name:
            work = Path(name)
            write(work)
            for path in [*work.rglob("*"), work]:
                files.fsync(path)
            work.chmod(0o755)  # temporary directories are private
            try:
                work.rename(directory)
            except OSError as e:
                if e.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not files.appears(directory):
                    raise  # else another process has made it
        files.fsync(directory.parent)
    except OSError as e:
        raise UserError(
            f"cannot write {directory} ({e.strerror}); give a writable directory with {setting}"
        ) from None
