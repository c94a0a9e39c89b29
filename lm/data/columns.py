"""Columns of text and of chats in Parquet and Arrow files, which others may have made.

Small files may decode to huge ones, and PyArrow trusts the offsets and lengths of a file. So the
size of what is decoded is bounded before, and it is validated before a text is read.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from lm.data import storage

DOCUMENT = 2**27  # bytes or characters of a document, at most
DECODED = 2**31  # bytes of a batch in an Arrow file after decompression, at most
BATCH = 2**30  # bytes of a batch in a Parquet file after decoding, about, at most
MEASURED = 2**24  # bytes that reading the first row may take beside the text
ROWS = 64  # of a batch in a Parquet file, at most; more are not faster
TEXTS = r"(large_)?string|string_view"
MAGIC = b"ARROW1\0\0"
RECORD_BATCH, DICTIONARY_BATCH = 3, 2  # the kinds of Arrow's messages that have columns


def check_column(columns: Sequence[tuple[str, str]], field: str) -> None:
    """Raise ValueError unless exactly one of the columns has this name, and has text or chats."""
    kinds = [kind for name, kind in columns if name == field]
    if not kinds:
        names = ", ".join(name for name, _ in columns)
        raise ValueError(f"it has no column {field!r} (set --config.data.field); it has {names}")
    if len(kinds) > 1:
        raise ValueError(f"it has {len(kinds)} columns {field!r}; rename all but one")
    kind = kinds[0]
    is_chat = "list<" in kind and "struct<" in kind  # a list of structs, or a struct of lists
    if not is_chat and not re.fullmatch(f"{TEXTS}|dictionary<values=({TEXTS}),.*", kind):
        raise ValueError(f"its column {field!r} has no text but {kind} (set --config.data.field)")


def check_length(n: int) -> None:
    """Raise ValueError for a document that is longer than `DOCUMENT`."""
    if n > DOCUMENT:
        raise ValueError(f"a document has more than {DOCUMENT >> 20} MiB; cut it into several")


def count_rows(file: str) -> int:
    """Return the rows of a Parquet or Arrow file."""
    with storage.readable(file):
        if file.endswith(".parquet"):
            with _open_parquet(file) as parquet:
                return parquet.metadata.num_rows
        return sum(batch.num_rows for batch in _read_batches(file))


# ---- Parquet -------------------------------------------------------------------------------------


def sizes_of_groups(file: str, field: str) -> list[int]:
    """Return the bytes of each row group's column of text, dictionaries not decoded; 0: no rows."""
    with storage.readable(file), _open_parquet(file) as parquet:
        check_column([(column.name, str(column.type)) for column in parquet.schema_arrow], field)
        return [_size(parquet, i, field) for i in range(parquet.num_row_groups)]


def read_parquet(file: str, start: int, end: int, field: str) -> Iterator[str]:
    """Yield the values of the row groups [start, end)."""
    with _open_parquet(file) as parquet:
        for i in range(start, end):
            # No text is larger than its column, but each row may have it, from a dictionary.
            rows = min(max(BATCH // max(_size(parquet, i, field), 1), 1), ROWS)
            for batch in _batches(parquet, i, field, rows):
                batch.validate(full=True)
                yield from (value.as_py() for value in batch.column(0))  # one by one


def _open_parquet(file: str) -> Any:
    parquet = storage.optional("pyarrow.parquet", file)
    return parquet.ParquetFile(storage.open_file(file, decompress=False))


def _batches(parquet: Any, i: int, field: str, rows: int) -> Iterator[Any]:
    """Return the batches of a row group; only the column of text is read."""
    return parquet.iter_batches(rows, row_groups=[i], columns=[field], use_threads=False)


def _size(parquet: Any, i: int, field: str) -> int:
    """Return the bytes of a row group's column of text, dictionaries not decoded; 0: no rows.

    The first row is read before the file's own sizes are: a damaged description of a column is then
    an error, which would end the process otherwise, and what its dictionary decodes to is known,
    whatever the file says.
    """
    group = parquet.metadata.row_group(i)
    if not group.num_rows:
        return 0
    pool = storage.optional("pyarrow", "").default_memory_pool()
    before = pool.bytes_allocated()
    batches = _batches(parquet, i, field, rows=1)
    next(batches, None)
    measured = pool.bytes_allocated() - before
    paths = [parquet.schema.column(n).path for n in range(len(parquet.schema))]
    # of a chat: two
    columns = [n for n, path in enumerate(paths) if path == field or path.startswith(f"{field}.")]
    described = sum(group.column(n).total_uncompressed_size for n in columns)
    return described if measured < 2 * described + MEASURED else measured


# ---- Arrow ---------------------------------------------------------------------------------------


def read_arrow(file: str, field: str) -> Iterator[str]:
    """Yield the values of a file in Arrow's file format or stream format (as `datasets` writes)."""
    for batch in _read_batches(file, field):
        batch.validate(full=True)
        yield from (value.as_py() for value in batch.column(field))


def _read_batches(file: str, field: str | None = None) -> Iterator[Any]:
    """Yield the batches of a file, not validated; the column is checked before the first.

    The file format has the stream format inside, between a magic number and an index.
    """
    ipc = storage.optional("pyarrow.ipc", file)
    with storage.open_file(file) as opened:
        _check_decompressed(opened)
    with storage.open_file(file) as opened:
        n_listed = None
        if _has_index(opened):
            n_listed = ipc.open_file(opened).num_record_batches
            opened.seek(len(MAGIC))
        reader = ipc.open_stream(opened)
        if field is not None:
            check_column([(column.name, str(column.type)) for column in reader.schema], field)
        n_batches = 0
        for batch in reader:
            n_batches += 1
            yield batch
        if n_listed not in (None, n_batches):
            raise ValueError(f"it has {n_batches} batches, but its index lists {n_listed}")


def _has_index(opened: Any) -> bool:
    return opened.peek(len(MAGIC)).startswith(MAGIC[:6])


def _check_decompressed(stream: Any) -> None:
    """Raise ValueError if a message decompresses to more than `DECODED` bytes.

    A message is a length, a header and a body. Each compressed buffer of the body begins with its
    decompressed size. https://arrow.apache.org/docs/format/IPC.html
    """
    if _has_index(stream):
        stream.read(len(MAGIC))
    while (length := _read_int(stream)) > 0:  # 0 or no more bytes: the end
        n_bytes, buffers = _describe(stream.read(min(length, DOCUMENT)))
        if not buffers:
            left = n_bytes
            while left and (skipped := stream.read(min(2**20, left))):
                left -= len(skipped)
            continue
        if n_bytes <= DECODED:
            body = stream.read(n_bytes)
            # A file may be cut, and -1 stands for a buffer that is stored as it is.
            sizes = [_unpack("<q", body, place) for place in buffers if place + 8 <= len(body)]
            n_bytes = sum(size for size in sizes if size > 0)
        if n_bytes > DECODED:
            raise ValueError(
                f"a batch has {n_bytes:,} bytes after decompression; at most {DECODED:,} are read"
            )


def _read_int(stream: Any) -> int:
    """Return the length of the next header; before Arrow 0.15 it had no mark in front."""
    mark = stream.read(4)
    length = stream.read(4) if mark == b"\xff" * 4 else mark
    return int.from_bytes(length, "little", signed=True)


def _describe(header: bytes) -> tuple[int, list[int]]:
    """Return the bytes of a message's body and where its compressed buffers are, from its header.

    https://github.com/apache/arrow/blob/main/format/Message.fbs
    """
    try:
        message = _unpack("<I", header, 0)
        kind = _field("<B", header, message, 1)
        n_bytes = _field("<q", header, message, 3)
        if n_bytes < 0:
            raise ValueError("the body of a message has fewer than no bytes")
        if kind not in (RECORD_BATCH, DICTIONARY_BATCH):
            return n_bytes, []
        batch = _follow(header, message, 2)
        if kind == DICTIONARY_BATCH:
            batch = _follow(header, batch, 1)
        if not _place(header, batch, 3):  # it is not compressed
            return n_bytes, []
        vector = _follow(header, batch, 2)
        n_buffers = _unpack("<I", header, vector)
        buffers = [struct.unpack_from("<qq", header, vector + 4 + 16 * i) for i in range(n_buffers)]
        return n_bytes, [place for place, size in buffers if size]
    except struct.error:
        raise ValueError("the header of a message is damaged") from None


def _unpack(layout: str, data: bytes, place: int) -> int:
    return struct.unpack_from(layout, data, place)[0]


def _place(header: bytes, table: int, field: int) -> int:
    """Return the place of a field of a FlatBuffers table, 0 if it is absent."""
    offsets = table - _unpack("<i", header, table)
    entry = 4 + 2 * field
    if entry >= _unpack("<H", header, offsets):  # written by an older version of the format
        return 0
    offset = _unpack("<H", header, offsets + entry)
    return table + offset if offset else 0


def _field(layout: str, header: bytes, table: int, field: int) -> int:
    place = _place(header, table, field)
    return _unpack(layout, header, place) if place else 0


def _follow(header: bytes, table: int, field: int) -> int:
    """Return the place of what a field refers to."""
    place = _place(header, table, field)
    return place + _unpack("<I", header, place)
