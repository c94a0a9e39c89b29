"""Files that somebody else may have made: damage is refused and never crashes, and small files do
not fill the memory.

The libraries that decode them are written in C++ and Rust, and some trust what a file says.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import multiprocessing
import random
import resource
import signal
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from lm.config import DataConfig
from lm.data import columns, open_corpus, sources, tokenizers
from lm.data.prepare import main as prepare
from lm.data.readers import find_spans, read_documents
from lm.data.shards import open_shard
from lm.huggingface.safetensors_files import TensorFiles
from lm.system.errors import UserError

DOCUMENTS = [
    f"Document {i} is about café {i * i};\nit has two lines{'.' * (i % 7)}" for i in range(60)
]


def table(column=None):
    return pa.table(
        {"id": list(range(len(column or DOCUMENTS))), "text": column or pa.array(DOCUMENTS)}
    )


def arrow(values, *, index=False, compression=None, rows=20):
    sink, options = io.BytesIO(), pa.ipc.IpcWriteOptions(compression=compression)
    opened = pa.ipc.new_file if index else pa.ipc.new_stream
    with opened(sink, values.schema, options=options) as writer:
        writer.write_table(values, max_chunksize=rows)
    return sink.getvalue()


def parquet(values, **options):
    sink = io.BytesIO()
    pq.write_table(values, sink, **{"row_group_size": 20} | options)
    return sink.getvalue()


def json_lines(values):
    return "".join(json.dumps(row) + "\n" for row in values.to_pylist()).encode()


def comma_separated(values):
    lines = io.StringIO(newline="")
    rows = csv.DictWriter(lines, values.column_names)
    rows.writeheader()
    rows.writerows(values.to_pylist())
    return lines.getvalue().encode()


FORMATS = {
    "a.parquet": parquet,
    "a.arrow": arrow,
    "b.arrow": lambda values: arrow(values, index=True),
    "a.jsonl": json_lines,
    "a.csv": comma_separated,
}


def texts_of(path):
    kind = {"arrow": "arrow", "parquet": "parquet", "csv": "csv"}.get(
        path.name.split(".")[1], "jsonl"
    )
    spans = find_spans(f"{kind}:{path}", 2**20, say=str)[1]
    return [text for span in spans for text in read_documents(span, "text")]


# ---- The same table ----


TEXTS = ["a", None, "", "b\r\nc", "\0", "a", "é\U0001f600"]
KINDS = (pa.string(), pa.large_string(), pa.string_view())
DICTIONARIES = (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string()))
COLUMNS = {str(kind): pa.array(TEXTS, kind) for kind in (*KINDS, *DICTIONARIES)}
OTHER_COLUMNS = [
    pa.array([1, 2]), pa.array([1, 2]).dictionary_encode(), pa.array([1.5]), pa.array([True]),
    pa.array([1], pa.date32()), pa.array([b"a"]), pa.array([b"a"], pa.large_binary()), pa.array([["a"]]),
    pa.array([{"text": "a"}]), pa.array([[("text", "a")]], pa.map_(pa.string(), pa.string())), pa.nulls(2),
    pa.RunEndEncodedArray.from_arrays([2], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_of_text_gives_the_same_texts_from_each_format(name, kind, tmp_path):
    for n in (len(TEXTS), 0):
        (tmp_path / name).write_bytes(FORMATS[name](pa.table({"text": COLUMNS[kind][:n]})))
        assert [text for text in texts_of(tmp_path / name) if text] == [
            text for text in TEXTS[:n] if text
        ]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_a_column_of_chats_gives_the_same_texts_from_each_format_that_has_it(kind, tmp_path):
    turn = pa.struct({"role": pa.string(), "content": pa.large_string()})
    values = pa.table({"text": pa.array([[{"role": "user", "content": "a"}], None], kind(turn))})
    for name in FORMATS.keys() - {"a.csv"}:
        (tmp_path / name).write_bytes(FORMATS[name](values))
        assert texts_of(tmp_path / name) == ["<|im_start|>user\na<|im_end|>\n", ""]


@pytest.mark.parametrize("column", OTHER_COLUMNS, ids=lambda column: str(column.type))
def test_another_column_is_refused_from_each_format_that_has_it(column, tmp_path):
    """CSV has only text; JSON has no bytes, no dates, and no type of null."""
    holding = 0
    for name in ("a.parquet", "a.arrow", "b.arrow", "a.jsonl"):
        if name == "a.jsonl" and (column.null_count or "run_end" in str(column.type)):
            continue
        try:
            (tmp_path / name).write_bytes(FORMATS[name](pa.table({"text": column})))
        except (TypeError, pa.ArrowNotImplementedError):
            continue
        holding += 1
        with pytest.raises(
            UserError, match=rf"{name}.*(has no text|neither a text).*--config\.data\.field"
        ) as error:
            texts_of(tmp_path / name)
        assert "'text'" in str(error.value)
    assert holding >= 2


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "b.arrow", "a.csv"])
def test_two_columns_of_the_same_name_are_refused(name, tmp_path):
    values = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    content = b"text,text\na,b\n" if name == "a.csv" else FORMATS[name](values)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: it has 2 columns 'text'"):
        texts_of(tmp_path / name)


# ---- Sizes ----


def test_many_rows_with_one_long_text_are_decoded_a_few_at_a_time(tmp_path):
    """500 bytes of Parquet hold 2 GiB of text."""
    column = pa.DictionaryArray.from_arrays(np.zeros(2000, np.int32), pa.array(["x" * 2**20]))
    path = tmp_path / "a.parquet"
    for encoding in ("RLE_DICTIONARY", "DELTA_BYTE_ARRAY"):
        options = (
            {"use_dictionary": False, "column_encoding": encoding} if "DELTA" in encoding else {}
        )
        values = pa.table({"text": column if not options else column[:100].cast(pa.string())})
        path.write_bytes(parquet(values, compression="zstd", row_group_size=2000, **options))
        assert path.stat().st_size < 1000
        (span,) = find_spans(f"parquet:{path}", 2**20, say=str)[1]
        before, pool = pa.total_allocated_bytes(), pa.default_memory_pool()
        for text, _ in zip(read_documents(span, "text"), range(70), strict=False):
            assert len(text) == 2**20
            assert pool.bytes_allocated() - before < 2**28


def varint(n, width):
    """Return an integer of Thrift's compact protocol, in `width` bytes or as few as it needs."""
    n *= 2  # zigzag
    digits = [n >> 7 * i & 127 for i in range(width or max(1, -(-n.bit_length() // 7)))]
    return bytes([digit | 128 for digit in digits[:-1]] + digits[-1:])


def test_a_parquet_file_that_understates_its_sizes_is_decoded_a_few_rows_at_a_time(tmp_path):
    column = pa.DictionaryArray.from_arrays(np.zeros(64, np.int32), pa.array(["x" * 2**26]))
    path = tmp_path / "a.parquet"
    options = {"compression": "zstd", "row_group_size": 64, "store_schema": False}  # as strings
    content = parquet(pa.table({"text": column}), **options)
    path.write_bytes(content)
    found = pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size
    size = varint(found, 0)
    path.write_bytes(content.replace(size, varint(1, len(size))))
    assert pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 1
    (span,) = find_spans(f"parquet:{path}", 2**20, say=str)[1]
    before, pool = pa.total_allocated_bytes(), pa.default_memory_pool()
    for text, _ in zip(read_documents(span, "text"), range(3), strict=False):
        assert len(text) == 2**26
        assert pool.bytes_allocated() - before < 2**30  # 64 rows have 2^32


LONG = "word " * 1000
PACKED = {
    "a.jsonl.gz": lambda: gzip.compress(json_lines(pa.table({"text": [LONG]}))),
    "b.jsonl.xz": lambda: lzma.compress(json_lines(pa.table({"text": [LONG]}))),
    "c.csv.bz2": lambda: bz2.compress(f"text\n{LONG}\n".encode()),
    "d.csv.gz": lambda: gzip.compress(('text\n"' + "word\n" * 1000 + '"\n').encode()),
    "e.jsonl.zst": lambda: pa.compress(b" " * 5000, "zstd", asbytes=True),
    "f.parquet": lambda: parquet(pa.table({"text": [LONG]})),
    "g.arrow": lambda: arrow(pa.table({"text": [LONG]}), compression="zstd"),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_document_that_is_too_long_after_decompression_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "DOCUMENT", 2000)
    path = tmp_path / name
    path.write_bytes(PACKED[name]())
    with pytest.raises(
        UserError, match=f"{name}.*(a document has more than|field larger than field limit)"
    ):
        texts_of(path)


@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_the_size_of_a_batch_of_arrow_is_known_before_it_is_decompressed(
    compression, index, kind, tmp_path, monkeypatch
):
    path = tmp_path / "a.arrow"
    path.write_bytes(
        arrow(table(pa.array(DOCUMENTS, kind)), index=index, compression=compression, rows=60)
    )
    n_bytes = sum(len(text.encode()) for text in DOCUMENTS)
    monkeypatch.setattr(columns, "DECODED", n_bytes + 8 * 60 + 4 * 61)  # with ids and offsets
    assert texts_of(path) == DOCUMENTS
    monkeypatch.setattr(columns, "DECODED", n_bytes - 1)
    if compression is None:  # it is not larger than its file
        assert texts_of(path) == DOCUMENTS
    else:
        with pytest.raises(
            UserError, match=r"a\.arrow: a batch has [\d,]+ bytes after decompression"
        ):
            texts_of(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.txt.gz"])
def test_a_corpus_that_decodes_to_too_much_text_names_the_command_that_streams_it(
    name, tmp_path, monkeypatch
):
    content = {
        "a.parquet": parquet(pa.table({"text": ["x" * 500] * 100})),
        "a.txt.gz": gzip.compress(b"word " * 10**4),
    }
    path = tmp_path / name
    path.write_bytes(
        content.get(name) or gzip.compress(json_lines(pa.table({"text": [LONG] * 10})))
    )
    monkeypatch.setattr(sources, "LIMIT_DECODED", 2**14)
    source = f"{ {'a.parquet': 'parquet', 'a.txt.gz': 'text'}.get(name, 'jsonl') }:{path}"
    config = DataConfig(source=source, tokenizer="byte", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=rf"of text.*python -m lm\.data\.prepare --input {source}"):
        open_corpus(config, say=str).split("train")
    assert (
        prepare(
            [f"--input={source}", "--tokenizer=byte", f"--output={tmp_path / 'out'}", "--workers=1"]
        )
        == 0
    )


# ---- Damage ----


def _llmc():
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 300
    return header.tobytes() + np.arange(300, dtype=np.uint16).tobytes()


def _npy():
    buffer = io.BytesIO()
    np.save(buffer, np.arange(300, dtype=np.uint16))
    return buffer.getvalue()


TENSORS = {"a": np.arange(6, dtype=np.float32), "b": np.zeros((2, 3), np.float16)}
VIEWS = pa.array(DOCUMENTS, pa.string_view())
FILES = {
    "a.arrow": lambda: arrow(table()),
    "zstd.arrow": lambda: arrow(table(), compression="zstd"),
    "dictionary.arrow": lambda: arrow(table(pa.array(DOCUMENTS).dictionary_encode()), index=True),
    "lz4.arrow": lambda: arrow(table(), index=True, compression="lz4"),
    "views.arrow": lambda: arrow(table(VIEWS)),
    "a.parquet": lambda: parquet(table()),
    "zstd.parquet": lambda: parquet(table(), compression="zstd"),
    "plain.parquet": lambda: parquet(table(), use_dictionary=False),
    "delta.parquet": lambda: parquet(
        table(), use_dictionary=False, column_encoding={"id": "PLAIN", "text": "DELTA_BYTE_ARRAY"}
    ),
    "a.jsonl": lambda: json_lines(table()),
    "a.jsonl.zst": lambda: pa.compress(json_lines(table()), "zstd", asbytes=True),
    "a.jsonl.gz": lambda: gzip.compress(json_lines(table())),
    "a.jsonl.xz": lambda: lzma.compress(json_lines(table())),
    "train.npy": _npy,
    "train.bin": _llmc,
    "model.safetensors": lambda: safetensors.numpy.save(TENSORS),
    "tokenizer.json": lambda: tokenizers.train_bpe(DOCUMENTS, 300).json.encode(),
}


def read(path):
    if path.suffix in (".npy", ".bin"):
        np.asarray(open_shard(path)).sum(dtype=np.int64)
    elif path.suffix == ".safetensors":
        with TensorFiles(path.parent) as files:
            for name in files.shapes:
                files.read(name)
    elif path.name == "tokenizer.json":
        for special_tokens in (False, True):
            tokenizer = tokenizers.make(f"hf:{path}", (), special_tokens=special_tokens)
            tokenizers.is_lossy(tokenizer)
            tokenizer.decode(tokenizer.encode("Document 3"))
    else:
        texts_of(path)


def mutated(content, random):
    """Return some bytes with changes: of single bytes and bits, of lengths to extremes, of parts
    left out or moved.
    """
    result, how = bytearray(content), random.randrange(6)
    extremes = [
        struct.pack("<q", number) for number in (-1, 0, 1, 2**31 - 1, 2**32, 2**40, 2**63 - 1)
    ]
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        i, j = random.randrange(len(content)), random.randrange(len(content))
        if how == 0:
            result[i : i + 1] = random.randbytes(1)
        elif how == 1:
            result[i : i + 1] = bytes([content[i] ^ 1 << random.randrange(8)])
        elif how in (2, 3):
            result[i : i + 4 * how - 4] = random.choice([*extremes, random.randbytes(8)])[
                : 4 * how - 4
            ]
        elif how == 4:
            del result[i : i + random.choice((1, 8, 64))]
        else:
            result[i : i + 16] = content[j : j + 16]
    return bytes(result)


def at_random(name, n):
    content = FILES[name]()
    return [mutated(content, random.Random(seed)) for seed in range(n)]


def read_mutations(path, content, mutations):
    """Read mutations in a process that has 2 GiB of memory, and 20 seconds for each."""
    path.write_bytes(content)
    read(path)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, used + 2**31))
    for i, mutation in enumerate(mutations):
        signal.alarm(20)
        path.write_bytes(mutation)
        path.with_name("number").write_text(str(i))
        try:
            read(path)
        except UserError as error:
            if "\n" in str(error):
                raise AssertionError(str(error)) from None


def check_mutations(name, tmp_path, mutations):
    process = multiprocessing.get_context("spawn").Process(
        target=read_mutations, args=(tmp_path / name, FILES[name](), mutations)
    )
    process.start()
    process.join()
    assert process.exitcode == 0, (
        f"signal or exit code {process.exitcode} of file {(tmp_path / 'number').read_text()}"
    )


def test_damaged_offsets_of_arrow_are_refused_and_never_followed(tmp_path):
    """They ended the process, or decoded other memory as text."""
    check_mutations("dictionary.arrow", tmp_path, at_random("dictionary.arrow", 120))


def test_a_damaged_description_of_a_column_of_parquet_is_refused(tmp_path):
    """Asked for, it ended the process."""
    content = FILES["a.parquet"]()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    places = range(footer, footer + 330)  # the first of three alike groups
    with_change = [content[:i] + bytes([content[i] ^ 32]) + content[i + 1 :] for i in places]
    check_mutations("a.parquet", tmp_path, with_change)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_no_damaged_file_ends_the_process_takes_its_memory_or_time_or_has_a_traceback(
    name, tmp_path
):
    check_mutations(name, tmp_path, at_random(name, 400))
