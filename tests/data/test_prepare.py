"""Shards written in parallel, or resumed after a kill, hold the tokens of the whole text."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lm.config import DataConfig
from lm.data import cache, hf_tokenizer, open_corpus, shard_writer, tokenizers
from lm.data.prepare import main
from lm.data.shard_writer import split_documents
from lm.data.units import Unit, find_units, read_documents
from lm.errors import UserError
from lm.files import lock

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "tfds"
DOCUMENTS = [f"Document {i} has café and {i * i} words;\nAnd a second line {'x' * (i % 17)}." for i in range(300)]


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(DOCUMENTS)))
    return path


def corpus(output, tmp_path, tokenizer="byte"):
    config = DataConfig(source=f"tokens:{output}", tokenizer=tokenizer, cache_dir=str(tmp_path / "cache"))
    return open_corpus(config, say=lambda text: None)


def test_units_contain_each_line_exactly_once(dump):
    """A unit may end in a line, at its end, or inside a character of two bytes."""
    size = dump.stat().st_size
    for unit_bytes in (1, 7, 64, 100, 1000, size - 1, size, 2 * size):
        units = find_units(f"jsonl:{dump}", unit_bytes)
        assert [text for unit in units for text in read_documents(unit, "text")] == DOCUMENTS, unit_bytes
        whole = "".join(text for u in find_units(f"text:{dump}", unit_bytes) for text in read_documents(u, ""))
        assert whole == dump.read_text()


def arguments(dump, output, *more: str) -> list[str]:
    return [
        "--input", f"jsonl:{dump}", "--output", str(output), "--tokenizer", "byte", "--unit_mb", "0.004", "--workers",
        "1", "--validation", "0.1", *more,
    ]  # fmt: skip


def test_shards_hold_every_document_in_order(dump, tmp_path):
    assert main(arguments(dump, tmp_path / "out")) == 0
    found = corpus(tmp_path / "out", tmp_path)
    tokenizer = tokenizers.make("byte", ())
    texts = {name: tokenizer.decode(np.asarray(split.tokens)) for name, split in found.splits.items()}
    pieces = [text for name in texts for text in texts[name].split(".\n") if text]
    assert sorted(pieces) == sorted(text.removesuffix(".") for text in DOCUMENTS)
    assert [p for p in texts["train"].split(".\n") if p] == [t[:-1] for t in DOCUMENTS if t[:-1] in texts["train"]]
    assert 0.05 < found.splits["validation"].n_tokens / sum(s.n_tokens for s in found.splits.values()) < 0.15


@pytest.mark.parametrize("sizes", [(1,) * 300, (2,) * 150, (1, 2, 297), (300,)], ids=str)
def test_the_validation_fraction_holds_for_unevenly_sized_units(tmp_path, sizes):
    """Units of one document, of two, of very different sizes, or a single one: the same documents are held out."""
    folder, first = tmp_path / "dump", 0
    folder.mkdir()
    for i, size in enumerate(sizes):
        lines = [json.dumps({"text": text}) + "\n" for text in DOCUMENTS[first : first + size]]
        (folder / f"{i:03}.jsonl").write_text("".join(lines))
        first += size
    held_out = [
        text
        for unit in find_units(f"jsonl:{folder}", 2**20)
        for text in split_documents(unit, list(read_documents(unit, "text")), 0.1)["validation"]
    ]
    assert 20 <= len(held_out) <= 40
    whole = split_documents(Unit("jsonl", "", 0, 1), DOCUMENTS, 0.1)
    assert held_out == whole["validation"]


@pytest.mark.parametrize("n_lines", [1, 2, 50])
def test_the_validation_fraction_holds_for_small_text_files(n_lines):
    unit = Unit("text", "", 0, 1)
    texts = ["".join(f"{line} of file {i}\n" for line in range(n_lines)) for i in range(1000)]
    splits = [split_documents(unit, [text], 0.1) for text in texts]
    n_held_out = sum(len(split["validation"][0]) for split in splits)
    assert 0.07 < n_held_out / sum(map(len, texts)) < 0.13
    for text, split in zip(texts, splits, strict=True):
        assert split["train"][0] + split["validation"][0] == text
        assert split["train"][0][-1:] in ("", "\n")


def test_copies_of_a_document_are_in_the_same_split():
    splits = split_documents(Unit("jsonl", "", 0, 1), DOCUMENTS * 2, 0.1)
    assert splits["validation"]
    assert not set(splits["train"]) & set(splits["validation"])


def test_an_empty_validation_split_is_a_warning(tmp_path, capsys):
    (tmp_path / "dump.jsonl").write_text(json.dumps({"text": DOCUMENTS[0]}) + "\n")
    assert main(arguments(tmp_path / "dump.jsonl", tmp_path / "out", "--validation", "1e-9")) == 0
    assert "WARNING: the validation split is empty" in capsys.readouterr().out


def test_the_manifest_has_counts_and_reveals_missing_shards(dump, tmp_path):
    output = tmp_path / "out"
    assert main(arguments(dump, output)) == 0
    recorded = json.loads((output / "manifest.json").read_text())["shards"]
    assert len(recorded) > 10
    for shard in recorded:
        tokens = np.load(output / shard["file"])
        assert (shard["tokens"], shard["size"]) == (len(tokens), (output / shard["file"]).stat().st_size)
        assert shard["sha256"] == cache.digest_of(output / shard["file"], tmp_path)
    n_bytes = sum(len(text.encode()) + 1 for text in DOCUMENTS)
    assert sum(s["text_bytes"] for s in recorded) == n_bytes
    assert sum(split.n_bytes for split in corpus(output, tmp_path).splits.values()) == n_bytes
    lost = output / recorded[3]["file"]
    whole = lost.read_bytes()
    lost.write_bytes(whole + b"\0\0")
    with pytest.raises(UserError, match=r"has \d+ bytes, but manifest.json lists"):
        corpus(output, tmp_path)
    lost.unlink()
    with pytest.raises(UserError, match=r"is listed in manifest\.json but does not exist"):
        corpus(output, tmp_path)
    (output / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"lm\.data\.prepare did not finish; rerun its command to resume"):
        corpus(output, tmp_path)


def test_a_tokenizer_is_trained_and_kept(dump, tmp_path):
    output = tmp_path / "out"
    assert main(arguments(dump, output, "--tokenizer", "bpe:300")) == 0
    found = corpus(output, tmp_path, f"hf:{output / 'tokenizer.json'}")
    assert found.tokenizer.vocab_size == 300
    with pytest.raises(UserError, match="is not the tokenizer of the shards"):
        corpus(output, tmp_path, "byte")
    text = found.tokenizer.decode(np.asarray(found.splits["train"].tokens))
    assert text.count(hf_tokenizer.END_OF_TEXT) == sum(doc in text for doc in DOCUMENTS)


def test_a_tokenizer_with_truncation_loses_no_token(dump, tmp_path, capsys):
    bpe = json.loads(hf_tokenizer.train_bpe(DOCUMENTS, 280).json)
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    for name, spec in {"plain": bpe, "cut": bpe | {"truncation": cut}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(spec))
        assert main(arguments(dump, tmp_path / name, "--tokenizer", f"hf:{tmp_path / name}.json")) == 0
    assert capsys.readouterr().out.count("has truncation switched on; switched off here") == 1
    splits = [corpus(tmp_path / n, tmp_path, f"hf:{tmp_path / n / 'tokenizer.json'}").splits for n in ("plain", "cut")]
    for name in ("train", "validation"):
        np.testing.assert_array_equal(splits[0][name].tokens, splits[1][name].tokens)


def test_verify_finds_every_shard_that_is_not_as_it_was_written(dump, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(arguments(dump, output, "--tokenizer", "bpe:300")) == 0
    shards = sorted(output.glob("train_*.npy"))
    capsys.readouterr()
    assert main(["--verify", str(output)]) == 0
    assert "are as they were written" in capsys.readouterr().out
    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(content)
    shards[4].unlink()
    tokenizer = json.loads((output / "tokenizer.json").read_text())
    (output / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["--verify", str(output)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{shards[1]} has another sha256 than when it was written",
        f"{shards[4]} is missing",
        f"{output / 'tokenizer.json'} is not the tokenizer of the shards",
        "3 files differ from manifest.json; restore them or prepare them again",
    ]
    assert main(["--verify", str(tmp_path)]) == 2
    assert "has no manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", ["", "[]", "{}", '{"tokenizer": 1, "shards": []}', '{"tokenizer": null, "shards": [1]}']
)
def test_a_corrupted_manifest_is_an_error_of_one_line(dump, tmp_path, damage):
    output = tmp_path / "out"
    assert main(arguments(dump, output)) == 0
    whole = (output / "manifest.json").read_text()
    for text in (damage, whole[:-5], whole.replace('"size": ', '"size": "x'), whole.replace('"sha256"', '"sha"')):
        (output / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=r"manifest\.json is corrupted: .*; prepare the corpus again") as error:
            corpus(output, tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "1e-9", "1e300"])
def test_an_impossible_size_of_units_is_a_usage_error(dump, tmp_path, capsys, value):
    with pytest.raises(SystemExit, match="2"):
        main(arguments(dump, tmp_path / "out", "--unit_mb", value))
    assert "--unit_mb must be at least one byte" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["", "[1]", '{"shards": [{"file": 3}]}', "\0" * 100])
def test_a_corrupted_record_of_a_unit_is_written_again(dump, tmp_path, damage):
    assert main(arguments(dump, tmp_path / "out")) == 0
    manifest = (tmp_path / "out" / "manifest.json").read_text()
    (tmp_path / "out" / "units" / "000002.json").write_text(damage)
    assert main(arguments(dump, tmp_path / "out")) == 0
    assert (tmp_path / "out" / "manifest.json").read_text() == manifest
    assert main(["--verify", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("line", [b"", b"[1]", b"{", b'{"text": "\xff"}', b'{"text": 1}', b"[" * 10**5, b"9" * 5000])
def test_a_corrupted_line_is_an_error_of_one_line_that_names_the_file(dump, tmp_path, capsys, line):
    for at in (0, 250):
        lines = dump.read_bytes().splitlines()
        path = tmp_path / f"{at}.jsonl"
        path.write_bytes(b"\n".join([*lines[:at], line, *lines[at:]]) + b"\n")
        code = main(arguments(path, tmp_path / f"out{at}"))
        error = capsys.readouterr().err
        assert (code, error.count("\n")) == ((2, 1) if line else (0, 0))
        assert error.startswith(str(path) if line else "")
        assert len(error) < 600


@pytest.mark.parametrize("size", ["1" + "0" * 23, "9" * 5000, "256", "-1", "", "³²¹"])
def test_an_impossible_size_of_the_vocabulary_is_an_error(dump, tmp_path, capsys, size):
    assert main(arguments(dump, tmp_path / "out", "--tokenizer", f"bpe:{size}")) == 2
    error = capsys.readouterr().err
    assert "SIZE above 256 and below 10000000" in error
    assert len(error) < 400


@pytest.mark.slow
def test_a_rerun_after_a_kill_keeps_finished_units(dump, tmp_path):
    output, whole = tmp_path / "out", tmp_path / "whole"
    command = [sys.executable, "-m", "lm.data.prepare", *arguments(dump, output, "--workers", "2")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as process:
        while len(list(output.glob("units/*.json"))) < 4:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    records = [json.loads(path.read_text()) for path in output.glob("units/*.json")]
    recorded = [output / shard["file"] for record in records for shard in record["shards"]]
    done = {path: path.stat().st_mtime_ns for path in recorded}
    assert len(done) >= 4
    assert not (output / "manifest.json").exists()
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    assert main(arguments(dump, whole)) == 0
    for path in whole.glob("*.npy"):
        assert (output / path.name).read_bytes() == path.read_bytes()
    assert not list(output.glob("*.partial"))
    assert all(path.stat().st_mtime_ns == at for path, at in done.items())


@pytest.mark.skipif(not SHARED.is_dir(), reason="no prepared TFDS directory (../shared/data/tfds)")
def test_a_tfds_directory_becomes_shards_of_its_own_splits(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(SHARED))
    (directory,) = SHARED.glob("tiny_shakespeare/*")
    job = ["--input", f"tfds:{directory}", "--tokenizer", "byte", "--output", str(tmp_path / "out"), "--workers", "1"]
    assert main(job) == 0
    found = corpus(tmp_path / "out", tmp_path)
    direct = open_corpus(
        DataConfig(source=f"tfds:{directory.parent.name}", tokenizer="byte", cache_dir=str(tmp_path / "cache"))
    )
    assert found.splits.keys() == direct.splits.keys() == {"train", "validation", "test"}
    for name, split in direct.splits.items():
        ours = np.asarray(found.splits[name].tokens)
        assert len(ours) - len(split.tokens) in (0, 1)  # a newline after the last document
        np.testing.assert_array_equal(ours[: len(split.tokens)], np.asarray(split.tokens))


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_a_dataset_without_a_train_split_is_an_error_before_anything_is_written(tmp_path, monkeypatch, tokenizer):
    units = [Unit("tfds:test", "dataset", 0, 1, "test")]
    monkeypatch.setattr(shard_writer, "find_units", lambda *_: units)
    with pytest.raises(UserError, match="--input: 'tfds:dataset' has no train split"):
        shard_writer.write_shards(shard_writer.Options("tfds:dataset", tokenizer, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_array_records_are_documents(dump, tmp_path, capsys):
    module = pytest.importorskip("array_record.python.array_record_module", reason="ArrayRecord needs Linux")
    records = tmp_path / "records"
    records.mkdir()
    for i in range(3):  # the last is empty, as shards may be
        writer = module.ArrayRecordWriter(str(records / f"{i}.array_record"), "group_size:1")
        for text in DOCUMENTS[150 * i : 150 * (i + 1)]:
            writer.write(text.encode())
        writer.close()
    options = ("--unit_mb", "0.004", "--validation", "0")
    assert main(arguments(dump, tmp_path / "a", *options, "--input", f"arrayrecord:{records}")) == 0
    assert len(list((tmp_path / "a").glob("train_*.npy"))) > 2
    assert main(arguments(dump, tmp_path / "b", *options)) == 0
    found = [np.asarray(corpus(tmp_path / name, tmp_path).splits["train"].tokens) for name in ("a", "b")]
    np.testing.assert_array_equal(*found)
    (records / "0.array_record").write_bytes(b"no records")
    assert main(arguments(dump, tmp_path / "c", "--input", f"arrayrecord:{records}")) == 2
    assert "is not a complete ArrayRecord file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--input", "jsonl:/no/such/file"), "is not a file, nor a folder"),
        (("--input", "csv:x"), "is not one of text:PATH"),
        (("--tokenizer", "char"), "is not one of byte, hf:PATH, bpe:SIZE"),
        (("--field", "content"), "has no text in the field 'content' (set --field)"),
    ],
)
def test_wrong_arguments_are_errors(dump, tmp_path, capsys, more, message):
    assert main(arguments(dump, tmp_path / "out", *more)) == 2
    assert message in capsys.readouterr().err


def test_a_number_out_of_range_is_a_usage_error(dump, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments(dump, tmp_path / "out", "--validation", "1.5"))
    assert "--validation must be at least 0 and below 1" in capsys.readouterr().err


def test_an_output_of_another_input_is_refused(dump, tmp_path, capsys):
    assert main(arguments(dump, tmp_path / "out")) == 0
    assert main(arguments(dump, tmp_path / "out", "--validation", "0.2")) == 2
    assert "was written from other input" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    assert main(arguments(dump, tmp_path / "full")) == 2
    assert "contains other files" in capsys.readouterr().err


def test_a_corrected_command_can_use_the_same_directory(dump, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(arguments(dump, output, "--field", "body")) == 2
    assert "'body' (set --field)" in capsys.readouterr().err
    assert main(arguments(dump, output, "--tokenizer", "bqe:300")) == 2
    assert main(arguments(dump, output)) == 0


def test_a_directory_in_use_is_an_error_and_hidden_files_are_skipped(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("to be\n" * 200)
    (tmp_path / "texts" / ".hidden").write_bytes(b"\xff\xfe")
    output = tmp_path / "out"
    job = ["--input", f"text:{tmp_path / 'texts'}", "--tokenizer", "byte", "--output", str(output), "--workers", "1"]
    (output / "units").mkdir(parents=True)
    held = lock(output / "units")
    assert main(job) == 1  # worth a retry
    assert f"--output {output / 'units'} is in use by process" in capsys.readouterr().err
    held.lock.release()
    assert main(job) == 0


def test_a_lone_surrogate_names_the_file(tmp_path, capsys):
    path = tmp_path / "dump.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "half \\ud800"}\n')
    assert main(arguments(path, tmp_path / "out")) == 2
    assert str(path) in capsys.readouterr().err
