"""Text files: which files a path names, which of them are text, and whether a text is a list of records or a table."""

import csv
import json
import os
import re
from collections.abc import Callable

from lm.data import storage
from lm.errors import UserError

MAX_LISTED_FILES = 4
HEAD = 2**16  # bytes of a file that are looked at before it is read
BOM = b"\xef\xbb\xbf"  # the byte order mark that some editors put before UTF-8
SIGNATURES = {
    b"PK\3\4": ("is a zip archive", "unzip {}"),
    b"%PDF": ("is a PDF", "pdftotext {}"),
    b"PAR1": ("is a Parquet file", "parquet:{} instead of text:{}"),
    b"ARROW1": ("is an Arrow file", "arrow:{} instead of text:{}"),
    b"\xff\xfe": ("is UTF-16", "iconv -f UTF-16 -t UTF-8 {} > {}.utf8"),
    b"\xfe\xff": ("is UTF-16", "iconv -f UTF-16 -t UTF-8 {} > {}.utf8"),
}


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
        say(f"skipping {skipped}: {shorten([*problems], path)}")
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
    """Return what a file is if it is empty or its beginning is not UTF-8 text, and what to do about it."""
    try:
        head = _read_head(path)
    except UserError as error:
        return f"is damaged ({str(error).removeprefix(f'{path}: ')})"
    for signature, (name, command) in SIGNATURES.items():
        if head.startswith(signature):
            return f"{name}; convert it and give the new file: {command.replace('{}', path)}"
    if len(head) > 1 and not any(head[1:100:2]) and all(head[:100:2]):
        return f"looks like UTF-16; convert it and give the new file: iconv -f UTF-16LE -t UTF-8 {path} > {path}.utf8"
    try:
        head.decode()
    except UnicodeDecodeError as e:
        if len(head) < HEAD or e.start < HEAD - 4:  # else a character is cut
            return not_utf8(e)
    return None if head else "is empty"


def not_utf8(e: UnicodeDecodeError) -> str:
    """Describe a text that is not UTF-8, and what to do about it."""
    return (
        f"is not UTF-8 (byte {e.object[e.start]:#04x} at offset {e.start}); convert it (iconv -f latin1 -t UTF-8 for "
        "example), or move it out of the folder"
    )


def _describe_syntax(path: str, say: Callable[[str], None]) -> None:
    """Say if a file has Windows line ends, or the syntax of records or of a table, and how to have the plain text."""
    head = _read_head(path).removeprefix(BOM).decode(errors="ignore")
    if "\r\n" in head:
        say(f"{path} has Windows line ends, which are kept; to remove them: sed -i 's/\\r$//' {path}")
    lines = head.splitlines()[: -1 if len(head) > HEAD // 4 else None][:20]  # the last line may be cut
    for kind, records in (("jsonl", _json_records(lines)), ("csv", _table_rows(lines, path))):
        if records:
            field = max(records[0], key=lambda name: len(str(records[0][name])), default="text")
            say(
                f"WARNING: {path} is {kind} with the fields {', '.join(records[0])}, and its syntax is part of the "
                f"text; for the texts alone, use {kind}:{path} with config.data.field={field} or --field {field}"
            )


def _json_records(lines: list[str]) -> list[dict]:
    try:
        records = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        return []
    return records if all(isinstance(record, dict) for record in records) else []


def _table_rows(lines: list[str], path: str) -> list[dict]:
    try:
        names, *rows = csv.reader(lines, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)
    except (csv.Error, ValueError):
        return []
    named = len(names) > 1 and all(re.fullmatch(r"\w[\w .-]{0,39}", name) for name in names)
    is_table = named and len(rows) > 3 and {*map(len, rows)} == {len(names)}
    return [dict(zip(names, row, strict=True)) for row in rows] if is_table else []
