"""Text files: those that a path names, which are text, and whether it is records or a table."""

import csv
import json
import os
import re
import shlex
from collections.abc import Callable

from lm.data import chats, storage
from lm.system.errors import UserError
from lm.system.files import PointerError

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
        say(f"reading {len(texts)} file{'s' * (len(texts) > 1)} of {path}: {shorten(texts, path)}")
    if problems:
        skipped = f"{len(problems)} of {len(files)} files, which are empty or not UTF-8 text"
        not_empty = [
            f"{file} {problem}" for file, problem in problems.items() if problem != "is empty"
        ]
        say(
            f"skipping {skipped}: {shorten([*problems], path)}"
            + "".join(f"; {first}" for first in not_empty[:1])
        )
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
        return f"is damaged ({str(error).removeprefix(f'{path}: ')})"
    if kind := reader_of(head):
        return f"is a file of {kind.capitalize()}; use {kind}:{path} in place of text:{path}"
    if problem := wrong_format(head, path):
        return problem
    try:
        head.decode()
    except UnicodeDecodeError as e:
        if len(head) < HEAD or e.start < HEAD - 4:  # else a character is cut
            return not_utf8(path, e)
    return None if head else "is empty"


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
    place = f"byte {e.object[e.start]:#04x}" + (
        "" if position is None else f" at offset {position + e.start}"
    )
    return (
        f"is not UTF-8 ({place}); if it is Latin-1, use this copy in place of it: "
        f"{_iconv('latin1', path)}"
    )


def _iconv(encoding: str, path: str) -> str:
    """Return the shell command that writes a copy of a text in UTF-8."""
    return copying(f"iconv -f {encoding} -t UTF-8", path, "utf8")


def copying(command: str, path: str, name_of_copy: str) -> str:
    """Return the shell command that writes a plain copy of a file through another command."""
    name = path if not storage.is_url(path) else path.rpartition("/")[2].partition("?")[0]
    program = storage.compression(path)
    if program and name.endswith(storage.COMPRESSIONS):
        name = os.path.splitext(name)[0]
    stem, suffix = os.path.splitext(name)
    read = f"curl -L {shlex.quote(path)} | " if storage.is_url(path) else ""
    if program:
        read += f"{program} -dc {'' if read else shlex.quote(path)}".rstrip() + " | "
    given = "" if read else f" {shlex.quote(path)}"
    return f"{read}{command}{given} > {shlex.quote(f'{stem}.{name_of_copy}{suffix}')}"


def _describe_syntax(path: str, say: Callable[[str], None]) -> None:
    """Say if a file has Windows line ends, records or a table, and how to have the plain text."""
    head = _read_head(path).removeprefix(BOM).decode(errors="ignore")
    if "\r\n" in head:
        can_edit = not (storage.is_url(path) or storage.compression(path))
        command = f"; to remove them: sed -i 's/\\r$//' {shlex.quote(path)}" if can_edit else ""
        say(f"{path} has Windows line ends, which are kept{command}")
    # the last line may be cut
    lines = head.splitlines()[: -1 if len(head) > HEAD // 4 else None][:20]
    for kind, records in (("jsonl", _json_records(lines)), ("csv", _table_rows(lines, path))):
        if records:
            what = (
                f"{path} is {kind} with the fields {', '.join(records[0])}, and its syntax is "
                "part of the text"
            )
            read = {
                name: str(x)
                for name, x in records[0].items()
                if isinstance(x, str) or chats.is_chat(x)
            }
            advice = ", and none of them has a text"
            if field := max(read, key=lambda name: len(read[name]), default=None):
                use = f"{kind}:{path} with config.data.field={field} or --field {field}"
                advice = (
                    f"; for the {'texts' if records[0][field] == read[field] else 'chats'} "
                    f"alone, use {use}"
                )
            say(f"WARNING: {what}{advice}")


def _json_records(lines: list[str]) -> list[dict]:
    try:
        records = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        return []
    return records if all(isinstance(record, dict) for record in records) else []


def _table_rows(lines: list[str], path: str) -> list[dict]:
    try:
        names, *rows = csv.reader(
            lines, delimiter="\t" if path.endswith(".tsv") else ",", strict=True
        )
    except (csv.Error, ValueError):
        return []
    named = len(names) > 1 and all(re.fullmatch(r"\w[\w .-]{0,39}", name) for name in names)
    is_table = named and len(rows) > 3 and {*map(len, rows)} == {len(names)}
    return [dict(zip(names, row, strict=True)) for row in rows] if is_table else []
