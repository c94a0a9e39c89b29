"""tokens:PATH: shards of every format are joined without copying them into memory."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lm.config import DataConfig
from lm.data import check_corpus, hf_tokenizer, open_corpus, prepare
from lm.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def open_shards(tmp_path, source, tokenizer="none"):
    config = DataConfig(source=source, tokenizer=tokenizer, cache_dir=str(tmp_path / "cache"))
    return open_corpus(config, say=lambda line: None)


def write_shards(folder, kind):
    """Write the ids 0..99 in two training shards and 100..119 in a validation shard."""
    train, val = np.arange(100), np.arange(100, 120)
    folder.mkdir()
    for name, ids in {"train_000": train[:60], "train_001": train[60:], "val_000": val}.items():
        if kind == "npy":
            np.save(folder / f"{name}.npy", ids.astype(np.uint32))
        elif kind == "flat":
            (folder / f"{name}.bin").write_bytes(ids.astype("<u2").tobytes())
        elif kind == "uint32":
            (folder / f"{name}.uint32.bin").write_bytes(ids.astype("<u4").tobytes())
        elif kind == "llm.c":
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, len(ids)
            (folder / f"{name}.bin").write_bytes(header.tobytes() + ids.astype("<u2").tobytes())
    return folder


@pytest.mark.parametrize("kind", ["npy", "flat", "uint32", "llm.c"])
def test_token_shards_are_joined_in_order(tmp_path, kind):
    folder = write_shards(tmp_path / "shards", kind)
    for source in (f"tokens:{folder}", f"tokens:{folder}/*_0*"):
        corpus = open_shards(tmp_path, source)
        assert np.asarray(corpus.split("train").tokens).tolist() == list(range(100))
        assert np.asarray(corpus.split("validation").tokens).tolist() == list(range(100, 120))
        assert corpus.tokenizer is None
        assert corpus.splits["train"].n_bytes is None
    assert check_corpus(corpus, 8, 120) == []
    assert "the validation split has the id 119; use at least 120" in check_corpus(corpus, 8, 110)[0]


def test_token_shards_can_be_decoded_with_a_tokenizer_json(tmp_path):
    text = "It was the best of times,\nit was the worst of times. " * 40
    bpe = hf_tokenizer.train_bpe([text], 280)
    (tmp_path / "tokenizer.json").write_text(bpe.json)
    (tmp_path / "train.bin").write_bytes(bpe.encode(text).tobytes())
    corpus = open_shards(tmp_path, f"tokens:{tmp_path}/train.bin", f"hf:{tmp_path / 'tokenizer.json'}")
    assert corpus.tokenizer.decode(corpus.splits["train"].tokens) == text


@pytest.mark.parametrize(
    ("kind", "damage", "reason"),
    [
        ("llm.c", lambda content: content[:-7], "has 1097 bytes, expected 1104"),
        ("flat", lambda content: content[:3], "3 bytes are not a multiple of the 2 bytes of uint16"),
        ("uint32", lambda content: content[:6], "6 bytes are not a multiple of the 4 bytes of uint32"),
        ("npy", lambda content: content[:-7], "file size"),
        ("npy", lambda content: content[:20], "EOF"),
        ("npy", lambda content: b"", "EOF"),
        ("npy", lambda content: content[::-1], "magic string"),
        ("npy", lambda content: content.replace(b"}", b"{"), ""),
        ("npy", lambda content: content.replace(b"<u4", b"<f4"), "float32"),
    ],
)
def test_a_corrupted_shard_is_an_error_of_one_line(tmp_path, kind, damage, reason):
    folder = write_shards(tmp_path / "shards", kind)
    (path,) = folder.glob("train_001.*")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"train_001\.\S+ is not a complete token shard") as error:
        open_shards(tmp_path, f"tokens:{folder}")
    message = str(error.value)
    assert reason in message
    assert "pickle" not in message
    assert "\n" not in message


def test_ids_beyond_the_vocabulary_are_found_where_a_manifest_has_the_byte_count(tmp_path):
    (tmp_path / "text.txt").write_text("to be, or not to be\n" * 50)
    output = tmp_path / "out"
    job = ["--input", f"text:{tmp_path / 'text.txt'}", "--tokenizer", "byte", "--output", str(output)]
    assert prepare.main([*job, "--validation", "0.2"]) == 0
    corpus = open_shards(tmp_path, f"tokens:{output}")
    assert corpus.splits["train"].n_bytes is not None
    problems = check_corpus(corpus, 8, 50)
    assert problems[0] == "config.model.vocab_size: 50, but the train split has the id 116; use at least 117"
    assert check_corpus(corpus, 8, 117) == []
    assert check_corpus(open_shards(tmp_path, f"tokens:{output}", "byte"), 8, 256) == []


@pytest.mark.parametrize("vocab_size", [300, 50_257, 128_256, 262_144])
def test_uint32_ids_are_not_read_as_uint16(tmp_path, vocab_size):
    ids = np.random.default_rng(0).integers(0, vocab_size, 1000).astype("<u4")
    path = tmp_path / "train.bin"
    path.write_bytes(ids.tobytes())
    with pytest.raises(UserError, match=r"looks like uint32 ids.* let its name end in \.uint32\.bin") as error:
        open_shards(tmp_path, f"tokens:{path}")
    assert "\n" not in str(error.value)
    path = path.rename(tmp_path / "train.uint32.bin")
    np.testing.assert_array_equal(open_shards(tmp_path, f"tokens:{path}").splits["train"].tokens, ids)


@pytest.mark.parametrize("vocab_size", [2, 4, 65, 256, 50_257, 65_536])
def test_uint16_ids_are_not_taken_for_others_and_not_read_as_uint32(tmp_path, vocab_size):
    ids = np.random.default_rng(0).integers(0, vocab_size, 1000).astype("<u2")
    path = tmp_path / "train.bin"
    path.write_bytes(ids.tobytes())
    corpus = open_shards(tmp_path, f"tokens:{path}")
    np.testing.assert_array_equal(corpus.splits["train"].tokens, ids)
    assert check_corpus(corpus, 8, vocab_size) == []
    path = path.rename(tmp_path / "train.uint32.bin")
    (problem,) = check_corpus(open_shards(tmp_path, f"tokens:{path}"), 8, vocab_size)
    assert vocab_size < 5 or 'look like pairs of uint16 ids: remove ".uint32"' in problem


@pytest.mark.parametrize("header", [(20240520,), (20240520, 2, 100), (20240520, 7, 100), (20240520, 1, -1)])
def test_a_header_of_llmc_that_is_wrong_is_not_read_as_ids(tmp_path, header):
    """Another version, uint16 ids in a file that should hold uint32, or a header that was cut."""
    path = tmp_path / "train.bin"
    whole = np.zeros(256, "<i4")
    whole[: len(header)] = header
    ids = np.arange(100, dtype="<u2").tobytes()
    path.write_bytes((whole.tobytes() + ids) if len(header) == 3 else whole[:1].tobytes() + ids[:2])
    with pytest.raises(UserError, match=r"train\.bin is not a complete token shard"):
        open_shards(tmp_path, f"tokens:{path}")


def test_a_shard_with_another_number_of_tokens_than_its_record_is_an_error(tmp_path):
    folder = tmp_path / "out"
    (folder / "units").mkdir(parents=True)
    np.save(folder / "train_000000.npy", np.arange(100, dtype=np.uint16))
    record = {"file": "train_000000.npy", "split": "train", "sha256": "0", "text_bytes": 200, "tokens": 100}
    record["size"] = (folder / record["file"]).stat().st_size
    (folder / "manifest.json").write_text(json.dumps({"tokenizer": None, "shards": [record]}))
    assert open_shards(tmp_path, f"tokens:{folder}").splits["train"].n_tokens == 100
    np.save(folder / "train_000000.npy", np.arange(50, dtype=np.uint32))  # as many bytes
    with pytest.raises(UserError, match=r"has 50 tokens of uint32, but manifest\.json lists 100"):
        open_shards(tmp_path, f"tokens:{folder}")


def test_a_shard_that_cannot_be_read_is_not_called_incomplete(tmp_path, monkeypatch):
    """Such as one on a network file system that fails for a moment."""
    folder = write_shards(tmp_path / "shards", "npy")

    def fail(path, mode):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(np.lib.format, "open_memmap", fail)
    with pytest.raises(OSError, match="Input/output error"):
        open_shards(tmp_path, f"tokens:{folder}")


LARGE = """
import json, sys, threading, time
import numpy as np
from lm.config import Config, DataConfig
from lm.data import check_corpus, open_corpus
from lm.data.batches import train_batch
from lm.training.batch_source import BatchSource
peak = 0
def watch():
    global peak
    while True:  # RssAnon does not count memory maps
        with open("/proc/self/status") as file:
            peak = max(peak, *(int(line.split()[1]) for line in file if line.startswith("RssAnon")))
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
data = DataConfig(source="tokens:" + sys.argv[1], tokenizer="byte", cache_dir=sys.argv[2], order=sys.argv[3])
corpus, config = open_corpus(data), Config(data=data)
split = corpus.split("train")
assert len(split.tokens) == int(sys.argv[4])
if len(split.tokens) >= 2**29:
    assert BatchSource(split, config).resident is None
for step in (0, 10**4):
    assert train_batch(split, config, step)["tokens"].shape == (32, 257)
assert check_corpus(corpus, 256, 256) == []
time.sleep(0.02)
print(peak)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory use from /proc")
@pytest.mark.parametrize("order", ["crops", "epochs"])
def test_10_billion_tokens_need_no_more_memory_than_10_million(tmp_path, order):
    """The shards are sparse files: reading a hole takes the same memory as reading data."""

    def memory(n_tokens: int) -> int:
        folder = tmp_path / str(n_tokens)
        (folder / "units").mkdir(parents=True)
        shards, per_shard = [], 10**7 if n_tokens == 10**7 else 10**9
        for i in range(n_tokens // per_shard):
            np.lib.format.open_memmap(folder / f"train_{i:06}.npy", "w+", np.uint16, (per_shard,)).flush()
            size = (folder / f"train_{i:06}.npy").stat().st_size
            counts = {"tokens": per_shard, "text_bytes": per_shard, "size": size}
            shards.append({"file": f"train_{i:06}.npy", "split": "train", "sha256": f"{i}"} | counts)
        (folder / "manifest.json").write_text(json.dumps({"tokenizer": None, "shards": shards}))
        command = [sys.executable, "-c", LARGE, str(folder), str(tmp_path / "cache"), order, str(n_tokens)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return int(done.stdout.split()[-1])

    small, large = memory(10**7), memory(10**10)
    assert large < small + 20_000, f"{small} kB and {large} kB"


MANY = """
import resource, sys
from pathlib import Path
from lm.data.shards import open_shards
from lm.errors import UserError
resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[2])))
try:
    print(len(open_shards(sys.argv[1], Path(sys.argv[1]) / "cache").tokens["train"]))
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize(("limit", "message"), [(1000, "600"), (300, "300 token shards need 812 open files")])
def test_many_shards_raise_the_limit_of_open_files(tmp_path, limit, message):
    for i in range(300):
        np.save(tmp_path / f"train_{i:06}.npy", np.arange(2, dtype=np.uint16))
    command = [sys.executable, "-c", MANY, str(tmp_path), str(limit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert message in done.stdout, done.stdout + done.stderr
