"""Units of a large corpus: parts of about equal size that processes read independently."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from lm.config import SPLITS
from lm.data import sources
from lm.data.text_files import BOM, find_text_files, list_files
from lm.errors import UserError
from lm.files import parse_json


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of the input: the lines that begin in bytes [start, end) of a file, or records [start, end).

    Attributes:
        kind: "text", "jsonl", "arrayrecord" or "tfds:SPLIT".
        path: the file, or the prepared TFDS directory.
        start: first byte or record.
        end: byte or record after the last.
        split: the split of all documents (tfds); "" if each document is assigned to a split.
    """

    kind: str
    path: str
    start: int
    end: int
    split: str = ""


def find_units(source: str, unit_bytes: int, say: Callable[[str], None] = print) -> tuple[list[Path], list[Unit]]:
    """Cut the input of `lm.data.prepare` into units, in the order of the files.

    Args:
        source: "text:PATH", "jsonl:PATH", "arrayrecord:PATH" or "tfds:DIR".
        unit_bytes: approximate size of a unit.
        say: receives lines of information and warnings.

    Returns:
        The files that are read, and the units.

    Raises:
        UserError: the kind is unknown, or there is nothing to read.
    """
    kind, _, argument = source.partition(":")
    path = Path(argument).expanduser()
    if kind == "tfds":
        prepared = sources.check_prepared(path)
        return [file for files, _ in prepared.values() for file in files], _tfds_units(path, prepared, unit_bytes)
    if kind not in ("text", "jsonl", "arrayrecord") or not argument:
        raise UserError(f"--input: {source!r} is not one of text:PATH, jsonl:PATH, arrayrecord:PATH, tfds:DIR")
    name = f"--input: {source!r}"
    if kind == "arrayrecord":
        files = list_files(path)
        if not files:
            raise UserError(f"{name} is not a file, nor a folder or a pattern with files")
    else:
        files = find_text_files(path, name, say, say if kind == "text" else lambda line: None)
    sizes = {file: file.stat().st_size for file in files}
    if kind == "arrayrecord":
        parts = {file: _cut_records(_count_records(file), sizes[file], unit_bytes) for file in files}
    else:
        starts = {file: range(0, sizes[file], unit_bytes) for file in files}
        parts = {file: [(start, min(start + unit_bytes, sizes[file])) for start in starts[file]] for file in files}
    return files, [Unit(kind, str(file), *part) for file in files for part in parts[file]]


def _tfds_units(directory: Path, prepared: dict, unit_bytes: int) -> list[Unit]:
    units = []
    for split, (shards, n_records) in prepared.items():
        size = sum(shard.stat().st_size for shard in shards)
        target = split if split in SPLITS else "train"
        parts = _cut_records(n_records, size, unit_bytes)
        units += [Unit(f"tfds:{split}", str(directory), *part, target) for part in parts]
    return units


def _cut_records(n_records: int, size: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Return [start, end) of parts of about unit_bytes, for n_records records of `size` bytes in total."""
    n_units = min(n_records, max(1, round(size / unit_bytes)))  # 0 if there are no records
    ends = [n_records * (i + 1) // n_units for i in range(n_units)]
    return list(zip([0, *ends], ends, strict=False))


def _count_records(file: Path) -> int:
    with closing(_open_records(file)) as reader:
        return reader.num_records()


def _open_records(file: Path | str):
    """Open an ArrayRecord file; raises UserError if it is not one."""
    from array_record.python.array_record_module import ArrayRecordReader  # comes with tensorflow-datasets, on Linux

    reader = ArrayRecordReader(str(file))
    if not reader.ok():
        raise UserError(f"{file} is not a complete ArrayRecord file; replace or remove it")
    return reader


def read_documents(unit: Unit, field: str) -> Iterator[str]:
    """Yield the documents of a unit; the lines of a text unit are one document.

    Args:
        unit: the unit.
        field: jsonl: the name of the field with the text.

    Raises:
        OSError, ValueError, UserError: the unit cannot be read.
    """
    if unit.kind.startswith("tfds:"):
        split = unit.kind.partition(":")[2]
        n_records = sources.check_prepared(Path(unit.path))[split][1]
        yield from sources.Records(Path(unit.path), split, n_records).between(unit.start, unit.end)
    elif unit.kind == "arrayrecord":
        with closing(_open_records(unit.path)) as reader:
            yield from (record.decode() for record in _read_records(reader, unit))
    elif unit.kind == "text":
        yield "".join(line.decode() for line in _read_lines(unit))
    else:
        yield from (_parse_line(line, field) for line in _read_lines(unit) if line.strip())


def _read_records(reader, unit: Unit) -> list[bytes]:
    try:
        return reader.read(unit.start, unit.end)
    except Exception as error:  # ArrayRecord raises many types
        raise UserError(f"{unit.path} is not a complete ArrayRecord file ({error}); replace or remove it") from None


def _parse_line(line: bytes, field: str) -> str:
    try:
        text = parse_json(line).get(field)
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"a line has {half!r}, half of a surrogate pair, which is not text: {line[:100]!r}") from None
    except ValueError as error:
        raise ValueError(f"a line is not a JSON object ({error}): {line[:100]!r}") from None
    if not isinstance(text, str):
        raise ValueError(f"a line has no text in the field {field!r} (set --field): {line[:100]!r}")
    return text


def _read_lines(unit: Unit) -> Iterator[bytes]:
    """Yield the lines that begin in [start, end), so that each line of a file is in exactly one of its units."""
    with open(unit.path, "rb") as file:
        file.seek(max(0, unit.start - 1))
        if unit.start:
            file.readline()  # skip the rest of the line that contains the byte before `start`
        while (start := file.tell()) < unit.end and (line := file.readline()):
            yield line if start else line.removeprefix(BOM)
