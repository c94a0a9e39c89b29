"""Shards written in parallel, or resumed after a kill, hold the tokens of the whole text."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from running import ROOT, flip_a_bit, small_disk
from tokenizers import Tokenizer, models, normalizers

from lm.config import DataConfig
from lm.data import cache, hf_tokenizer, open_corpus, tokenizers
from lm.data.prepare import main
from lm.data.readers import Span, find_spans, read_documents
from lm.data.unit_shards import assign
from lm.system.errors import UserError
from lm.system.locks import lock

DOCUMENTS = [
    f"Document {i} has café and {i * i} words;\nAnd a second line {'x' * (i % 17)}."
    for i in range(300)
]


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / "dump.jsonl"
    lines = [
        json.dumps({"text": text, "id": i}, ensure_ascii=False) for i, text in enumerate(DOCUMENTS)
    ]
    path.write_text("\n".join([*lines, ""]))
    return path


def corpus(output, tmp_path, tokenizer="byte"):
    config = DataConfig(
        source=f"tokens:{output}", tokenizer=tokenizer, cache_dir=str(tmp_path / "cache")
    )
    return open_corpus(config, say=lambda text: None)


def arguments(dump, output, *more: str) -> list[str]:
    """Return the arguments of a small job; `more` has other values of its options, or other
    options.
    """
    job = {"--input": f"jsonl:{dump}", "--output": str(output), "--tokenizer": "byte", "--unit_mb": "0.004",
           "--workers": "1", "--validation": "0.1"}  # fmt: skip
    kept = [(name, value) for name, value in job.items() if name not in more]
    return [*itertools.chain.from_iterable(kept), *more]


@pytest.fixture
def prepared(dump, tmp_path):
    assert main(arguments(dump, tmp_path / "out", "--tokenizer", "bpe:300")) == 0
    return tmp_path / "out"


def records_of(output):
    units = json.loads((output / "manifest.json").read_text())["units"]
    return [shard for unit in units if unit for shard in unit["shards"]]


def split_documents(unit, texts, validation):
    splits = {"train": [], "validation": []}
    for text in texts:
        for split, part in assign(unit, text, validation).items():
            splits[split].append(part)
    return splits


def test_units_contain_each_line_exactly_once(dump):
    """A unit may end in a line, at its end, or inside a character of two bytes."""
    size = dump.stat().st_size
    for unit_bytes in (7, 100, 1000, size - 1, size, 2 * size):
        files, units = find_spans(f"jsonl:{dump}", unit_bytes)
        assert files == [str(dump)]
        assert [text for unit in units for text in read_documents(unit, "text")] == DOCUMENTS, (
            unit_bytes
        )
        whole = "".join(
            text
            for u in find_spans(f"text:{dump}", unit_bytes)[1]
            for text in read_documents(u, "")
        )
        assert whole == dump.read_text()


def test_the_validation_fraction_holds_for_unevenly_sized_files(tmp_path):
    """Files of one document, of very different sizes, or a single one: the same documents are held
    out.
    """
    whole = split_documents(Span("jsonl", "", 0, 1), DOCUMENTS, 0.1)["validation"]
    assert 20 <= len(whole) <= 40
    for sizes in ((1,) * 300, (1, 2, 297)):
        folder, texts = tmp_path / f"dump{len(sizes)}", iter(DOCUMENTS)
        folder.mkdir()
        for i, size in enumerate(sizes):
            lines = [json.dumps({"text": text}) + "\n" for text in itertools.islice(texts, size)]
            (folder / f"{i:03}.jsonl").write_text("".join(lines))
        spans = find_spans(f"jsonl:{folder}", 2**20)[1]
        splits = [split_documents(span, read_documents(span, "text"), 0.1) for span in spans]
        assert [text for split in splits for text in split["validation"]] == whole
    copies = split_documents(Span("jsonl", "", 0, 1), DOCUMENTS * 2, 0.1)
    assert not set(copies["train"]) & set(copies["validation"])
    for n_lines in (1, 2, 50):  # a text is cut after a line
        texts = ["".join(f"{line} of file {i}\n" for line in range(n_lines)) for i in range(1000)]
        parts = [[assign(Span("text", "", 0, 1), text, 0.1).get(split, "") for text in texts]
                 for split in ("train", "validation")]  # fmt: skip
        assert 0.07 < len("".join(parts[1])) / len("".join(texts)) < 0.13
        assert all(
            train + held_out == text for text, train, held_out in zip(texts, *parts, strict=True)
        )
        assert {train[-1:] for train in parts[0]} <= {"", "\n"}


def test_many_small_files_become_few_shards_of_the_same_documents(tmp_path):
    """In the order of the files; each file stays a document of its own, also where a unit ends
    between two files.
    """
    texts = [f"File {i}\nof {'many ' * (i % 5)}words.\n" for i in range(200)]
    (tmp_path / "files").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "files" / f"{i:03}.txt").write_text(text)
    for unit_mb, n_shards in ((64, 1), (0.002, 3)):
        out = tmp_path / str(unit_mb)
        job = [
            f"--input=text:{tmp_path / 'files'}",
            "--tokenizer=bpe:300",
            f"--output={out}",
            "--workers=1",
        ]
        assert main([*job, f"--unit_mb={unit_mb}", "--validation=0"]) == 0
        assert len(list(out.glob("*.npy"))) == n_shards
        found = corpus(out, tmp_path, f"hf:{out / 'tokenizer.json'}")
        whole = found.tokenizer.decode(np.asarray(found.splits["train"].tokens))
        assert whole == "".join(text + hf_tokenizer.END_OF_TEXT for text in texts)
        assert sum(shard["documents"] for shard in records_of(out)) == 200


def test_a_newline_that_is_two_ids_ends_a_document(tmp_path):
    """Of a tokenizer without an end of text."""
    model = Tokenizer(models.BPE({c: i for i, c in enumerate("abcd")}, []))
    model.normalizer = normalizers.Replace("\n", "cd")
    (tmp_path / "tokenizer.json").write_text(model.to_str())
    (tmp_path / "two.jsonl").write_text('{"text": "ab"}\n' * 2)
    spec = f"hf:{tmp_path / 'tokenizer.json'}"
    assert (
        main(
            arguments(
                tmp_path / "two.jsonl", tmp_path / "out", "--tokenizer", spec, "--validation", "0"
            )
        )
        == 0
    )
    train = corpus(tmp_path / "out", tmp_path, f"hf:{tmp_path / 'out' / 'tokenizer.json'}").splits[
        "train"
    ]
    assert (train.tokens.tolist(), train.n_bytes) == ([0, 1, 2, 3] * 2, 6)


def test_the_manifest_is_the_record_of_what_was_prepared(dump, prepared, tmp_path):
    manifest = json.loads((prepared / "manifest.json").read_text())
    digest = cache.digest_of(dump, tmp_path)
    assert manifest["input"] == [{"file": str(dump), "size": dump.stat().st_size, "sha256": digest}]
    assert (
        manifest["tokenizer"]
        == tokenizers.make(f"hf:{prepared / 'tokenizer.json'}", ()).fingerprint
    )
    assert {"input", "tokenizer", "validation"} <= manifest["job"].keys()
    assert len(manifest["units"]) > 5
    for shard in records_of(prepared):
        path = prepared / shard["file"]
        assert (shard["tokens"], shard["size"]) == (len(np.load(path)), path.stat().st_size)
        assert shard["sha256"] == cache.digest_of(path, tmp_path)
    n_bytes = sum(len(text.encode()) for text in DOCUMENTS)
    found = corpus(prepared, tmp_path, f"hf:{prepared / 'tokenizer.json'}")
    assert sum(split.n_bytes for split in found.splits.values()) == n_bytes
    assert found.tokenizer.vocab_size == 300
    (summary,) = found.record.values()  # which run.json, evaluations and reports repeat
    assert (summary["files"], summary["bytes"], summary["documents"]) == (
        1,
        dump.stat().st_size,
        len(DOCUMENTS),
    )
    assert summary["tokens"] == sum(split.n_tokens for split in found.splits.values())
    assert summary["input"] == f"jsonl:{dump}"
    text = found.tokenizer.decode(np.asarray(found.splits["train"].tokens))
    assert text.count(hf_tokenizer.END_OF_TEXT) == sum(doc in text for doc in DOCUMENTS)
    with pytest.raises(
        UserError, match=r"is not the tokenizer of the shards in \w+; use \S+=hf:PATH"
    ):
        corpus(prepared, tmp_path, "byte")


def test_a_folder_that_is_not_as_its_manifest_says_is_refused(prepared, tmp_path):
    np.save(prepared / "train_999999.npy", np.zeros(9, np.uint16))  # not of this corpus
    assert corpus(prepared, tmp_path, "none").splits["train"].n_tokens == sum(
        shard["tokens"] for shard in records_of(prepared) if shard["split"] == "train"
    )
    lost = next(
        prepared / shard["file"] for shard in records_of(prepared) if shard["tokens"] % 2 == 0
    )
    ids = np.load(lost)
    np.save(lost, ids.repeat(2))
    with pytest.raises(UserError, match=r"has \d+ bytes, but manifest.json lists"):
        corpus(prepared, tmp_path, "none")
    np.save(lost, np.zeros(len(ids) // 2, np.uint32))  # as many bytes
    with pytest.raises(UserError, match=r"has \d+ uint32 ids, but manifest\.json lists"):
        corpus(prepared, tmp_path, "none")
    lost.unlink()
    with pytest.raises(UserError, match=r"is listed in manifest\.json but does not exist"):
        corpus(prepared, tmp_path, "none")
    whole = (prepared / "manifest.json").read_text()
    unfinished = json.loads(whole) | {"units": [None]}
    (prepared / "manifest.json").write_text(json.dumps(unfinished))
    with pytest.raises(
        UserError, match=r"lm\.data\.prepare did not finish; rerun its command to resume"
    ):
        corpus(prepared, tmp_path, "none")
    damages = (
        "{}", whole[:-5], whole.replace('"size": ', '"size": "x'), whole.replace('"sha256"', '"sha"'),
        whole.replace('"units": [', '"units": [1, '), whole.replace('"train_000000', '"../train_000000'),
        whole.replace('"split": "train"', '"split": "training"'),
    )  # fmt: skip
    for damage in damages:
        (prepared / "manifest.json").write_text(damage)
        with pytest.raises(
            UserError, match=r"manifest\.json is corrupted: .*; prepare the corpus again"
        ) as error:
            corpus(prepared, tmp_path, "none")
        assert "\n" not in str(error.value)


def test_verify_finds_every_file_that_is_not_as_it_was_written(prepared, tmp_path, capsys):
    shards = sorted(prepared.glob("train_*.npy"))
    capsys.readouterr()
    assert main(["--verify", str(prepared)]) == 0
    assert "are as they were written" in capsys.readouterr().out
    flip_a_bit(shards[1])
    shards[4].unlink()
    tokenizer = json.loads((prepared / "tokenizer.json").read_text())
    (prepared / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["--verify", str(prepared)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{shards[1]} has another sha256 than when it was written",
        f"{shards[4]} is missing",
        f"{prepared / 'tokenizer.json'} is not the tokenizer of the shards",
        "3 files differ from manifest.json; restore them or prepare them again",
    ]
    (prepared / "tokenizer.json").unlink()
    assert main(["--verify", str(prepared)]) == 2
    assert f"{prepared / 'tokenizer.json'} is missing" in capsys.readouterr().err
    assert main(["--verify", str(tmp_path)]) == 2
    assert "has no manifest.json" in capsys.readouterr().err


def test_a_corrupted_line_is_an_error_of_one_line_that_names_the_file(dump, tmp_path, capsys):
    lines = dump.read_bytes().splitlines()
    damages = (
        b"[1]",
        b"{",
        b'{"text": "\xff"}',
        b'{"text": 1}',
        b"[" * 10**5,
        b"9" * 5000,
        b'{"text": "\\ud800"}',
    )
    for i, line in enumerate((b"", *damages)):
        for at in (0, 250):
            path = tmp_path / f"{i}_{at}.jsonl"
            path.write_bytes(b"\n".join([*lines[:at], line, *lines[at:]]) + b"\n")
            code = main(arguments(path, tmp_path / f"out_{i}_{at}"))
            error = capsys.readouterr().err
            assert (code, error.count("\n")) == ((2, 1) if line else (0, 0)), error
            assert error.startswith(str(path) if line else "")
            assert len(error) < 600


def test_a_lost_shard_is_written_again_and_a_changed_tokenizer_is_refused(dump, prepared, capsys):
    """Two tokenizers in one corpus would be silent."""
    job = arguments(dump, prepared, "--tokenizer", "bpe:300")
    manifest, tokenizer = (
        (prepared / name).read_text() for name in ("manifest.json", "tokenizer.json")
    )
    lost = prepared / "train_000002.npy"
    whole = lost.read_bytes()
    lost.unlink()
    (prepared / "tokenizer.json").write_text(hf_tokenizer.train_bpe(["other text"], 300).json)
    assert main(job) == 2
    assert "tokenizer.json is not the tokenizer of the finished shards" in capsys.readouterr().err
    (prepared / "tokenizer.json").write_text(tokenizer)
    assert main(job) == 0
    assert lost.read_bytes() == whole
    assert (prepared / "manifest.json").read_text() == manifest
    assert main(["--verify", str(prepared)]) == 0


@pytest.mark.slow
def test_a_rerun_after_a_kill_gives_the_same_bytes_and_the_workers_end_with_their_parent(
    dump, tmp_path
):
    output, whole = tmp_path / "out", tmp_path / "whole"
    dump.write_text(dump.read_text() * 240)
    command = [sys.executable, "-m", "lm.data.prepare", *arguments(dump, output, "--workers", "2")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        while not (output / "manifest.json").exists() or len(records_of(output)) < 4:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.1)
    assert None in json.loads((output / "manifest.json").read_text())["units"]
    done = {
        output / shard["file"]: (output / shard["file"]).stat().st_mtime_ns
        for shard in records_of(output)
    }
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    assert main(arguments(dump, whole)) == 0
    for path in whole.glob("*.npy"):
        assert (output / path.name).read_bytes() == path.read_bytes()
    assert records_of(output) == records_of(whole)
    assert not list(output.glob(".*.partial"))
    assert all(path.stat().st_mtime_ns == at for path, at in done.items())


def test_a_full_disk_is_a_temporary_error_that_names_the_file(dump, tmp_path, capsys):
    with small_disk(tmp_path) as disk:
        assert main(arguments(dump, disk / "out", "--unit_mb", "1")) == 0
        (disk / "filler").write_bytes(b"x" * 120_000)
        assert main(arguments(dump, disk / "other", "--unit_mb", "1")) == 1
        error = capsys.readouterr().err
        assert "No space left on device" in error
        assert str(disk / "other") in error
        (disk / "filler").unlink()
        assert main(arguments(dump, disk / "other", "--unit_mb", "1")) == 0


def test_a_tfds_directory_becomes_shards_of_its_own_splits(tmp_path, monkeypatch):
    root = Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
    directory = next(root.glob("tiny_shakespeare/*"), None)
    if directory is None:
        pytest.skip("no prepared Tiny Shakespeare in TFDS_DATA_DIR")
    job = [
        "--input",
        f"tfds:{directory}",
        "--tokenizer",
        "byte",
        "--output",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    assert main(job) == 0
    found = corpus(tmp_path / "out", tmp_path)
    direct = open_corpus(
        DataConfig(
            source="tfds:tiny_shakespeare", tokenizer="byte", cache_dir=str(tmp_path / "cache")
        )
    )
    assert found.splits.keys() == direct.splits.keys() == {"train", "validation", "test"}
    for name, split in direct.splits.items():
        ours = np.asarray(found.splits[name].tokens)
        assert len(ours) - len(split.tokens) in (0, 1)  # a newline after the last document
        np.testing.assert_array_equal(ours[: len(split.tokens)], np.asarray(split.tokens))


def test_several_inputs_are_one_corpus(dump, tmp_path, capsys):
    texts = [f"a line of prose, number {i}\n" for i in range(300)]
    novel = tmp_path / "novel.txt"
    novel.write_text("".join(texts))
    both = ["--input", f"jsonl:{dump}", "--input", f"text:{novel}", "--deduplicate"]
    assert main(arguments(dump, tmp_path / "out", *both)) == 0
    records = records_of(tmp_path / "out")
    tokens = [np.load(tmp_path / "out" / record["file"]) for record in records]
    written = b"".join(ids.astype(np.uint8).tobytes() for ids in tokens).decode()
    assert [text for text in (*DOCUMENTS, *texts) if text not in written] == []
    assert sum(record["text_bytes"] for record in records) >= sum(
        len(t.encode()) for t in (*DOCUMENTS, *texts)
    )
    record = corpus(tmp_path / "out", tmp_path).record["out"]
    assert (record["input"], record["files"]) == (f"jsonl:{dump} and text:{novel}", 2)
    assert main(arguments(dump, tmp_path / "out", *both)) == 0  # resumes
    # another corpus
    assert main(arguments(dump, tmp_path / "out", *both[:2], "--deduplicate")) == 2
    capsys.readouterr()
    assert (
        main(
            arguments(
                dump, tmp_path / "new", "--input", f"jsonl:{dump}", "--input", f"jsonl:{tmp_path}"
            )
        )
        == 2
    )
    assert f"has {dump}, which another input has" in capsys.readouterr().err


def test_mistakes_are_errors_and_a_corrected_command_can_use_the_same_directory(
    dump, tmp_path, capsys
):
    output = tmp_path / "out"
    for more, message in (
        (("--input", "jsonl:/no/such/file"), "is not a file of jsonl, nor a folder"),
        (("--input", "xml:x"), "is not one of text:PATH"),
        (("--tokenizer", "char"), "is not one of byte, hf:PATH, bpe:SIZE"),
        (("--output", "gs://bucket/out"), "--output gs://bucket/out: URLs are not supported"),
        (("--input", f"text:{dump}", "--field", "content"), "--field: text:"),
        (("--special_tokens",), "--special_tokens: the byte tokenizer has no special tokens"),
        *(
            (("--tokenizer", f"bpe:{size}"), "SIZE above 256 and below 10000000")
            for size in ("1" + "0" * 23, "9" * 5000, "256", "-1", "", "³²¹")
        ),
        (("--field", "content"), "has no field 'content' (set --field); it has 'text', 'id'"),
    ):
        assert main(arguments(dump, output, *more)) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error) < 500
    for option, value in [
        ("--validation", "1.5"),
        *(("--unit_mb", v) for v in ("nan", "inf", "0", "-1", "1e300")),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(arguments(dump, output, option, value))
        assert f"{option} must be at least" in capsys.readouterr().err
    assert main(arguments(dump, output, "--validation", "1e-9")) == 0
    assert "WARNING: the validation split is empty" in capsys.readouterr().out


def test_a_directory_of_something_else_is_refused(dump, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    for other, reason in {
        tmp_path / "full": "contains other files",
        dump: "not a directory",
        "/dev/null": "not a dir",
    }.items():
        assert main(arguments(dump, other)) == 2
        assert reason in capsys.readouterr().err
    output = tmp_path / "out"
    output.mkdir()
    held = lock(output)
    assert main(arguments(dump, output)) == 1  # worth a retry
    assert f"--output {output} is in use by process" in capsys.readouterr().err
    held.close()
    assert main(arguments(dump, output)) == 0
    assert main(arguments(dump, output, "--validation", "0.2")) == 2
    assert "was written from other input" in capsys.readouterr().err
    times = dump.stat().st_atime_ns, dump.stat().st_mtime_ns
    dump.write_text(dump.read_text().replace("words", "sword"))
    os.utime(dump, ns=times)
    assert main(arguments(dump, output)) == 2
    assert "was written from other input" in capsys.readouterr().err
