"""Small files: strict JSON, bounded reads, atomic replacement.

One rule for directories that somebody else may have made: a file is read if it is a regular one of
a bounded size (`read_bytes`, `open_regular`, `check_files`), a name that a file contains leads to
one file beside it (`is_file_name`), nothing but a file is replaced, and none is written through a
link (`write_bytes`, `check_output`), and results are not written into a linked folder
(`make_folder`). `tests/test_files.py` checks that other modules read in no other way.
"""

import contextlib
import glob
import io
import json
import math
import os
import platform
import re
import shutil
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from lm.system.errors import TemporaryError, UserError

# Shapes for `read_json`: a count, size or step; a number that may be infinite or NaN; a value of a
# config key.
COUNT = range(2**63)
NUMBER = (float, "NaN", "Infinity", "-Infinity")
SCALAR = (float, str, bool, None)
# bytes of the name of a file: systems allow 255, and `write_bytes` appends to it for a moment
MAX_NAME = 200
HEAD_OF_POINTER = 64  # bytes
POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("Git LFS", "git lfs pull"),
    b"version https://hawser.github.com/spec/": ("Git LFS", "git lfs pull"),  # its first name
    b"/annex/objects/": ("git-annex", "git annex get"),
}
# bytes of a file that is read at once: a damaged or hostile one must not fill the memory
LARGEST = 2**30


class PointerError(UserError):
    """An error for a file that is a pointer or a link to data that were not downloaded."""


def to_json(value, *, indent: int | None = None) -> str:
    """Return strict JSON, with the strings "NaN", "Infinity" and "-Infinity" for these numbers.

    Protocol Buffers' JSON mapping uses the same names, and `float()` reads them. Python writes bare
    NaN and Infinity by default, which most readers refuse; null already means a value that was not
    measured.

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
    """Read a JSON file whose content has the expected shape, see `parse_json`; objects may have
    more keys.

    Raises:
        UserError: the file was read, but is not JSON or has another shape; `advice` is what the
            user can do about it.
        OSError: the file is missing or cannot be read; its content may be intact.
    """
    try:
        return parse_json(read_bytes(path), expected)
    except ValueError as error:
        raise UserError(f"{path} is corrupted: {error}; {advice}") from None


def read_bytes(path: str | Path, at_most: int | None = None) -> bytes:
    """Read a file.

    Raises:
        ValueError: it is a pipe or a device, or has more than `at_most` bytes (None: LARGEST).
        OSError: it is missing or cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        at_most = at_most or LARGEST
        if size > at_most:
            raise ValueError(f"it has {size:,} bytes; at most {at_most:,} are expected")
        return file.read()


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a file for reading.

    Raises:
        ValueError: it is a pipe or a device, from which reading could wait forever.
        PointerError: see `refuse_pointer`.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is a pipe or a device")
    try:
        refuse_pointer(path, file.peek(HEAD_OF_POINTER))
    except PointerError:
        file.close()
        raise
    return file


def refuse_pointer(path: str | Path, head: bytes) -> None:
    """Raise PointerError if a file is a pointer of Git LFS or git-annex to a missing content."""
    for beginning, (name, command) in POINTERS.items():
        if head.startswith(beginning):
            raise PointerError(
                f"{path} is a pointer of {name}, not the file; run {command} in its repository"
            )


def is_file(path: str | Path) -> bool:
    """Return whether a path is a file; raises PointerError for a link to a file that is not there."""
    if os.path.islink(path) and not os.path.exists(path):
        raise PointerError(
            f"{path} is a link to a file that is not there; remove the link, or download the file "
            "(if git-annex manages it: git annex get)"
        )
    return os.path.isfile(path)


def folders_below(
    *directories: str | Path, follow: bool = True
) -> Iterator[tuple[Path, list[str]]]:
    """Yield directories and all below them, each once, with the sorted names of its files.

    Linked directories come after the others, so that a file has the path without links if it has
    one. Two links to "." would otherwise make as many paths as there are numbers of 40 bits.
    `follow`: whether to enter linked directories.

    Raises:
        OSError: a directory cannot be listed.
    """

    def fail(error: OSError):
        raise error

    seen: set[tuple[int, int]] = set()
    tops = list(map(Path, directories))
    for top in tops:  # which grows
        for folder, names, files in os.walk(top, onerror=fail):
            status = os.stat(folder)
            place = status.st_dev, status.st_ino
            if place in seen:
                names.clear()
                continue
            seen.add(place)
            names.sort()
            if follow:
                tops += filter(os.path.islink, [Path(folder, name) for name in names])
            yield Path(folder), sorted(files)


def files_below(directory: Path, *, follow: bool = True) -> Iterator[Path]:
    """Yield every file below a directory; see `folders_below`. Without `follow` linked files are
    left out, too.

    Raises:
        OSError: a directory cannot be listed.
        UserError: there is a pipe or a device, from which reading could wait forever.
    """
    for folder, names in folders_below(directory, follow=follow):
        for path in (folder / name for name in names):
            if path.is_symlink() and not follow:
                continue
            if path.exists() and not path.is_file():
                raise UserError(f"{path} is a pipe or a device; remove it")
            yield path


def matching_files(pattern: str) -> list[str]:
    """Return the sorted files that a pattern of `glob` matches; "**" visits each directory once.

    As in `glob`, hidden files and directories match only where the pattern has the dot.
    """
    parts = pattern.split("/")
    if "**" not in parts:
        return sorted(filter(is_file, glob.glob(pattern)))
    place = parts.index("**")
    head = "/".join([*parts[:place], ""])
    rest = "/".join(parts[place + 1 :] or ["*"])
    tops = list(map(Path, glob.glob(head) if head else ["."]))
    tops.sort(key=lambda top: (top.is_symlink(), top))
    matching: set[str] = set()
    for folder, _ in folders_below(*tops):
        if not any(part.startswith(".") for part in folder.parts[len(tops[0].parts) :]):
            prefix = os.path.join(folder, "").removeprefix("./")
            matching.update(matching_files(glob.escape(prefix) + rest))
    return sorted(matching)


def check_files(directory: Path, read_in_parts: str) -> None:
    """Refuse pipes and devices below a directory, and huge files not in a folder `read_in_parts`.

    Raises:
        UserError: there is such a file.
        OSError: a directory cannot be listed.
    """
    for path in files_below(directory):
        size = path.stat().st_size if path.exists() else 0
        if size > LARGEST and path.parent.name != read_in_parts:
            raise UserError(
                f"{path} has {size:,} bytes; at most {LARGEST:,} are expected; remove it"
            )


def is_name(name: str) -> bool:
    r"""Return whether a name is a line of text: printable, and at most MAX_NAME bytes.

    >>> [is_name(name) for name in ("SwiGLU, 2x", "-1", "text:a/b", "", "a\nb", "a\0", "\u202egnp", "a" * 201)]
    [True, True, True, False, False, False, False, False]
    """
    return name.isprintable() and 0 < len(name.encode()) <= MAX_NAME


def expanded(path: str | Path) -> str:
    """Return a path with the user's home in place of "~"; raises UserError without a home."""
    path = os.path.expanduser(path)
    if path == "~" or path.startswith("~/"):
        raise UserError(
            f"{path}: this user has no home directory; set HOME, or give a path without ~"
        )
    return path


def user_cache(cache_dir: str | None) -> Path:
    """Return the configured cache directory, else `lm` in the user's, such as ~/.cache.

    Raises:
        UserError: the user has no home directory.
    """
    refuse_url(cache_dir, "config.data.cache_dir")
    if cache_dir is not None:
        return Path(expanded(cache_dir))
    try:
        return Path(expanded(platformdirs.user_cache_dir("lm")))
    except (UserError, RuntimeError):
        raise UserError(
            "there is no place for caches: this user has no home directory; set "
            "XDG_CACHE_HOME=DIR, or give --config.data.cache_dir=DIR"
        ) from None


def is_file_name(name: str) -> bool:
    r"""Return whether a name is one file in the directory where it is used, on any system.

    >>> [is_file_name(name) for name in ("norms", "my sweep.2", "../x", "a\\b", "a\nb", "", ".hidden", "a" * 201)]
    [True, True, False, False, False, False, False, False]
    """
    return is_name(name) and bool(re.fullmatch(r"[^\W_][\w .+-]*", name))


def make_folder(path: Path) -> None:
    """Make a directory for results if it is missing.

    Raises:
        UserError: it is a link, which somebody else may have left there, or not a directory.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(
            f"{path} is a link or not a directory: files would be written elsewhere; remove it"
        )
    path.mkdir(parents=True, exist_ok=True)


def parse_json(content: str | bytes, expected: Any = dict) -> Any:
    """Parse JSON and check its shape.

    Args:
        content: JSON in UTF-8.
        expected: a type (`float` accepts integers); a range of integers, such as `COUNT`; a string
            for this string alone; None for null; {"key": shape} for an object with at least these
            keys, except those that end with "?"; {str: shape} for an object with any keys; [shape]
            for a list of any length; [shape, shape] for one of this length; or a tuple of
            alternatives, such as `NUMBER`.

    Raises:
        ValueError: it is not JSON or has another shape; the message says where.

    >>> parse_json('{"steps": 3, "losses": [2.5, "NaN"]}', {"steps": COUNT, "losses": [NUMBER]})
    {'steps': 3, 'losses': [2.5, 'NaN']}
    >>> parse_json('{"steps": "3"}', {"steps": (COUNT, None)})
    Traceback (most recent call last):
    ValueError: steps is "3", not an integer of at least 0 or null
    """
    if not content.strip():
        raise ValueError("it is empty")
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None
    if "\\u" in text:
        _refuse_surrogates(value)
    check_shape(value, expected)
    return value


def _refuse_surrogates(value) -> None:
    try:
        to_json(value).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(
            f"it has {half}, half of a surrogate pair, which is no character"
        ) from None


def with_checksum(value: dict) -> dict:
    """Return an object for JSON with the CRC-32 of its text as "crc32".

    >>> with_checksum({"steps": 3})
    {'steps': 3, 'crc32': '7f1c32aa'}
    """
    return value | {"crc32": f"{zlib.crc32(to_json(value).encode()):08x}"}


def without_checksum(signed: dict) -> dict:
    """Return an object of `with_checksum` without its checksum; raises ValueError without it."""
    value = {key: x for key, x in signed.items() if key != "crc32"}
    if signed != with_checksum(value):
        raise ValueError("its checksum differs")
    return value


def check_shape(value, expected, where: str = "") -> None:
    """Raise ValueError if a value, found at `where`, has another shape; see `parse_json`."""
    alternatives = expected if isinstance(expected, tuple) else (expected,)
    shape = next((shape for shape in alternatives if _is_a(value, shape)), alternatives)
    if shape is alternatives:
        wanted = " or ".join(map(_name_of, alternatives))
        raise ValueError(f"{where or 'its content'} is {_shown(value)}, not {wanted}")
    if isinstance(shape, list):
        if len(shape) > 1 and len(value) != len(shape):
            raise ValueError(f"{where or 'its content'} has {len(value):,} items, not {len(shape)}")
        for i, item in enumerate(value):
            check_shape(item, shape[i] if len(shape) > 1 else shape[0], f"{where}[{i}]")
    elif isinstance(shape, dict):
        for key, of_item in (dict.fromkeys(value, shape[str]) if str in shape else shape).items():
            name = key if str in shape else key.removesuffix("?")
            if name in value:
                check_shape(value[name], of_item, f"{where}.{name[:80]}".lstrip("."))
            elif name == key:
                raise ValueError(f"{where or 'its content'} has no {key!r}")


_NAMES = {
    dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def _is_a(value, shape) -> bool:
    """Return whether a value is of the type of a shape, whatever lists and objects contain."""
    if shape is None:
        return value is None
    if isinstance(value, bool):
        return shape is bool
    if isinstance(shape, str):
        return value == shape
    if isinstance(shape, range):
        return isinstance(value, int) and value in shape
    if shape is int:
        return isinstance(value, int) and -(2**63) <= value < 2**63
    if shape is float:
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, type(shape) if isinstance(shape, list | dict) else shape)


def _name_of(shape) -> str:
    if isinstance(shape, range):
        limit = f" and below {shape.stop:,}" if shape.stop < 2**63 else ""
        return f"an integer of at least {shape.start}{limit}"
    if isinstance(shape, str):
        return repr(shape)
    return _NAMES[shape if isinstance(shape, type) else type(shape)]


def _shown(value) -> str:
    return _NAMES[type(value)] if isinstance(value, list | dict) else json.dumps(value)[:80]


def check_output(path: Path, option: str, *endings: str) -> None:
    """Raise UserError unless a file can be written to the path that an option named.

    endings: those that the name may have; another file, such as the config of a run, stays.
    """
    refuse_url(path, option)
    try:
        if not os.path.isdir(path.parent) or len(os.fsencode(path.name)) > MAX_NAME:
            shown = str(path) if len(str(path)) < MAX_NAME else f"{str(path)[:40]}..."
            raise UserError(
                f"{shown} is not a file in an existing directory, or has a name of more than "
                f"{MAX_NAME} bytes"
            )
        check_replaceable(path)
        if endings and path.suffix.lower() not in endings:
            raise UserError(f"{path} must end in {' or '.join(endings)}")
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


def check_replaceable(path: Path) -> None:
    """Raise UserError if there is something else than a file, which a file must not replace.

    A link to a file is replaced, and what it names is unchanged. A link to a device, a pipe or a
    directory is not, and nothing is in /dev and /proc, where links such as /dev/stdout may lead to
    a file.
    """
    folder = Path(os.path.realpath(path.parent))
    of_system = folder == Path("/dev") or folder.is_relative_to("/proc")
    if of_system or (path.exists() and not path.is_file()):
        raise UserError(
            f"{path} is a directory, a device or a pipe, which no file replaces; give the name of "
            "a file"
        )


def write_text(path: Path, text: str) -> None:
    """Replace a file with UTF-8 text atomically; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash at any moment it holds the old or the new text.

    If writing fails, nothing is left behind.

    Raises:
        UserError: see `check_replaceable`.
    """
    check_replaceable(path)
    # With the host's name, because process ids repeat across containers.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.partial")
    with name_errors(path):
        try:
            partial.unlink(missing_ok=True)  # of a killed process with the same id
            # Exclusively: a link that appears there is not followed.
            with open(partial, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        fsync(path.parent)  # the new name is durable once the directory is


def fsync(path: Path) -> None:
    """Write what the system still holds of a file or of a directory's names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Name this file in errors of the system, such as a full disk, which `write` does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def without_links(path: str, flags: int) -> int:
    """Open a file, but follow no symbolic link at the end of its path; the `opener` of `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def check_in_place(file: int, path: Path) -> None:
    """Raise TemporaryError if `path` no longer names this file: it was deleted or moved."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return
    raise TemporaryError(
        f"{path} was deleted, moved or replaced by another program while this run was writing to it"
    )


def refuse_url(path: str | Path | None, option: str) -> None:
    """Raise UserError if the path given to `option` is a URL such as gs://BUCKET/RUN.

    Runs need directories that can be locked and files that can be appended to, which object stores
    do not offer.
    """
    if path is not None and re.match(r"[a-z][a-z0-9+.-]+:/", str(path), re.IGNORECASE):
        raise UserError(
            f"{option} {path}: URLs are not supported; mount the bucket as a directory (with "
            "gcsfuse for example, as launch/tpu_vm.sh does), and give its path"
        )


LATE_SECONDS = 60  # how long a file of another host may stay invisible on a shared file system


def appears(path: Path, seconds: float = LATE_SECONDS) -> bool:
    """Return whether a path exists, now or within some seconds.

    On a shared file system, what another host has written may appear late. Listing the parent
    directory makes NFS discard its cached answer that the path does not exist.
    """
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.name in os.listdir(path.parent) and path.exists():
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def remove_while_written(directory: Path) -> None:
    """Delete a directory, for two seconds: threads of a failed write may still put files there."""
    deadline = time.monotonic() + 2
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)  # fails if a file appears after the listing
        time.sleep(0.05)
