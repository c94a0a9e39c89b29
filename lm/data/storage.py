"""Files that hold text: on this machine or behind a URL (through fsspec), and compressed or not."""

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from lm.data import cache
from lm.system.errors import TemporaryError, UserError, first_line
from lm.system.files import HEAD_OF_POINTER, folders_below, is_file, matching_files, refuse_pointer
from lm.system.text_tables import without_secrets
from lm.system.urls import file_system, is_url, optional


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Raise UserError, which names the file, for what is damaged or does not answer."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # readers and file systems raise many types
        if isinstance(error, OSError) and error.errno and not is_url(name):
            raise
        reason = str(error) if type(error) is ValueError else " ".join(first_line(error).split())
        if isinstance(error, MemoryError):
            reason = "it needs more memory than there is"
        kind = TemporaryError if isinstance(error, TimeoutError) else UserError
        raise kind(f"{name}: {reason}") from None


def list_files(path: str) -> list[str]:
    """Return the file itself, or those below a folder or of a pattern, sorted, no hidden ones."""
    if is_url(path):
        with readable(path):
            system = file_system(path)[0]
            try:
                if is_pattern(path):
                    names = system.glob(path)
                elif path[-1] != "/" and system.info(path)["type"] == "file":
                    names = [path]
                else:
                    names = system.find(path)
            except FileNotFoundError as error:
                if error.__cause__:  # a server that does not answer, for example
                    raise
                return []
            urls = map(system.unstrip_protocol, names)
            return sorted(url for url in urls if not _is_hidden(url.removeprefix(path)))
    if not os.path.isdir(path):
        return [path] if is_file(path) else matching_files(path)
    files = []
    for folder, names in folders_below(path, follow=False):
        files += [folder / name for name in names]
    shown = [file for file in files if not _is_hidden(str(file.relative_to(path)))]
    return list(map(str, sorted(filter(is_file, shown))))


def is_pattern(url: str) -> bool:
    """Return whether a URL is a pattern of URLs; "?" begins its query."""
    return re.search(r"[*\[]", url) is not None


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def open_file(path: str, *, decompress: bool = True) -> IO[bytes]:
    """Open a file or a URL for reading, decompressed (gzip, bzip2, xz, zstd).

    Raises PointerError for a pointer of Git LFS or git-annex.
    """
    file: Any
    if is_url(path):
        file = io.BufferedReader(file_system(path)[0].open(path, "rb"))
    else:
        file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    refuse_pointer(path, file.peek(HEAD_OF_POINTER))
    program = _program(file.peek(4)) if decompress else ""
    if program == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if program == "bzip2":
        return bz2.BZ2File(file)
    if program == "xz":
        return lzma.LZMAFile(file)
    if program == "zstd":
        arrow = optional("pyarrow", path)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd"))
    return file


COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
PROGRAMS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zX": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def _program(head: bytes) -> str:
    """Return the program whose compressed files begin so, "" if there is none."""
    return next((name for signature, name in PROGRAMS.items() if head.startswith(signature)), "")


def compression(path: str) -> str:
    """Return the program that compressed a file which `open_file` decompresses, "" for others."""
    with open_file(path, decompress=False) as file:
        return _program(file.read(4))


def without_compression(name: str) -> str:
    """Return the name of a file without the suffix of its compression, if it has one."""
    return os.path.splitext(name)[0] if name.endswith(COMPRESSIONS) else name


def describe(path: str, cache_dir: Path) -> dict:
    """Return the name, size and sha256 of a file as it is stored; a URL is read for it."""
    if not is_url(path):
        return {
            "file": path,
            "size": os.path.getsize(path),
            "sha256": cache.digest_of(Path(path), cache_dir),
        }
    with readable(path), open_file(path, decompress=False) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return {"file": without_secrets(path), "size": file.tell(), "sha256": digest}
