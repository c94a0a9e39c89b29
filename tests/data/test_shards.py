"""tokens:PATH: shards of every format are joined without copying them into memory."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from running import ROOT

from lm.config import DataConfig
from lm.data import check_corpus, open_corpus
from lm.data.shards import open_shard
from lm.system.errors import UserError


def open_shards(tmp_path, source, tokenizer="none", say=lambda line: None):
    config = DataConfig(source=source, tokenizer=tokenizer, cache_dir=str(tmp_path / "cache"))
    return open_corpus(config, say=say)


def header(magic, version, n):
    """Return a header of llm.c: 256 numbers of int32."""
    return np.array([magic, version, n, *[0] * 253], "<i4").tobytes()


# The formats of llm.c are those of its dev/data/data_common.py, for GPT-2 and for Llama 3.
FORMATS = {
    "flat": (".bin", lambda ids: ids.astype("<u2").tobytes()),
    "uint32": (".uint32.bin", lambda ids: ids.astype("<u4").tobytes()),
    "llm.c": (".bin", lambda ids: header(20240520, 1, len(ids)) + ids.astype("<u2").tobytes()),
    "llm.c Llama 3": (
        ".bin",
        lambda ids: header(20240801, 7, len(ids)) + ids.astype("<u4").tobytes(),
    ),
}


def write_shards(folder, kind):
    """Write the ids 0..99 in two training shards and 100..119 in a validation shard."""
    train, val = np.arange(100), np.arange(100, 120)
    folder.mkdir()
    for name, ids in {"train_000": train[:60], "train_001": train[60:], "val_000": val}.items():
        if kind == "npy":
            np.save(folder / f"{name}.npy", ids.astype(np.uint32))
        else:
            (folder / f"{name}{FORMATS[kind][0]}").write_bytes(FORMATS[kind][1](ids))
    return folder


def test_token_shards_of_each_format_are_joined_in_order(tmp_path):
    for kind in ("npy", *FORMATS):
        folder = write_shards(tmp_path / kind, kind)
        for source in (f"tokens:{folder}", f"tokens:{folder}/*_0*"):
            corpus = open_shards(tmp_path, source)
            assert np.asarray(corpus.split("train").tokens).tolist() == list(range(100))
            assert np.asarray(corpus.split("validation").tokens).tolist() == list(range(100, 120))
            assert (corpus.tokenizer, corpus.splits["train"].n_bytes) == (None, None)
        assert check_corpus(corpus, 8, 120) == []
        assert (
            "has the id 119; use --config.model.vocab_size=120" in check_corpus(corpus, 8, 110)[0]
        )


def test_a_split_is_a_whole_word_of_the_name_and_is_printed(tmp_path):
    """ "medieval" has "eval" in it, and "contest" has "test"."""
    splits = {
        "medieval_train.npy": "train", "contest-valid.npy": "validation", "Train2.bin": "train", "a.test.npy": "test",
        "fineweb_val_000001.bin": "validation", "validation.npy": "validation", "dev.npy": "validation",
        "training.npy": "train", "contest.npy": "not used, because no split is in the name",
    }  # fmt: skip
    for name in splits:
        np.save(tmp_path / "ids.npy", np.arange(9, dtype=np.uint16))
        if name.endswith("bin"):
            (tmp_path / "ids.npy").write_bytes(np.arange(9, dtype="<u2").tobytes())
        (tmp_path / "ids.npy").rename(tmp_path / name)
    lines = []
    corpus = open_shards(tmp_path, f"tokens:{tmp_path}", say=lines.append)
    assert {split: tokens.n_tokens for split, tokens in corpus.splits.items()} == {
        "train": 27, "validation": 36, "test": 9,
    }  # fmt: skip
    printed = {line.partition(": ")[0]: line.partition(": ")[2].split(", ") for line in lines}
    assert printed["test"] == ["a.test.npy"]
    assert printed["train"] == ["Train2.bin", "medieval_train.npy", "training.npy"]
    assert printed["not used, because no split is in the name"] == ["contest.npy"]
    (tmp_path / "contest.npy").rename(tmp_path / "train_and_val.npy")
    with pytest.raises(
        UserError, match=r"train_and_val\.npy: its name has the words of several splits.*rename"
    ):
        open_shards(tmp_path, f"tokens:{tmp_path}")


def test_a_corrupted_shard_is_an_error_of_one_line(tmp_path):
    for i, (kind, damage, reason) in enumerate(
        [
            ("llm.c", lambda content: content[:-7], "has 1097 bytes, expected 1104"),
            (
                "flat",
                lambda content: content[:3],
                "3 bytes are not a multiple of the 2 bytes of uint16",
            ),
            (
                "uint32",
                lambda content: content[:6],
                "6 bytes are not a multiple of the 4 bytes of uint32",
            ),
            ("npy", lambda content: content[:-7], "file size"),
            ("npy", lambda content: content[:20], "EOF"),
            ("npy", lambda content: b"", "EOF"),
            ("npy", lambda content: content[::-1], "magic string"),
            ("npy", lambda content: content.replace(b"}", b"{"), ""),
            ("npy", lambda content: content.replace(b"<u4", b"<f4"), "float32"),
        ]
    ):
        folder = write_shards(tmp_path / str(i), kind)
        (path,) = folder.glob("train_001.*")
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(
            UserError, match=r"train_001\.\S+ is not a complete token shard"
        ) as error:
            open_shards(tmp_path, f"tokens:{folder}")
        message = str(error.value)
        assert reason in message
        assert "pickle" not in message
        assert "\n" not in message
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(UserError, match="a pipe or a device"):
            open_shard(path)


IDS = np.arange(1000) * 50


NOT_IDS = [
    header(20240520, 2, 1000) + IDS.astype("<u2").tobytes(),  # a later version
    header(20240520, 7, 1000)
    + IDS.astype("<u4").tobytes(),  # the version of the other magic number
    header(20240801, 1, 1000) + IDS.astype("<u2").tobytes(),
    header(20240801, 7, 1000) + IDS.astype("<u2").tobytes(),  # ids of another width
    header(20240520, 1, 999) + IDS.astype("<u2").tobytes(),
    header(20240520, 1, -1) + IDS.astype("<u2").tobytes(),
    header(20240522, 1, 1000)
    + IDS.astype("<u2").tobytes(),  # llm.c's evaluations; a magic number of the future
    header(20300101, 1, 1000) + IDS.astype("<u2").tobytes(),
    header(7, 1000, 16) + IDS.astype("<u2").tobytes(),  # of another program
    header(20240520, 1, 1000)[:4],
    b"\x93NUMPY" + bytes(1000),
    b"PK\3\4" + IDS.astype("<u2").tobytes(),
    b"\x1f\x8b\x08\0" + IDS.astype("<u2").tobytes(),
]


def test_a_header_that_is_not_known_is_not_read_as_ids(tmp_path):
    for content in NOT_IDS:
        (tmp_path / "train.bin").write_bytes(content)
        with pytest.raises(UserError, match=r"train\.bin is not a complete token shard") as error:
            open_shards(tmp_path, f"tokens:{tmp_path}/train.bin")
        assert "\n" not in str(error.value)


def test_ids_are_not_read_in_another_width_than_their_own(tmp_path):
    draw = np.random.default_rng(0)
    narrow, wide = tmp_path / "train.bin", tmp_path / "train.uint32.bin"
    for vocab_size in (300, 50_257, 128_256, 262_144):
        ids = draw.integers(0, vocab_size, 1000).astype("<u4")
        for path in (narrow, wide):
            path.write_bytes(ids.tobytes())
        with pytest.raises(
            UserError, match=r"looks like uint32 ids.* let its name end in \.uint32\.bin"
        ):
            open_shards(tmp_path, f"tokens:{narrow}")
        np.testing.assert_array_equal(
            open_shards(tmp_path, f"tokens:{wide}").splits["train"].tokens, ids
        )
    for vocab_size in (2, 4, 65, 256, 50_257, 65_536):
        ids = draw.integers(0, vocab_size, 1000).astype("<u2")
        for path in (narrow, wide):
            path.write_bytes(ids.tobytes())
        corpus = open_shards(tmp_path, f"tokens:{narrow}")
        np.testing.assert_array_equal(corpus.splits["train"].tokens, ids)
        assert check_corpus(corpus, 8, vocab_size) == []
        if vocab_size > 16:
            with pytest.raises(
                UserError, match=r'look like pairs of uint16 ids; remove "[.]uint32" from its name'
            ):
                open_shards(tmp_path, f"tokens:{wide}")
        else:  # too few ids to tell; the vocabulary does
            (problem,) = check_corpus(open_shards(tmp_path, f"tokens:{wide}"), 8, vocab_size)
            assert "model.vocab_size" in problem


def test_a_shard_that_cannot_be_read_is_not_called_incomplete(tmp_path, monkeypatch):
    """Such as one on a network file system that fails for a moment."""
    folder = write_shards(tmp_path / "shards", "npy")

    def fail(path, mode):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(np.lib.format, "open_memmap", fail)
    with pytest.raises(OSError, match="Input/output error"):
        open_shards(tmp_path, f"tokens:{folder}")


def test_many_shards_raise_the_limit_of_open_files(tmp_path, monkeypatch):
    for i in range(20):
        np.save(tmp_path / f"train_{i:06}.npy", np.arange(2, dtype=np.uint16))
    limits = {"now": (100, 1000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert open_shards(tmp_path, f"tokens:{tmp_path}").splits["train"].n_tokens == 40
    assert limits["now"] == (532, 1000)
    limits["now"] = (100, 300)
    with pytest.raises(
        UserError, match="20 token shards need 532 open files, but the system allows 300"
    ):
        open_shards(tmp_path, f"tokens:{tmp_path}")


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
data = DataConfig(source="tokens:" + sys.argv[1], tokenizer="byte", cache_dir=sys.argv[2], order="epochs")
corpus, config = open_corpus(data), Config(data=data)
split = corpus.split("train")
assert len(split.tokens) == int(sys.argv[3])
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
def test_10_billion_tokens_need_no_more_memory_than_10_million(tmp_path):
    """The shards are sparse files: reading a hole takes the same memory as reading data."""

    def memory(n_tokens: int) -> int:
        folder = tmp_path / str(n_tokens)
        folder.mkdir()
        shards, per_shard = [], 10**7 if n_tokens == 10**7 else 10**9
        for i in range(n_tokens // per_shard):
            np.lib.format.open_memmap(
                folder / f"train_{i:06}.npy", "w+", np.uint16, (per_shard,)
            ).flush()
            size = (folder / f"train_{i:06}.npy").stat().st_size
            counts = {"documents": 1, "tokens": per_shard, "text_bytes": per_shard, "size": size}
            shards.append(
                {"file": f"train_{i:06}.npy", "split": "train", "sha256": f"{i}"} | counts
            )
        manifest = {"job": {}, "input": [], "tokenizer": None, "commit": None}
        manifest["units"] = [{"shards": shards, "length": 0, "repeated": 0}]
        (folder / "manifest.json").write_text(json.dumps(manifest))
        command = [sys.executable, "-c", LARGE, str(folder), str(tmp_path / "cache"), str(n_tokens)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return int(done.stdout.split()[-1])

    small, large = memory(10**7), memory(10**10)
    assert large < small + 20_000, f"{small} kB and {large} kB"
