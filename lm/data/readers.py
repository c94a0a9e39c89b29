"""Readers of documents: text, JSON Lines, CSV, Parquet, Arrow, Hugging Face and TFDS.

An input is cut into spans of its files, which processes read independently. `lm/data/sources.py`
trains on an input directly, and `lm/data/shard_writer.py` writes it as token shards.
"""

import csv
import dataclasses
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm.config import SPLITS
from lm.config.values import short
from lm.data import chats, columns, data_sets, storage, tfds_directory
from lm.data.text_files import BOM, choose_texts, copying, not_utf8, reader_of, wrong_format
from lm.system.errors import UserError
from lm.system.files import expanded, parse_json

FORMS = "text:PATH, jsonl:PATH, csv:PATH, parquet:PATH, arrow:PATH, hf:DIR, tfds:DIR"
SUFFIXES = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
CACHES = r"cache-\w+\.arrow"  # of its `map` and `filter`, beside the data: copies and indices
TO_THE_END = 2**62  # bytes or records
# bytes of a document of a text file that cannot be cut into spans: it is compressed or behind a URL
BLOCK = 2**26


@dataclasses.dataclass(frozen=True)
class Span:
    """A part of the input: lines that begin in bytes [start, end), row groups or records."""

    kind: str  # "text", "jsonl", "csv", "parquet", "arrow" or "tfds:SPLIT"
    path: str  # the file or URL, or the prepared TFDS directory
    start: int  # first byte, row group or record
    end: int  # the one after the last
    split: str = ""  # of all its documents; "" if each document is assigned to a split
    size: int = 0  # bytes that are read, about; 0 if unknown

    def __str__(self) -> str:
        return f"{self.path}, from {self.start:,}" if self.start else self.path


def find_spans(
    source: str, n_bytes: int, field: str = "text", say: Callable[[str], None] = print
) -> tuple[list[str], list[Span]]:
    """Return the files of an input that are read, and their spans, in the order of the files.

    Args:
        source: the kind and the path, as in `lm.data.prepare --input`.
        n_bytes: approximate size of a span, at most.
        field: the field or column with the text.
        say: receives lines of information and warnings.

    Raises:
        UserError: the kind is unknown, there is nothing to read, or a file has no such column.
    """
    kind, _, path = source.partition(":")
    path = expanded(path)
    if kind not in ("hf", *READERS) or not path:
        raise UserError(f'config.data.source: "{source}" is not one of {FORMS}')
    if kind == "hf" and not storage.is_url(path):
        path = str(Path(path))  # without "./", as the files below it are listed
    if kind == "tfds":
        prepared = tfds_directory.check_prepared(Path(path))
        files = [str(file) for shards, _ in prepared.values() for file in shards]
        return files, _with_held_out(_cut_tfds(path, prepared, n_bytes))
    listed = storage.list_files(path)
    if kind == "text" or (kind != "hf" and listed == [path]):
        kinds = dict.fromkeys(listed, kind)  # whatever its suffix
    else:
        kinds = {file: _kind_of(file) for file in listed}
    files = [file for file in listed if kinds[file] and kind in (kinds[file], "hf")]
    if not files:
        wanted = {"text": "file", "hf": "file of Parquet, Arrow or JSON Lines"}
        raise UserError(
            f'config.data.source: "{source}" is not a {wanted.get(kind, f"file of {kind}")}, nor a '
            "folder or a pattern with such files"
        )
    if kind != "text":
        files = data_sets.choose_files(path, listed, files, say)
    data_sets.refuse_copies(files)
    if kind == "text":
        files = choose_texts(files, path, say)
    if kind == "hf":
        splits = data_sets.find_splits(path, listed, files, kinds, say)
    else:
        splits = dict.fromkeys(files, "")
        if kind != "text":
            data_sets.warn_of_splits(path, listed, files, kind, say)
    spans: list[Span] = []
    for file, split in splits.items():
        spans += _cut(kinds[file], file, split, n_bytes, field)
    if empty := {*splits.values()} - {span.split for span in spans} - {""}:
        raise UserError(f"config.data.source: the {min(empty)} split of {path} has no documents")
    return list(splits), _with_held_out(spans)


def _with_held_out(spans: list[Span]) -> list[Span]:
    """Return the spans; without a validation split, documents of train are assigned to both."""
    if any(span.split == "validation" for span in spans):
        return spans
    assigned = {"train": ""}
    return [dataclasses.replace(span, split=assigned.get(span.split, span.split)) for span in spans]


def _kind_of(file: str) -> str:
    """Return the kind of a file by its name, "" if it is not one of `SUFFIXES` or no data."""
    name = storage.without_compression(file.rpartition("/")[2].lower())
    if name in data_sets.METADATA or re.fullmatch(CACHES, name):
        return ""
    return SUFFIXES.get(os.path.splitext(name)[1], "")


# ---- Spans ---------------------------------------------------------------------------------------


def _cut(kind: str, file: str, split: str, n_bytes: int, field: str) -> Iterator[Span]:
    """Cut a file into spans; compressed files, URLs, CSV and Arrow are one span each."""
    if kind == "parquet":
        yield from _cut_parquet(file, split, n_bytes, field)
        return
    if storage.is_url(file):
        yield Span(kind, file, 0, TO_THE_END, split)
        return
    size = os.path.getsize(file)
    if size and (kind in ("arrow", "csv") or storage.compression(file)):
        yield Span(kind, file, 0, TO_THE_END, split, size)
        return
    for start in range(0, size, n_bytes):
        end = min(start + n_bytes, size)
        yield Span(kind, file, start, end, split, end - start)


def _cut_parquet(file: str, split: str, n_bytes: int, field: str) -> Iterator[Span]:
    """Group the row groups of a Parquet file by the size of the column that is read."""
    sizes = columns.sizes_of_groups(file, field)
    start = size = 0
    for end, bytes_of_group in enumerate(sizes, 1):
        size += bytes_of_group
        if size and (size >= n_bytes or end == len(sizes)):
            yield Span("parquet", file, start, end, split, size)
            start = end
            size = 0


def _cut_tfds(directory: str, prepared: dict, n_bytes: int) -> list[Span]:
    """Cut the records of each split into parts of about n_bytes."""
    spans = []
    for split, (shards, n_records) in prepared.items():
        size = sum(shard.stat().st_size for shard in shards)
        target = split if split in SPLITS else "train"  # such as "unsupervised"
        n = min(n_records, max(1, round(size / n_bytes)))  # 0 if there are no records
        for i in range(n):
            start = n_records * i // n
            end = n_records * (i + 1) // n
            spans.append(Span(f"tfds:{split}", directory, start, end, target, size // n))
    return spans


# ---- Documents -----------------------------------------------------------------------------------


def read_documents(span: Span, field: str) -> Iterator[str]:
    """Yield the documents of a span, which may be empty; the lines of a text are one document.

    Raises UserError if the span cannot be read, and OSError if it cannot be read at the moment.
    """
    with storage.readable(str(span)):
        yield from READERS[span.kind.partition(":")[0]](span, field)


def _read_tfds(span: Span, field: str) -> Iterator[str]:
    split = span.kind.partition(":")[2]
    return tfds_directory.read_records(Path(span.path), split, span.start, span.end)


def _read_text(span: Span, field: str) -> Iterator[str]:
    # A block of a text is a document, so only texts of an unknown size are cut into several.
    for position, block in _read_lines(span, BLOCK if span.end == TO_THE_END else span.end):
        try:
            yield block.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{span.path} {not_utf8(span.path, error, position)}") from None


def _read_jsonl(span: Span, field: str) -> Iterator[str]:
    name = json.dumps(field, ensure_ascii=False).encode()
    for number, (position, line) in enumerate(_read_lines(span, 1), 1):
        if not line.strip():
            continue
        if position == 0:
            _refuse_binary(line, span.path)
        where = f"line {number:,}"
        if span.start:
            where += f" from byte {span.start:,} on"
        try:
            record = parse_json(line)
        except UnicodeDecodeError as error:
            raise ValueError(f"it {not_utf8(span.path, error, position)}") from None
        except ValueError as error:
            if position == 0:
                _refuse_plain_json(line, span.path)
            raise ValueError(
                f"{where} cannot be read as a JSON object: {error}: {line[:100]!r}"
            ) from None
        if line.count(name) > 1:
            _refuse_second(line, field, where)
        if field not in record:
            names = ", ".join(map(short, record))
            raise ValueError(
                f"{where} has no field {field!r} (set --config.data.field); it has {names}"
            )
        yield _document(record[field], field, where)


def _document(value: Any, field: str, where: str) -> str:
    """Return the document in a field: a text, a chat, or "" for null; else raise ValueError."""
    try:
        if value is None or isinstance(value, str):
            columns.check_length(len(value or ""))
            return value or ""
        return chats.parse(value)
    except ValueError as error:
        raise ValueError(f"{where}, field {field!r}: {error}") from None


def _refuse_second(line: bytes, field: str, where: str) -> None:
    """Raise ValueError if an object has a field twice: Python would silently keep the last one."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        if [name for name, _ in pairs].count(field) > 1:
            raise ValueError(f"{where} has the field {field!r} twice; remove or rename all but one")

    json.loads(line, object_pairs_hook=check)


def _refuse_binary(head: bytes, path: str) -> None:
    if kind := reader_of(head):
        raise ValueError(f"it is a file of {kind.capitalize()}; use {kind}:{path}")
    if problem := wrong_format(head, path):
        raise ValueError(f"it {problem}")


def _refuse_plain_json(line: bytes, path: str) -> None:
    """Raise ValueError if the first line begins a JSON list, or an object of several lines."""
    line = line.strip()
    if line.startswith(b"["):
        expression = ".[]"
    elif line == b"{":
        expression = "."
    else:
        return
    command = copying(f"jq -c '{expression}'", path, "lines")
    raise ValueError(
        f"it is JSON, but has not one object in each line; use this copy in place of it: {command}"
    )


def _read_csv(span: Span, field: str) -> Iterator[str]:
    csv.field_size_limit(columns.DOCUMENT)
    separator = "\t" if ".tsv" in span.path.rpartition("/")[2].lower() else ","
    file: Any
    with (
        storage.open_file(span.path) as file,
        io.TextIOWrapper(file, "utf-8-sig", newline="") as lines,
    ):
        _refuse_binary(file.peek(8), span.path)
        rows = csv.DictReader(_bounded_lines(lines), delimiter=separator, strict=True)
        try:
            names = list(rows.fieldnames or ())
            # One field with another separator in its name is a table that was not separated.
            other = re.search(r"[;\t|,]", names[0].replace(field, "")) if len(names) == 1 else None
            if other:
                raise ValueError(
                    f"its fields are separated by {other[0]!r} where {separator!r} is read; write "
                    "a copy with commas, or with tabs and the suffix .tsv"
                )
            columns.check_column([(name, "string") for name in names], field)
            for row in rows:
                if None in row or None in row.values():
                    raise ValueError(
                        f"line {rows.line_num} has not as many fields as the first line"
                    )
                yield row[field]
        except UnicodeDecodeError as error:
            raise ValueError(f"it {not_utf8(span.path, error, None)}") from None


def _bounded_lines(file: Any) -> Iterator[Any]:
    while line := file.readline(columns.DOCUMENT + 1):
        columns.check_length(len(line))
        yield line


def _read_lines(span: Span, n_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in [start, end), in blocks of n_bytes or more, with positions.

    Each line of a file is in exactly one span.
    """
    with storage.open_file(span.path) as file:
        position = 0
        if span.start:
            file.seek(span.start - 1)
            position = span.start - 1
            while line := file.readline(BLOCK):  # the line that contains the byte before `start`
                position += len(line)
                if line.endswith(b"\n"):
                    break
        # A line of a text in UTF-8 has no limit where the size of its file has none, either.
        is_limited = span.kind != "text" or span.end == TO_THE_END
        while position < span.end and (block := file.read(min(n_bytes, span.end - position))):
            if not block.endswith(b"\n"):
                rest = file.readline(columns.DOCUMENT + 1 if is_limited else -1)
                if is_limited:
                    columns.check_length(len(rest))
                block += rest
            yield position, block if position else block.removeprefix(BOM)
            position += len(block)


def _read_rows(span: Span, field: str) -> Iterator[str]:
    """Yield the documents of the rows of a Parquet or Arrow file."""
    if span.kind == "parquet":
        values = columns.read_parquet(span.path, span.start, span.end, field)
    else:
        values = columns.read_arrow(span.path, field)
    for row, value in enumerate(values, 1):
        where = f"row {row:,}" + " of these row groups" * bool(span.start)
        yield _document(value, field, where)


READERS = {
    "tfds": _read_tfds,
    "text": _read_text,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_rows,
    "arrow": _read_rows,
}
