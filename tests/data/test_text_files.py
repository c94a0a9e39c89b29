"""Which files are read, and what is said of them; tests/data/test_readers.py has files that are not
text.
"""

import gzip
import json
import os
import subprocess
import sys

import pytest

from lm.config import DataConfig
from lm.data import open_corpus
from lm.data.prepare import main as prepare
from lm.system.errors import UserError

TEXT = "It was the best of times,\nit was the worst of times. " * 40


def open_text(path, tmp_path, **changes):
    """Return the text of all splits, and the lines that were printed."""
    lines, options = (
        [],
        {"splits": (1.0, 0.0, 0.0), "tokenizer": "byte", "cache_dir": str(tmp_path / "cache")},
    )
    corpus = open_corpus(DataConfig(source=f"text:{path}", **options | changes), say=lines.append)
    return corpus.tokenizer.decode(corpus.split("train").tokens), lines


def write(path, content=TEXT):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_folder_or_a_pattern_names_the_files_that_it_reads_and_skips_what_is_not_text(tmp_path):
    folder = tmp_path / "folder"
    for name in ("b/c.txt", "a.txt", "d.py", "b/deep/e.py", ".hidden", ".git/x.py"):
        write(folder / name, f"{name} ")
    write(folder / "latin.txt", b"caf\xe9")
    write(folder / "b" / "picture.gz", gzip.compress(b"caf\xe9"))
    text, lines = open_text(folder, tmp_path)
    assert text == "a.txt \nb/c.txt \nb/deep/e.py \nd.py "
    assert lines[0] == f"reading 4 files of {folder}: a.txt, b/c.txt, b/deep/e.py, d.py"
    assert lines[1].startswith(
        "skipping 2 of 6 files, which are empty or not UTF-8 text: b/picture.gz, latin.txt; "
    )
    assert open_text(f"{folder}/**/*.py", tmp_path)[0] == "b/deep/e.py \nd.py "
    for i in range(10):
        write(folder / f"z{i}.txt", "more ")
    assert open_text(folder, tmp_path)[1][0] == (
        f"reading 14 files of {folder}: a.txt, b/c.txt, b/deep/e.py, ..., z9.txt"
    )
    with pytest.raises(UserError, match="not a file, nor a folder or a pattern"):
        open_text(f"{folder}/*.md", tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_file_whose_name_is_not_utf8_is_read_and_shown_on_one_line(tmp_path):
    for name in (b"caf\xe9.txt", b"two\nlines.txt"):
        write(tmp_path / "folder" / os.fsdecode(name))
    text, lines = open_text(tmp_path / "folder", tmp_path)
    assert text == f"{TEXT}\n{TEXT}"
    assert (
        lines[0] == f"reading 2 files of {tmp_path / 'folder'}: caf\ufffd.txt, two\ufffdlines.txt"
    )


@pytest.mark.parametrize("name", ["a.txt", "two words", "it's.gz", "b.c/d.txt"])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_the_command_that_is_given_for_another_encoding_runs_as_it_is_and_its_file_is_read(
    name, encoding, in_folder, tmp_path
):
    folder, content = tmp_path / "folder", "caf\xe9 au lait\n".encode(encoding)
    path = write(folder / name, gzip.compress(content) if name.endswith(".gz") else content)
    if in_folder:
        write(folder / "other.txt", "other\n")
        said = open_text(folder, tmp_path)[1][1]
    else:
        with pytest.raises(UserError) as error:
            open_text(path, tmp_path)
        said = str(error.value)
    command = said.rpartition(": ")[2]
    assert "\n" not in command
    assert subprocess.run(command, shell=True, check=True, capture_output=True).stderr == b""
    assert "caf\xe9 au lait\n" in open_text(folder, tmp_path)[0]


@pytest.mark.parametrize(
    "text", ["a", "x" * (2**16 - 1) + "é"], ids=["one byte", "cut in the first bytes"]
)
def test_a_text_of_one_byte_or_with_a_character_at_the_border_of_the_first_bytes_is_text(
    text, tmp_path
):
    assert open_text(write(tmp_path / "a.txt", text), tmp_path)[0] == text


def test_a_byte_order_mark_is_not_text_and_windows_line_ends_are_said(tmp_path, capsys):
    path = write(tmp_path / "notepad.txt", b"\xef\xbb\xbf" + b"caf\xc3\xa9\r\n" * 9)
    text, lines = open_text(path, tmp_path)
    assert text == "café\r\n" * 9
    assert any("Windows line ends" in line and "sed -i" in line for line in lines)
    assert (
        prepare(
            [
                f"--input=text:{path}",
                "--tokenizer=byte",
                f"--output={tmp_path / 'out'}",
                "--workers=1",
            ]
        )
        == 0
    )
    assert "Windows line ends" in capsys.readouterr().out
    prepared = open_corpus(
        DataConfig(source=f"tokens:{tmp_path / 'out'}", tokenizer="byte"), say=str
    )
    assert prepared.tokenizer.decode(prepared.split("train").tokens) == text + "\n"


RECORDS = [{"id": i, "body": f"Text number {i}, and more of it."} for i in range(9)]


def test_records_and_tables_are_recognized_and_the_source_of_their_field_is_given(tmp_path):
    """The pieces of the corpus are the same; the warning is repeated in the summary."""
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    rows = "id,body\n" + "".join(f'{r["id"]},"{r["body"]}"\n' for r in RECORDS)
    for kind, name, content in (
        ("jsonl", "a.jsonl", lines), ("jsonl", "b.txt", lines), ("csv", "c.csv", rows),
        ("csv", "d.tsv", rows.replace(",", "\t")),
    ):  # fmt: skip
        path = write(tmp_path / name, content)
        corpus = open_corpus(DataConfig(source=f"text:{path}", tokenizer="byte"), say=str)
        (warning,) = corpus.notices
        assert warning.startswith(f"WARNING: {path} is")
        assert "fields id, body" in warning
        assert f"{kind}:{path} with config.data.field=body" in warning
    for content in (
        TEXT,
        "1, 2\n",
        "a, b\nc, d\ne\n" * 9,
        '{"a": 1}\nand a line\n',
        "[1]\n[2]\n",
        "\n" * 9,
    ):
        assert (
            open_corpus(
                DataConfig(source=f"text:{write(tmp_path / 'x', content)}"), say=str
            ).notices
            == ()
        )


def test_the_home_directory_is_expanded_wherever_a_path_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt")
    prepare(
        [
            "--input=text:~/a.txt",
            "--tokenizer=bpe:260",
            "--output=~/shards",
            "--workers=1",
            "--validation=0.5",
        ]
    )
    assert prepare(["--verify=~/shards"]) == 0
    options = {"tokenizer": "hf:~/shards/tokenizer.json", "cache_dir": "~/cache"}
    for source in ("tokens:~/shards", "text:~/a.txt", "text:~/*.txt"):
        assert open_corpus(DataConfig(source=source, **options), say=str).split("train").n_tokens
    assert not (tmp_path / "~").exists()
