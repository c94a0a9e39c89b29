"""Parquet, Arrow, JSON Lines and data sets of Hugging Face: the same documents from each format and
each place.
"""

import argparse
import csv
import functools
import gzip
import http.server
import json
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm.config import DataConfig
from lm.data import check_corpus, open_corpus, sources, tokenizers
from lm.data.prepare import main as prepare
from lm.data.readers import find_spans, read_documents
from lm.generate import read_prompts
from lm.huggingface.config_files import find_file
from lm.system.errors import UserError
from lm.system.files import PointerError, read_bytes

DOCUMENTS = [
    f"Document {i} is about café {i * i};\nit has two lines{'.' * (i % 7)}" for i in range(60)
]


def table(documents=DOCUMENTS, name="text", kind=None):
    return pa.table(
        {"id": list(range(len(documents))), name: pa.array(documents, kind or pa.string())}
    )


def write(path, documents=DOCUMENTS, **options):
    """Write documents to a file in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".zst").removesuffix(".gz")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    if name.endswith(".parquet"):
        pq.write_table(table(documents, **options), path, row_group_size=7, compression="zstd")
    elif name.endswith(".arrow"):
        with pa.OSFile(str(path), "wb") as sink:
            opened = pa.ipc.new_file if options.get("file") else pa.ipc.new_stream
            with opened(sink, table(documents).schema) as writer:
                writer.write_table(table(documents), max_chunksize=7)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            rows = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
            rows.writerows([("id", "text"), *enumerate(documents)])
    elif path.suffix == ".gz":
        # as `cat a.gz b.gz` writes
        path.write_bytes(gzip.compress(lines[:500]) + gzip.compress(lines[500:]))
    elif path.suffix == ".zst":
        path.write_bytes(pa.compress(lines, "zstd", asbytes=True))
    else:
        path.write_bytes(lines)
    return path


def kind_of(name):
    return {"parquet": "parquet", "arrow": "arrow", "csv": "csv", "tsv": "csv"}.get(
        name.split(".")[1], "jsonl"
    )


def documents_of(source, unit_bytes=2**20, field="text"):
    return [
        text
        for unit in find_spans(source, unit_bytes, field)[1]
        for text in read_documents(unit, field)
    ]


def decoded(source, tmp_path, split="train", **options):
    config = DataConfig(
        source=source, tokenizer="byte", cache_dir=str(tmp_path / "cache"), **options
    )
    corpus = open_corpus(config, say=str)
    return corpus.tokenizer.decode(np.asarray(corpus.split(split).tokens))


FILES = [
    ("a.parquet", {}), ("a.parquet", {"kind": pa.large_string()}), ("a.parquet", {"name": "body"}),
    ("a.parquet", {"kind": pa.dictionary(pa.int32(), pa.string())}), ("a.arrow", {}), ("a.arrow", {"file": True}),
    ("a.jsonl", {}), ("a.jsonl.gz", {}), ("a.json.zst", {}), ("a.csv", {}), ("a.tsv", {}),
]  # fmt: skip


def test_each_format_has_the_same_documents_in_spans_of_any_size(tmp_path):
    for i, (name, options) in enumerate(FILES):
        path, field = write(tmp_path / str(i) / name, **options), options.get("name", "text")
        kind = kind_of(name)
        for source in (
            f"{kind}:{path}",
            f"{kind}:{path.parent}",
            f"{kind}:{path.parent}/*",
            f"hf:{path.parent}",
        ):
            for n_bytes in (1, 300, 2**40):
                assert documents_of(source, n_bytes, field) == DOCUMENTS, (source, n_bytes)
        if kind == "parquet":
            assert len(find_spans(f"parquet:{path}", 1, field)[1]) == 9  # one row group each
        text = decoded(f"{kind}:{path}", tmp_path, splits=(1.0, 0.0, 0.0), field=field)
        assert text == "\n".join(DOCUMENTS)


def test_splits_of_a_data_set_of_hugging_face_are_those_of_its_directory(tmp_path):
    """As `Dataset.save_to_disk`, `load_dataset` and `huggingface-cli download` lay files out."""
    parts = {"train": DOCUMENTS[:40], "validation": DOCUMENTS[40:50], "test": DOCUMENTS[50:]}
    layouts = {
        "saved": "{0}/data-00000-of-00001.arrow", "cached": "wikitext-{0}.arrow",
        "hub": "data/{0}-00000-of-00001-0f2d.parquet", "config": "en/{0}/0000.parquet", "lines": "{0}.jsonl.gz",
    }  # fmt: skip
    for layout, name in layouts.items():
        root = tmp_path / layout
        (root / "empty").mkdir(parents=True)
        (root / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
        (root / "README.md").write_text("# A data set")
        for split, documents in parts.items():
            # as `Dataset.map` leaves there
            write(root / split / "cache-18676890c6a9ddff.arrow", documents)
            write(
                root / name.format("val" if layout == "lines" and split == "validation" else split),
                documents,
            )
        for split, documents in parts.items():
            assert decoded(f"hf:{root}", tmp_path, split) == "\n".join(documents), layout
        out = tmp_path / "out" / layout
        assert (
            prepare([f"--input=hf:{root}", "--tokenizer=byte", f"--output={out}", "--workers=1"])
            == 0
        )
        for split, documents in parts.items():
            assert decoded(f"tokens:{out}", tmp_path, split) == "\n".join([*documents, ""]), layout
    # files that a pattern names
    assert documents_of(f"hf:{tmp_path}/*/train.jsonl.gz", 2**40) == parts["train"]


def test_a_data_set_without_a_validation_split_gets_one(tmp_path):
    write(tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    write(tmp_path / "set" / "data" / "test-00000-of-00001.parquet", ["A test."])
    source, out = f"hf:{tmp_path}/set", tmp_path / "out"
    assert len(decoded(source, tmp_path, "validation")) == pytest.approx(
        0.05 * len("\n".join(DOCUMENTS)), rel=0.1
    )
    assert (
        prepare([f"--input={source}", "--tokenizer=byte", f"--output={out}", "--validation=0.2"])
        == 0
    )
    held_out = decoded(f"tokens:{out}", tmp_path, "validation")
    assert 3 <= sum(text in held_out for text in DOCUMENTS) <= 25
    for opened in (source, f"tokens:{out}"):
        assert decoded(opened, tmp_path, "test").strip() == "A test."


def test_documents_are_left_out_by_length_and_as_copies(tmp_path):
    """The first copy stays, also if the copies are in other files and units; empty documents are
    none.
    """
    write(tmp_path / "a" / "1.parquet", [*DOCUMENTS[:30], None, "x", "", "y" * 500])
    write(tmp_path / "a" / "2.parquet", [*DOCUMENTS[20:], DOCUMENTS[0], "x"])
    out = tmp_path / "out"
    job = [
        "--tokenizer=byte",
        "--unit_mb=0.0003",
        f"--input=parquet:{tmp_path / 'a'}",
        "--validation=0",
    ]
    assert (
        prepare(
            [
                *job,
                f"--output={out}",
                "--min_chars=5",
                "--max_chars=400",
                "--deduplicate",
                "--workers=1",
            ]
        )
        == 0
    )
    assert decoded(f"tokens:{out}", tmp_path) == "\n".join([*DOCUMENTS, ""])
    units = json.loads((out / "manifest.json").read_text())["units"]
    assert {name: sum(unit[name] for unit in units) for name in ("length", "repeated")} == {
        "length": 3,
        "repeated": 11,
    }
    assert sum(shard["documents"] for unit in units for shard in unit["shards"]) == 60
    assert prepare([*job, f"--output={tmp_path / 'all'}", "--workers=2"]) == 0
    assert decoded(f"tokens:{tmp_path / 'all'}", tmp_path).count(DOCUMENTS[0]) == 2


def test_a_unit_that_is_larger_than_a_shard_becomes_several_shards(tmp_path, monkeypatch):
    """A compressed file is read in one go, in memory that does not grow with it."""
    write(tmp_path / "a.jsonl.zst")
    outputs = {name: tmp_path / name for name in ("one", "many")}
    for out in outputs.values():
        assert (
            prepare(
                [f"--input=jsonl:{tmp_path}/a.jsonl.zst", "--tokenizer=bpe:280", f"--output={out}"]
            )
            == 0
        )
        monkeypatch.setattr("lm.data.unit_shards.SHARD", 100)
        monkeypatch.setattr("lm.data.encoding.BATCH", 60)
    assert len(list(outputs["many"].glob("train_000000*.npy"))) > 5
    assert len(list(outputs["one"].glob("train_000000*.npy"))) == 1
    one, many = (
        open_corpus(
            DataConfig(source=f"tokens:{out}", tokenizer=f"hf:{out}/tokenizer.json"), say=str
        ).split("train")
        for out in outputs.values()
    )
    np.testing.assert_array_equal(np.asarray(one.tokens), np.asarray(many.tokens))
    assert one.n_bytes == many.n_bytes


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and parts of them, as object stores do."""

    def do_GET(self):
        path, span = self.translate_path(self.path), self.headers.get("Range")
        if not span or not path.endswith(".parquet"):
            return super().do_GET()
        with open(path, "rb") as file:
            content = file.read()
        first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header(
            "Content-Range", f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        )
        self.end_headers()
        self.wfile.write(content[first : last + 1])
        return None

    def end_headers(self):
        self.send_header("Accept-Ranges", "bytes" if self.path.endswith(".parquet") else "none")
        super().end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_urls_are_read_like_files(tmp_path, url):
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    names = ("a.parquet", "b.jsonl.gz", "c.jsonl", "d.arrow")
    memory = fsspec.filesystem("memory")
    for name in names:
        write(tmp_path / "web" / name)
        memory.pipe_file(f"/bucket/{name}", (tmp_path / "web" / name).read_bytes())
    (tmp_path / "web" / "e.txt").write_text("\n".join(DOCUMENTS))
    for name in names:
        kind = kind_of(name)
        for place in (
            f"memory://bucket/{name}",
            f"file://{tmp_path}/web/{name}",
            f"{url}/web/{name}",
        ):
            assert documents_of(f"{kind}:{place}") == DOCUMENTS, place
    assert (
        documents_of("jsonl:memory://bucket")
        == documents_of("jsonl:memory://bucket/*.jsonl*")
        == 2 * DOCUMENTS
    )
    assert documents_of(f"parquet:{url}/web/") == DOCUMENTS
    assert documents_of(f"text:{url}/web/e.txt") == ["\n".join(DOCUMENTS)]
    assert decoded(f"parquet:{url}/web/a.parquet", tmp_path, splits=(1.0, 0.0, 0.0)) == "\n".join(
        DOCUMENTS
    )
    out, file = tmp_path / "out", tmp_path / "web" / "b.jsonl.gz"
    assert (
        prepare(
            [
                f"--input=jsonl:{url}/web/b.jsonl.gz",
                "--tokenizer=byte",
                f"--output={out}",
                "--workers=1",
            ]
        )
        == 0
    )
    (record,) = json.loads((out / "manifest.json").read_text())["input"]
    assert (record["file"], record["size"]) == (f"{url}/web/b.jsonl.gz", file.stat().st_size)


def test_a_pattern_or_a_file_at_a_url_names_its_files_as_on_a_disk():
    """A folder must be complete and have one data set; the error for a missing part advises the
    pattern.
    """
    memory = pytest.importorskip("fsspec").filesystem("memory")
    content = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()
    for name in (
        "a/train-00000-of-00003.jsonl",
        "a/train-00002-of-00003.jsonl",
        "b/train-00000-of-00001.jsonl",
    ):
        memory.pipe_file(f"/parts/{name}", content)
    part = "memory://parts/a/train-00000-of-00003.jsonl"
    for place, times in ((part, 1), ("memory://parts/a/*", 2), ("memory://parts/*/*", 3)):
        for kind in ("hf", "jsonl"):
            assert documents_of(f"{kind}:{place}") == times * DOCUMENTS, place
    with pytest.raises(UserError, match="2 of the 3 files"):
        documents_of("jsonl:memory://parts/a")


def write_raw(path, content):
    path.write_bytes(content)


def damaged_row_group(path):
    write(path)
    content = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(4).column(1)
    start = group.dictionary_page_offset or group.data_page_offset
    content[start : start + group.total_compressed_size] = b"\xff" * group.total_compressed_size
    path.write_bytes(content)


TEXT = "\n".join(DOCUMENTS)
NOT_TEXT = [  # content, what is wrong with it, and the advice
    (gzip.compress(b"caf\xe9"), "not UTF-8 (byte 0xe9 at offset 3)", "iconv -f latin1"),
    (gzip.compress(TEXT.encode())[:-30], "damaged", "EOFError"),
    (bytes.fromhex("28b52ffd2400"), "damaged", ""),  # RFC 8878, section 3.1.1
    (
        b"PAR1" + bytes(20),
        "a.txt is a file of Parquet; use parquet:{0}/a.txt in place of text:{0}/a.txt",
    ),
    (b"ARROW1" + bytes(20), "use arrow:{0}/a.txt"),
    (b"\xff\xff\xff\xff" + bytes(20), "use arrow:{0}/a.txt"),  # Arrow's stream format
    (TEXT.encode("utf-16"), "UTF-16", "iconv -f UTF-16"),
    (TEXT.encode("utf-16-le"), "UTF-16", "iconv -f UTF-16LE"),
    (b"caf\xe9 au lait", "not UTF-8 (byte 0xe9 at offset 3)", "iconv -f latin1"),
    (b"x\n" * 2**16 + b"\xff", f"not UTF-8 (byte 0xff at offset {2**17})", "iconv -f latin1"),
    (b"", "is empty", ""),
]
# JSON that is not one object in each line, a field that is there twice, and other encodings
NOT_LINES = [
    (b'[{"text": "a"}, {"text": "b"}]', ("jq -c '.[]' {0}/a.json > {0}/a.lines.json",), ""),
    (b'[\n{"text": "a"}\n]', ("jq -c '.[]' {0}/a.json > {0}/a.lines.json",), ""),
    (b'{\n"text": "a"\n}', ("jq -c '.' {0}/a.json > {0}/a.lines.json",), ""),
    (gzip.compress(b"[\n]"), ("gzip -dc {0}/a.json.gz | jq -c '.[]' > {0}/a.lines.json",), ".gz"),
    (b'{"text": "a"}\n{"text": "b", "text": "c"}', ("line 2", "'text' twice"), ""),
    ('{"text": "a"}'.encode("utf-16"), ("iconv -f UTF-16 ",), ""),
    ('{"text": "a"}'.encode("utf-16-le"), ("iconv -f UTF-16LE",), ""),
    (b'{"text": "caf\xe9"}', ("byte 0xe9 at offset 13", "iconv -f latin1"), ""),
]
NOT_A_TABLE = [
    (b"id,text\n1,caf\xe9\n", ("byte 0xe9", "iconv -f latin1")),
    ("id,text\n1,a\n".encode("utf-16"), ("iconv -f UTF-16 ",)),
    (b"id;text\n1;a\n", ("separated by ';'",)),
    (b"id\ttext\n1\ta\n", ("separated by '\\t'", ".tsv")),
    (b"", ("contains no text",)),
]
BAD = [
    *(
        ("text:{0}/a.txt", lambda root, content=content: (root / "a.txt").write_bytes(content), ("{0}/a.txt", *said))
        for content, *said in NOT_TEXT
    ),
    ("parquet:{0}/a.parquet", lambda root: write(root / "a.parquet", name="body"), ("'text'", "id, body", "--field")),
    ("parquet:{0}", lambda root: [write(root / "a.parquet"), write(root / "b.parquet", name="body")], ("b.parquet",)),
    ("parquet:{0}", lambda root: write(root / "a.parquet", range(9), kind=pa.int64()), ("int64", "--field")),
    ("parquet:{0}", lambda root: damaged_row_group(root / "a.parquet"), ("a.parquet",)),
    ("parquet:{0}", lambda root: write(root / "a.parquet").write_bytes(b"PAR1 and more"), ("a.parquet",)),
    ("parquet:{0}", lambda root: None, ("not a file of parquet",)),
    ("arrow:{0}", lambda root: write(root / "a.arrow").write_bytes(b"\xff" * 99), ("a.arrow",)),
    ("arrow:{0}/a.arrow", lambda root: write(root / "a.arrow", file=True).write_bytes(b"ARROW1\0\0"), ("a.arrow",)),
    ("jsonl:{0}", lambda root: (root / "a.jsonl.gz").write_bytes(gzip.compress(b"{}" * 999)[:-9]), ("a.jsonl.gz",)),
    ("jsonl:{0}", lambda root: (root / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" * 9), ("a.jsonl.zst",)),
    ("jsonl:{0}", lambda root: (root / "a.jsonl").write_bytes(b'{"body": "a"}\n'), ("a.jsonl", "--field")),
    ("jsonl:{0}", lambda root: (root / "a.jsonl").write_bytes(rb'{"text": "\ud83d"}'), (r"\ud83d, half of a",)),
    ("jsonl:{0}", lambda root: (root / "a.jsonl").write_bytes(b'{"text": "\xed\xa0\xbd"}'), ("a.jsonl", "byte 0xed")),
    *(
        (f"jsonl:{{0}}/a.json{end}", lambda root, raw=raw, end=end: write_raw(root / f"a.json{end}", raw), said)
        for raw, said, end in NOT_LINES
    ),
    *(("csv:{0}/a.csv", lambda root, raw=raw: write_raw(root / "a.csv", raw), said) for raw, said in NOT_A_TABLE),
    ("jsonl:{0}", lambda root: [write(root / "a.jsonl"), write(root / "a.jsonl.gz")], ("a.jsonl.gz", "copies")),
    ("hf:{0}", lambda root: [write(root / "a.json.gz"), write(root / "a.json.zst")], ("a.json.zst", "copies")),
    ("text:{0}", lambda root: [write(root / "a.txt"), write(root / "a.txt.gz")], ("a.txt.gz", "copies")),
    ("parquet:{0}", lambda root: write(root / "a.parquet", []), ("contains no text",)),
    ("jsonl:{0}/a.parquet", lambda root: write(root / "a.parquet"), ("use parquet:{0}/a.parquet",)),
    ("csv:{0}/a.arrow", lambda root: write(root / "a.arrow", file=True), ("use arrow:{0}/a.arrow",)),
    ("hf:{0}", lambda root: [write(root / f"{i}/train.jsonl") for i in "ab"], ("several data sets", "hf:{0}/")),
    ("hf:{0}", lambda root: [write(root / f"two/{i}/train.jsonl") for i in "ab"], ("several", "hf:{0}/two/b")),
    ("hf:{0}", lambda root: [write(root / f"train/{i}/a.jsonl") for i in "ab"], ("several", "hf:{0}/train")),
    ("hf:{0}/./", lambda root: [write(root / f"{i}/train.jsonl") for i in "ab"], ("several data sets", "hf:{0}/")),
    ("hf:{0}", lambda root: [write(root / "a.jsonl"), write(root / "b.parquet")], ("several kinds", "parquet:{0}")),
    ("hf:{0}", lambda root: [write(root / "train.parquet"), write(root / "val.parquet", [])], ("validation",)),
    ("hf:{0}", lambda root: [write(root / "train.arrow"), write(root / "val.arrow", [])], ("validation",)),
    ("hf:{0}", lambda root: write(root / "test.parquet"), ("train", "split")),
    ("csv:{0}", lambda root: (root / "a.csv").write_bytes(b"id,body\n1,a\n"), ("a.csv", "no column 'text'", "body")),
    ("csv:{0}", lambda root: (root / "a.csv").write_bytes(b"id,text\n1,a\n2\n"), ("a.csv", "line 3")),
    ("jsonl:http://127.0.0.1:9/a.jsonl", lambda root: None, ("http://127.0.0.1:9/a.jsonl", "connect")),
    ("jsonl:memory://absent/a.jsonl", lambda root: None, ("not a file",)),
    ("jsonl:nowhere://a/b.jsonl", lambda root: None, ("nowhere://a/b.jsonl", "no driver")),
]  # fmt: skip


def error_of_training(source, tmp_path):
    try:
        corpus = open_corpus(
            DataConfig(source=source, tokenizer="byte", cache_dir=str(tmp_path / "c")), say=str
        )
    except UserError as error:
        return str(error)
    (problem,) = check_corpus(corpus, 8, 256)
    return problem


def test_bad_input_is_an_error_of_one_line_and_nothing_is_lost(tmp_path, capsys, monkeypatch):
    """In `lm.train` and in `lm.data.prepare`, whose options have other names."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for i, (source, make, parts) in enumerate(BAD):
        root = tmp_path / str(i)
        root.mkdir()
        make(root)
        given = source.format(root)
        assert (
            prepare(
                [f"--input={given}", "--tokenizer=byte", f"--output={root / 'out'}", "--workers=1"]
            )
            == 2
        ), given
        messages = {"--field": capsys.readouterr().err.strip()}
        shutil.rmtree(root / "out", ignore_errors=True)
        messages["--config.data.field"] = error_of_training(given, tmp_path)
        for option, message in messages.items():
            assert "\n" not in message, message
            assert "Traceback" not in message
            for part in parts:
                assert part.replace("--field", option).format(root) in message, (given, message)


def test_an_error_of_a_file_keeps_the_finished_units(tmp_path):
    write(tmp_path / "a" / "1.jsonl", DOCUMENTS * 20)
    (tmp_path / "a" / "2.jsonl").write_text("no JSON")
    job = [
        f"--input=jsonl:{tmp_path / 'a'}",
        "--tokenizer=byte",
        f"--output={tmp_path / 'out'}",
        "--workers=1",
    ]
    assert prepare([*job, "--unit_mb=0.004"]) == 2
    unit, *_ = json.loads((tmp_path / "out" / "manifest.json").read_text())["units"]
    assert (tmp_path / "out" / unit["shards"][0]["file"]).exists()


def test_a_corpus_that_is_too_large_to_tokenize_at_start_names_the_command(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet")
    monkeypatch.setattr(sources, "LIMIT", 1000)
    with pytest.raises(
        UserError, match=r"python -m lm\.data\.prepare --input parquet:\S+ --field text --tokenizer"
    ):
        decoded(f"parquet:{tmp_path}", tmp_path)


def test_a_missing_package_is_one_line_with_the_command(tmp_path, monkeypatch, capsys):
    write(tmp_path / "a.parquet")
    for module, source in (
        ("pyarrow.parquet", f"parquet:{tmp_path}"),
        ("fsspec", "jsonl:s3://bucket/a.jsonl"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        assert (
            prepare([f"--input={source}", "--tokenizer=byte", f"--output={tmp_path / 'out'}"]) == 2
        )
        message = capsys.readouterr().err.strip()
        assert "pip install -e '.[data]'" in message
        assert "\n" not in message


POINTERS = {
    "git lfs pull in its": b"version https://hawser.github.com/spec/v1\noid sha256:"
    b"4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n",
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:"
    + b"0" * 64
    + b"\nsize 12345\n",
    "git annex get": b"/annex/objects/SHA256E-s12345--" + b"0" * 64 + b".txt\n",
}


@pytest.mark.parametrize("advice", [*POINTERS, "is a link to a file that is not there"])
@pytest.mark.parametrize("source", [
    "text:{0}/a.txt", "text:{0}", "text:{0}/*.txt", "text:{0}/**/*.txt", "jsonl:{0}/a.jsonl", "jsonl:{0}",
    "csv:{0}/a.csv", "parquet:{0}/a.parquet", "arrow:{0}/a.arrow", "hf:{0}/a.parquet",
    "tokens:{0}/train.npy", "tokens:{0}/train.bin", "tokens:{0}",
])  # fmt: skip
def test_a_pointer_in_place_of_a_file_is_refused_by_every_reader(source, advice, tmp_path):
    for name in ("a.txt", "a.jsonl", "a.csv", "a.parquet", "a.arrow", "train.npy", "train.bin"):
        if advice in POINTERS:
            (tmp_path / name).write_bytes(POINTERS[advice])
        else:
            (tmp_path / name).symlink_to(".git/annex/objects/absent")
    (tmp_path / "b.txt").write_text(TEXT)
    with pytest.raises(UserError, match=advice) as error:
        open_corpus(DataConfig(source=source.format(tmp_path), tokenizer="byte"), say=str)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("advice", POINTERS)
def test_a_pointer_in_place_of_a_file_of_a_checkpoint_or_a_tokenizer_is_refused(advice, tmp_path):
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ):
        path = tmp_path / name
        path.write_bytes(POINTERS[advice])
        for read in (lambda: find_file(path.parent, path.name), lambda: read_bytes(path)):  # noqa: B023
            with pytest.raises(PointerError, match=advice):
                read()
    with pytest.raises(UserError, match=f"{tmp_path}/tokenizer.json is a pointer.*{advice}"):
        tokenizers.make(f"hf:{tmp_path}/tokenizer.json", ())
    with pytest.raises(UserError, match=advice):
        list(read_prompts(argparse.Namespace(prompt=[], prompt_file=str(tmp_path / "config.json"))))


# What a folder says of itself


def splits_of(root, kind="hf"):
    """Return the names of the files of each split, below the root, and the lines that were printed."""
    lines = []
    spans = find_spans(f"{kind}:{root}", 2**40, say=lines.append)[1]
    found = {}
    for span in spans:
        found.setdefault(span.split or "train", []).append(str(Path(span.path).relative_to(root)))
    return found, lines


def save(folder, n_files=1, n_listed=None, **state):
    """Write a data set as `Dataset.save_to_disk` does."""
    names = [f"data-{i:05d}-of-{n_files:05d}.arrow" for i in range(n_files)]
    for name in names:
        write(folder / name)
    listed = [{"filename": name} for name in names[:n_listed]]
    (folder / "state.json").write_text(
        json.dumps({"_data_files": listed, "_split": "train"} | state)
    )
    # of the data set before a selection of its rows
    info = {"splits": {"train": {"num_examples": 999_999}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return names


@pytest.mark.parametrize("kind", ["hf", "arrow"])
@pytest.mark.parametrize("below", ["", "train"])
def test_the_files_of_a_saved_data_set_are_those_that_its_state_lists(kind, below, tmp_path):
    """Saved with three files, then with one: the older ones are still there."""
    save(tmp_path / below, 3)
    (name,) = save(tmp_path / below, 1)
    found, lines = splits_of(tmp_path, kind)
    assert found == {"train": [str(Path(below, name))]}
    assert any(
        "state.json does not list" in line and "data-00000-of-00003.arrow" in line for line in lines
    )
    (tmp_path / below / name).unlink()
    with pytest.raises(UserError, match=f"state.json lists {name}, which is missing"):
        splits_of(tmp_path, kind)


def write_rows(root, *names, n=3):
    for name in names:
        write(root / name, DOCUMENTS[:n])


def data_set_dict(root, *splits):
    for split in splits:
        save(root / split)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": splits}))


def readme(root, configs, **rows):
    splits = [{"name": split, "num_examples": n} for split, n in rows.items()]
    header = {"license": "mit", "configs": configs, "dataset_info": {"splits": splits}}
    (root / "README.md").write_text(f"---\n{json.dumps(header)}\n---\n# A data set\n")


def cached(root, **rows):
    """Write a data set as the cache of `load_dataset` has it."""
    for split in rows:
        write_rows(root, f"web-{split}.arrow")
    info = {"splits": {split: {"name": split, "num_examples": n} for split, n in rows.items()}}
    (root / "dataset_info.json").write_text(json.dumps(info))


FOLDERS = {  # what is in the folder, and the files of the splits, or what is refused
    "a further split": (
        lambda root: data_set_dict(root, "train", "test", "unsupervised"),
        {"train": ["train/data-00000-of-00001.arrow"], "test": ["test/data-00000-of-00001.arrow"]},
    ),
    "a part of a split": (
        lambda root: data_set_dict(root, "train", "train_small"),
        {"train": ["train/data-00000-of-00001.arrow"]},
    ),
    "a single split of another name": (
        lambda root: data_set_dict(root, "unsupervised"),
        {"train": ["unsupervised/data-00000-of-00001.arrow"]},
    ),
    "a folder that is no split": (
        lambda root: [data_set_dict(root, "train"), save(root / "test")],
        {"train": ["train/data-00000-of-00001.arrow"]},
    ),
    "two splits for one": (
        lambda root: data_set_dict(root, "train_a", "train_b"),
        "several splits that may be train .train_a, train_b",
    ),
    "no split for train": (
        lambda root: data_set_dict(root, "a", "b"),
        "has the splits a, b, none of which is train",
    ),
    "a split that is missing": (
        lambda root: [data_set_dict(root, "train", "test"), shutil.rmtree(root / "test")],
        "lists the split test",
    ),
    "rows that indices select": (
        lambda root: save(root, _indices_data_files=[{"filename": "i.arrow"}]),
        "selection",
    ),
    "a damaged index": (
        lambda root: save(root, _data_files=[{"name": 1}]),
        r"state.json is corrupted: _data_files\[0",
    ),
    "statistics beside the data": (
        lambda root: [
            write_rows(root, "data/train-00000-of-00001.parquet"),
            write_rows(root, "stats.json"),
        ],
        {"train": ["data/train-00000-of-00001.parquet"]},
    ),
    "statistics beside data without splits": (
        lambda root: [write_rows(root, "0.parquet"), (root / "a.json").write_text('{"rows": 3}')],
        "such as parquet:",
    ),
    "a part that is missing": (
        lambda root: write_rows(
            root, "train-00000-of-00003.parquet", "train-00002-of-00003.parquet"
        ),
        "2 of the 3 files",
    ),
    "parts of two versions": (
        lambda root: write_rows(
            root, *(f"train-0000{i}-of-00002.jsonl" for i in (0, 1)), "train-00000-of-00001.jsonl"
        ),
        "parts of two versions",
    ),
    "a part twice": (
        lambda root: write_rows(root, "train-1-of-1-ab.parquet", "train-1-of-1-cd.parquet"),
        "same number",
    ),
    "parts from 1 on": (
        lambda root: write_rows(root, "train-1-of-2.jsonl", "train-2-of-2.jsonl"),
        {"train": ["train-1-of-2.jsonl", "train-2-of-2.jsonl"]},
    ),
    "a Delta table": (
        lambda root: [write_rows(root, "a.parquet"), write_rows(root, "_delta_log/0.json")],
        "is a table of Delta",
    ),
    "an Iceberg table": (
        lambda root: write_rows(root, "data/a.parquet", "metadata/v1.metadata.json"),
        "is a table of Iceberg",
    ),
    "a Hudi table": (
        lambda root: [write_rows(root, "a.parquet"), write_rows(root, ".hoodie/hoodie.jsonl")],
        "is a table of Hudi",
    ),
    "a job of Spark that did not end": (
        lambda root: write_rows(root, "train.parquet", "_temporary/0/train.parquet"),
        {"train": ["train.parquet"]},
    ),
    "another number of rows in README.md": (
        lambda root: [
            write_rows(root, "a.parquet"),
            readme(root, [{"data_files": "a.parquet"}], train=4),
        ],
        "README.md lists 4 rows of the split train.* have 3",
    ),
    "the header of README.md": (
        lambda root: [
            write_rows(root, "web/a.parquet", "old/a.parquet", "web/b.parquet"),
            readme(
                root,
                [
                    {
                        "config_name": "default",
                        "data_files": [
                            {"split": "train", "path": ["web/a*"]},
                            {"split": "test", "path": "web/b.parquet"},
                        ],
                    },
                    {"config_name": "old", "data_files": [{"split": "train", "path": "old/*"}]},
                ],
            ),
        ],
        {"train": ["web/a.parquet"], "test": ["web/b.parquet"]},
    ),
    "a pattern in the header of README.md": (
        lambda root: [
            write_rows(root, "a.parquet", "b.parquet"),
            readme(root, [{"data_files": "a.parquet"}]),
        ],
        {"train": ["a.parquet"]},
    ),
    "a map in the header of README.md": (
        lambda root: [
            write_rows(root, "a.parquet", "b.parquet", "c.parquet"),
            readme(root, [{"data_files": {"train": ["a.parquet"], "test": "b.parquet"}}]),
        ],
        {"train": ["a.parquet"], "test": ["b.parquet"]},
    ),
    "several configurations without a default": (
        lambda root: [
            write_rows(root, "en.parquet", "fr.parquet"),
            readme(
                root,
                [{"config_name": name, "data_files": f"{name}.parquet"} for name in ("en", "fr")],
            ),
        ],
        "several data sets .en, fr in README.md.; give the files of one, such as hf:.*en.parquet",
    ),
    "the only configuration that was downloaded": (
        lambda root: [
            write_rows(root, "en.parquet", "other.parquet"),
            readme(
                root,
                [{"config_name": name, "data_files": f"{name}.parquet"} for name in ("fr", "en")],
            ),
        ],
        {"train": ["en.parquet"]},
    ),
    "two words for validation": (
        lambda root: write_rows(root, "train.jsonl", "dev.jsonl", "valid.jsonl"),
        "may be validation .dev, valid",
    ),
    "suffixes in capitals": (
        lambda root: write_rows(root, "TRAIN.JSONL", "Valid.jsonl"),
        {"train": ["TRAIN.JSONL"], "validation": ["Valid.jsonl"]},
    ),
    "the cache of load_dataset": (
        lambda root: cached(root, train=3, test=3),
        {"train": ["web-train.arrow"], "test": ["web-test.arrow"]},
    ),
    "another number of rows": (
        lambda root: cached(root, train=4),
        "lists 4 rows of the split train.* have 3",
    ),
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_data_set_is_what_its_own_index_says(folder, tmp_path):
    make, expected = FOLDERS[folder]
    make(tmp_path)
    if isinstance(expected, dict):
        assert splits_of(tmp_path)[0] == expected
    else:
        with pytest.raises(UserError, match=expected) as error:
            splits_of(tmp_path)
        assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda root: data_set_dict(root, "train", "test"),
        lambda root: cached(root, train=3, test=3),
        lambda root: write_rows(root, "train.arrow", "test.arrow"),
    ],
)
def test_a_reader_that_joins_the_splits_of_a_data_set_says_so(make, tmp_path):
    make(tmp_path)
    found, lines = splits_of(tmp_path, "arrow")
    assert len(found["train"]) == 2
    (line,) = [line for line in lines if line.startswith("WARNING")]
    assert "splits test, train" in line
    assert f"hf:{tmp_path} keeps" in line


def test_a_reader_of_files_that_are_of_no_split_says_so(tmp_path):
    data_set_dict(tmp_path, "train", "test")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    _, lines = splits_of(tmp_path, "arrow")
    (line,) = [line for line in lines if line.startswith("WARNING")]
    assert "says that test/data-00000-of-00001.arrow is of no split" in line


def test_token_files_that_the_manifest_does_not_list_are_named_and_not_read(tmp_path):
    write(tmp_path / "a.jsonl")
    assert (
        prepare(
            [
                f"--input=jsonl:{tmp_path}/a.jsonl",
                "--tokenizer=byte",
                f"--output={tmp_path / 'out'}",
            ]
        )
        == 0
    )
    config, lines = DataConfig(source=f"tokens:{tmp_path / 'out'}", tokenizer="byte"), []
    n_tokens = open_corpus(config, say=str).split("train").n_tokens
    np.save(tmp_path / "out" / "train_more.npy", np.zeros(99, np.uint16))
    assert open_corpus(config, say=lines.append).split("train").n_tokens == n_tokens
    assert any("manifest.json does not list it: train_more.npy" in line for line in lines)
