"""Units of a large corpus: parts of about equal size that processes read independently."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.config import SPLITS
from lm.data import sources
from lm.data.text_files import BOM, find_text_files
from lm.errors import UserError
from lm.files import parse_json


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of the input: the lines that begin in bytes [start, end) of a file, or records [start, end).

    Attributes:
        kind: "text", "jsonl" or "tfds:SPLIT".
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
        source: "text:PATH", "jsonl:PATH" or "tfds:DIR".
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
    if kind not in ("text", "jsonl") or not argument:
        raise UserError(f"--input: {source!r} is not one of text:PATH, jsonl:PATH, tfds:DIR")
    files = find_text_files(path, f"--input: {source!r}", say, say if kind == "text" else lambda line: None)
    sizes = {file: file.stat().st_size for file in files}
    starts = [(file, start) for file in files for start in range(0, sizes[file], unit_bytes)]
    return files, [Unit(kind, str(file), start, min(start + unit_bytes, sizes[file])) for file, start in starts]


def _tfds_units(directory: Path, prepared: dict, unit_bytes: int) -> list[Unit]:
    """Cut the records of each split into parts of about unit_bytes."""
    units = []
    for split, (shards, n_records) in prepared.items():
        size = sum(shard.stat().st_size for shard in shards)
        n_units = min(n_records, max(1, round(size / unit_bytes)))  # 0 if there are no records
        ends = [n_records * (i + 1) // n_units for i in range(n_units)]
        target = split if split in SPLITS else "train"
        units += [Unit(f"tfds:{split}", str(directory), *part, target) for part in itertools.pairwise([0, *ends])]
    return units


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
    elif unit.kind == "text":
        yield "".join(line.decode() for line in _read_lines(unit))
    else:
        yield from (_parse_line(line, field) for line in _read_lines(unit) if line.strip())


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
