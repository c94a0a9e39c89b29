"""Text files: those that a path names, which are text, and whether it is records or a table."""

import contextlib
import csv
import json
import os
import re
import shlex
from collections.abc import Callable

from lm.data import chats, storage
from lm.system.errors import UserError
from lm.system.files import PointerError
from lm.system.text_tables import plural

MAX_LISTED_FILES = 4
HEAD = 2**16  # bytes of a file that are looked at before it is read
BOM = b"\xef\xbb\xbf"  # the byte order mark that some editors put before UTF-8
SIGNATURES = {b"PK\3\4": ("is a zip archive", "unzip"), b"%PDF": ("is a PDF", "pdftotext")}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
# How the files of other readers begin: those of Parquet, and the two formats of Arrow.
READERS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}


def choose_texts(files: list[str], path: str, say: Callable[[str], None]) -> list[str]:
    """Return those of the files or URLs of `path` that are text; raises UserError if none is.

    Say which files are read and which are not, and warn if the first is JSON Lines or a table.
    """
    problems = {file: problem for file in files if (problem := _problem_of(file))}
    texts = [file for file in files if file not in problems]
    if not texts:
        raise UserError(f"{files[0]} {problems[files[0]]}")
    if path != texts[0]:
        say(f"reading {plural(len(texts), 'file')} of {path}: {shorten(texts, path)}")
    if problems:
        line = (
            f"skipping {len(problems)} of {len(files)} files, which are empty or not UTF-8 text: "
            f"{shorten([*problems], path)}"
        )
        not_empty = [file for file in problems if problems[file] != "is empty"]
        if not_empty:
            line += f"; {not_empty[0]} {problems[not_empty[0]]}"
        say(line)
    _describe_syntax(texts[0], say)
    return texts


def shorten(files: list[str], folder: str) -> str:
    """Return the first names of some files, relative to their folder, and the last one."""
    names = [printable(file.removeprefix(folder.rstrip("/") + "/")) for file in files]
    if len(names) > MAX_LISTED_FILES:
        names[MAX_LISTED_FILES - 1 : -1] = ["..."]
    return ", ".join(names)


def printable(name: str) -> str:
    """Return a file name that can be printed on one line and written to JSON.

    >>> printable("caf" + os.fsdecode(bytes([233]))), printable("two lines".replace(" ", chr(10)))
    ('caf\ufffd', 'two\ufffdlines')
    """
    text = os.fsencode(name).decode(errors="replace")
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _read_head(path: str) -> bytes:
    with storage.readable(path), storage.open_file(path) as file:
        return file.read(HEAD)


def _problem_of(path: str) -> str | None:
    """Return what a file is if it is empty or does not begin like UTF-8 text, and what to do."""
    try:
        head = _read_head(path)
    except PointerError:
        raise
    except UserError as error:
        return f"is damaged or cannot be read ({str(error).removeprefix(f'{path}: ')})"
    if kind := reader_of(head):
        return f"is a file of {kind.capitalize()}; use {kind}:{path} in place of text:{path}"
    if problem := wrong_format(head, path):
        return problem
    if not head:
        return "is empty"
    try:
        head.decode()
    except UnicodeDecodeError as e:
        if len(head) < HEAD or e.start < HEAD - 4:  # else a character is cut
            return not_utf8(path, e)
    return None


def wrong_format(head: bytes, path: str) -> str | None:
    """Return what a file is, an archive, a PDF or UTF-16, by its first bytes, and what to do."""
    for signature, (name, program) in SIGNATURES.items():
        if head.startswith(signature):
            return f"{name}; convert it and give the new file: {program} {shlex.quote(path)}"
    if head.startswith(UTF16):
        return f"is UTF-16; convert it and give the new file: {_iconv('UTF-16', path)}"
    if len(head) > 1 and not any(head[1:100:2]) and all(head[:100:2]):
        return f"looks like UTF-16; convert it and give the new file: {_iconv('UTF-16LE', path)}"
    return None


def reader_of(head: bytes) -> str | None:
    """Return the reader of a binary file by its first bytes, None if no reader is known."""
    return next((kind for signature, kind in READERS.items() if head.startswith(signature)), None)


def not_utf8(path: str, e: UnicodeDecodeError, position: int | None = 0) -> str:
    """Describe a text that is not UTF-8; `position` is that of the decoded bytes, if known."""
    place = f"byte {e.object[e.start]:#04x}"
    if position is not None:
        place += f" at offset {position + e.start}"
    return (
        f"is not UTF-8 ({place}); if it is Latin-1, use this copy in place of it: "
        f"{_iconv('latin1', path)}"
    )


def _iconv(encoding: str, path: str) -> str:
    """Return the shell command that writes a copy of a text in UTF-8."""
    return copying(f"iconv -f {encoding} -t UTF-8", path, "utf8")


def copying(command: str, path: str, name_of_copy: str) -> str:
    """Return the shell command that writes a plain copy of a file through another command."""
    name = path
    source = shlex.quote(path)
    steps = []
    # Only the first program of a pipe is given the file.
    if storage.is_url(path):
        name = path.rpartition("/")[2].partition("?")[0]
        steps.append(f"curl -L {source}")
        source = ""
    if program := storage.compression(path):
        name = storage.without_compression(name)
        steps.append(f"{program} -dc {source}".rstrip())
        source = ""
    steps.append(f"{command} {source}".rstrip())
    stem, suffix = os.path.splitext(name)
    return f"{' | '.join(steps)} > {shlex.quote(f'{stem}.{name_of_copy}{suffix}')}"


def _describe_syntax(path: str, say: Callable[[str], None]) -> None:
    """Say if a file has Windows line ends, records or a table, and how to have the plain text."""
    head = _read_head(path).removeprefix(BOM).decode(errors="ignore")
    if "\r\n" in head:
        line = f"{path} has Windows line ends, which are kept"
        if not storage.is_url(path) and not storage.compression(path):
            line += f"; to remove them: sed -i 's/\\r$//' {shlex.quote(path)}"
        say(line)
    lines = head.splitlines()
    if len(head) > HEAD // 4:  # the last line may be cut
        lines.pop()
    for kind, records in (
        ("jsonl", _json_records(lines[:20])),
        ("csv", _table_rows(lines[:20], path)),
    ):
        if not records:
            continue
        fields = records[0]
        texts = {name: x for name, x in fields.items() if isinstance(x, str) or chats.is_chat(x)}
        advice = ", and none of them has a text"
        if texts:
            field = max(texts, key=lambda name: len(str(texts[name])))
            documents = "texts" if isinstance(texts[field], str) else "chats"
            advice = (
                f"; for the {documents} alone, use {kind}:{path} with config.data.field={field} or "
                f"--field {field}"
            )
        say(
            f"WARNING: {path} is {kind} with the fields {', '.join(fields)}, and its syntax is "
            f"part of the text{advice}"
        )


def _json_records(lines: list[str]) -> list[dict]:
    with contextlib.suppress(ValueError, RecursionError):
        records = [json.loads(line) for line in lines if line.strip()]
        if all(isinstance(record, dict) for record in records):
            return records
    return []


def _table_rows(lines: list[str], path: str) -> list[dict]:
    separator = "\t" if path.endswith(".tsv") else ","
    with contextlib.suppress(csv.Error, ValueError):
        names, *rows = csv.reader(lines, delimiter=separator, strict=True)
        named = len(names) > 1 and all(re.fullmatch(r"\w[\w .-]{0,39}", name) for name in names)
        # Lines of prose have commas, too, but not four times the same number.
        if named and len(rows) > 3 and {*map(len, rows)} == {len(names)}:
            return [dict(zip(names, row, strict=True)) for row in rows]
    return []
