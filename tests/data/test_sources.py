"""Tiny Shakespeare: read if prepared, else downloaded (here from 127.0.0.1), else replaced with a
warning.
"""

import contextlib
import functools
import hashlib
import http.client
import io
import os
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from lm.config import SPLITS, DataConfig
from lm.data import open_corpus, shakespeare, sources, tfds_directory
from lm.system.errors import Unavailable, UserError

ROOT = Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
STOCK = ROOT / "tiny_shakespeare" / "1.0.0"
needs_real = pytest.mark.skipif(
    not STOCK.is_dir(), reason="no Tiny Shakespeare below TFDS_DATA_DIR"
)
SPEECH = "First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 40


@pytest.fixture
def downloads(monkeypatch):
    """Answer each download with SPEECH, and return the list of their addresses."""
    found = []
    monkeypatch.setattr(shakespeare.urllib.request, "urlopen",
                        lambda url, timeout: found.append(url) or io.BytesIO(SPEECH.encode()))  # fmt: skip
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(SPEECH.encode()).hexdigest())
    return found


@pytest.fixture
def no_network(monkeypatch):
    def fail(url, timeout):
        assert 0 < timeout <= 10
        raise shakespeare.urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr(shakespeare.urllib.request, "urlopen", fail)


@pytest.fixture
def config(tmp_path):
    return functools.partial(
        DataConfig, data_dir=str(tmp_path / "tfds"), cache_dir=str(tmp_path / "cache")
    )


def quiet(config):
    return open_corpus(config, say=lambda line: None)


def text_of(corpus, split):
    return corpus.tokenizer.decode(corpus.splits[split].tokens)


@needs_real
def test_the_prepared_directory_has_the_splits_of_tfds(config, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(ROOT))
    corpus = quiet(config(data_dir=None))
    assert corpus.name == "tiny_shakespeare"
    sizes = {name: (split.n_tokens, split.n_bytes) for name, split in corpus.splits.items()}
    # TFDS's catalogue: 1,115,394 characters, 90/5/5; nanoGPT: 65 distinct ones, the last 10 % for
    # validation.
    assert sizes == {"train": (1003854,) * 2, "validation": (55770,) * 2, "test": (55770,) * 2}
    assert corpus.tokenizer.vocab_size == 65
    assert text_of(corpus, "train").startswith("First Citizen:\nBefore we proceed any further")
    assert corpus.split("validation+test").n_tokens == 111_540
    assert corpus.notices == ()


@needs_real
def test_the_real_text_is_cut_anew_and_our_builder_writes_the_same_files_as_tfds(config, tmp_path):
    corpus = quiet(config(data_dir=str(ROOT), splits=(0.7, 0.3, 0.0), tokenizer="byte"))
    assert corpus.splits["train"].n_tokens == int(0.7 * 1_115_394)
    text = text_of(corpus, "train") + text_of(corpus, "validation")
    assert hashlib.sha256(text.encode()).hexdigest() == shakespeare.SHA256
    assert len(text) == shakespeare.SIZE
    (tmp_path / "ours").mkdir()
    shakespeare._prepare(text, tmp_path / "ours")
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        path.name for path in STOCK.iterdir()
    }
    for path in STOCK.glob("*.array_record*"):
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes()


def test_the_text_is_downloaded_once(config, downloads, tmp_path):
    first = quiet(config())
    shutil.rmtree(tmp_path / "cache")
    second = quiet(config())
    assert downloads == [shakespeare.URL]
    assert first.fingerprint == second.fingerprint
    assert text_of(second, "train") == SPEECH[: int(len(SPEECH) * 0.9)]
    assert "".join(text_of(second, split) for split in SPLITS) == SPEECH
    assert [path.name for path in (tmp_path / "tfds").rglob("*") if path.is_dir()] == [
        "tiny_shakespeare",
        "1.0.0",
    ]


def test_a_file_with_a_wrong_checksum_is_not_kept(config, downloads, tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "SHA256", "0")
    with pytest.raises(Unavailable, match="wrong checksum"):
        quiet(config())
    assert not (tmp_path / "tfds").exists()


def test_a_slow_or_endless_download_is_abandoned(monkeypatch):
    """The first byte of an answer comes and no more, or bytes come without end."""
    end = threading.Event()
    for read, reason in (
        (lambda n: end.wait(60), "no answer within 0 s"),
        (lambda n: b"x" * n, "wrong checksum"),
    ):
        answer = contextlib.nullcontext(Mock(read=read))
        monkeypatch.setattr(shakespeare.urllib.request, "urlopen", Mock(return_value=answer))
        monkeypatch.setattr(shakespeare, "DEADLINE", 0.3)
        with pytest.raises(Unavailable, match=reason):
            shakespeare.download()
    end.set()


def test_an_answer_that_is_not_http_or_ends_early_is_a_failed_download(monkeypatch):
    for error in (
        http.client.BadStatusLine("SSH-2.0-OpenSSH_9.6\r\n"),
        http.client.IncompleteRead(b"First"),
    ):
        monkeypatch.setattr(shakespeare.urllib.request, "urlopen", Mock(side_effect=error))
        with pytest.raises(
            Unavailable, match=r"cannot be downloaded from .*(SSH-2\.0|IncompleteRead)"
        ) as caught:
            shakespeare.download()
        assert "\n" not in caught.value.problems[0]


def test_without_a_network_the_error_lists_three_alternatives(config, no_network, tmp_path):
    with pytest.raises(UserError) as error:
        quiet(config())
    message = str(error.value)
    assert "Temporary failure in name resolution" in message
    assert "run once with a network connection" in message
    for advice in (
        "--config.data.data_dir=DIR",
        "--config.data.source=text:PATH",
        "--config.data.offline=python_docs",
    ):
        assert advice in message
    assert not (tmp_path / "tfds").exists()


def test_without_a_network_a_config_may_fall_back_with_a_warning(config, no_network, monkeypatch):
    docs = sources.Source("python_docs", "d", lambda: {"train": ["for statements"]})
    monkeypatch.setattr(sources, "find_python_docs", lambda config: docs)
    lines = []
    corpus = open_corpus(config(offline="python_docs"), say=lines.append)
    assert corpus.name == "python_docs (fallback)"
    assert text_of(corpus, "train") == "for statements"
    assert len(corpus.notices) == 1
    assert "WARNING: training on python_docs INSTEAD of tfds:tiny_shakespeare" in corpus.notices[0]
    assert corpus.notices[0] in lines
    with pytest.raises(
        UserError, match="is not a file, nor a folder"
    ):  # which has nothing to do with the network
        quiet(config(source="text:/no/such/file", offline="python_docs"))
    with pytest.raises(UserError, match="TFDS_DATA_DIR gs://bucket: URLs are not supported"):
        quiet(config(data_dir="gs://bucket"))


@pytest.fixture
def prepared(tmp_path):
    """Prepare version 1.0.0 below a TFDS root."""
    directory = tmp_path / "tfds" / "tiny_shakespeare" / "1.0.0"
    directory.mkdir(parents=True)
    shakespeare._prepare(SPEECH, directory)
    return directory


DAMAGES = {
    "dataset_info.json": [
        lambda text: text[: len(text) // 2], lambda text: text.replace('"1"', "[1]"),
        lambda text: text.replace('"1"', '"²"'), lambda text: text.replace('"1"', f'"{"9" * 5000}"'),
        lambda text: text.replace('"splits": [', '"splits": {"a": 1}, "x": ['),
        *(lambda text, key=key: text.replace(f'"{key}"', '"other"') for key in ("name", "splits", "shardLengths")),
    ],
    "features.json": [
        lambda text: "", lambda text: text.replace('"text"', "7"), lambda text: text.replace('"features"', '"feet"'),
        lambda text: text.replace('"featuresDict": {', '"featuresDict": 1, "x": {'),
    ],
}  # fmt: skip


def test_a_damaged_or_incomplete_directory_is_an_error_of_one_line(config, prepared, no_network):
    for path in prepared.iterdir():
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(UserError, match=r"1\.0\.0 is .*prepare it again"):
            quiet(config())
        for damage in DAMAGES.get(path.name, ()):
            path.write_text(damage(whole.decode()))
            with pytest.raises(
                UserError, match=r"is corrupted: .*prepare it again|has no feature .text."
            ) as error:
                quiet(config())
            assert "\n" not in str(error.value)
            assert len(str(error.value)) < 500
        path.write_bytes(whole)
    shard = prepared / "tiny_shakespeare-train.array_record-00000-of-00001"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot read the train split"):
        quiet(config())


def test_a_dataset_without_text_or_in_another_format_is_an_error(config, prepared):
    info, features = prepared / "dataset_info.json", prepared / "features.json"
    features.write_text(features.read_text().replace('"text"', '"image"'))
    with pytest.raises(UserError, match=r'no feature "text" \(it has image\)'):
        quiet(config())
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(UserError, match="--file_format=array_record"):
        quiet(config())


def test_the_newest_version_is_read_by_default(tmp_path):
    for version in ("1.0.0", "1.10.0", "1.9.0", "incomplete.1.11.0"):
        (tmp_path / "wiki" / "en" / version).mkdir(parents=True)
    assert tfds_directory.prepared_directory(tmp_path, "wiki/en").name == "1.10.0"
    assert tfds_directory.prepared_directory(tmp_path, "wiki/en:1.9.0").name == "1.9.0"
    assert tfds_directory.prepared_directory(tmp_path, "wiki/de") is None


def test_another_unprepared_dataset_is_an_error_of_one_line_with_the_command(config, no_network):
    with pytest.raises(UserError) as error:
        quiet(config(source="tfds:lm1b"))
    assert "tfds build lm1b --file_format=array_record --data_dir=" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
