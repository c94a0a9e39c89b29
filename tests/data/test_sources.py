"""Tiny Shakespeare: read if prepared, else downloaded (here from 127.0.0.1), else replaced with a warning."""

import hashlib
import http.server
import shutil
import socket
import threading
from pathlib import Path

import pytest

from lm.config import SPLITS, DataConfig
from lm.data import open_corpus, shakespeare, sources
from lm.errors import Unavailable, UserError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data (the real Tiny Shakespeare) not found")
SPEECH = "First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 40


@pytest.fixture
def server(monkeypatch):
    """Serve `server.content` instead of the real address, and count the requests in `server.requests`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            served.requests += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(served.content)

        def log_message(self, *args):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.content, served.requests = SPEECH.encode(), 0
    threading.Thread(target=served.serve_forever, daemon=True).start()
    monkeypatch.setattr(shakespeare, "URL", f"http://127.0.0.1:{served.server_port}/input.txt")
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(SPEECH.encode()).hexdigest())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture
def no_network(monkeypatch):
    def fail(url, timeout):
        assert 0 < timeout <= 10
        raise shakespeare.urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr(shakespeare.urllib.request, "urlopen", fail)


@pytest.fixture
def config(tmp_path):
    def make(**changes):
        return DataConfig(**{"data_dir": str(tmp_path / "tfds"), "cache_dir": str(tmp_path / "cache")} | changes)

    return make


def quiet(config):
    return open_corpus(config, say=lambda line: None)


def text_of(corpus, split):
    return corpus.tokenizer.decode(corpus.splits[split].tokens)


@needs_shared
def test_the_prepared_directory_has_the_splits_of_tfds(config):
    corpus = quiet(config(data_dir=str(SHARED / "tfds")))
    assert corpus.name == "tiny_shakespeare"
    sizes = {name: (split.n_tokens, split.n_bytes) for name, split in corpus.splits.items()}
    # TFDS's catalogue: 1,115,394 characters, 90/5/5; nanoGPT: 65 distinct ones, the last 10 % for validation.
    assert sizes == {"train": (1003854,) * 2, "validation": (55770,) * 2, "test": (55770,) * 2}
    assert corpus.tokenizer.vocab_size == 65
    assert text_of(corpus, "train").startswith("First Citizen:\nBefore we proceed any further")
    assert corpus.split("validation+test").n_tokens == 111_540
    assert corpus.notices == ()


@needs_shared
def test_the_root_is_read_from_the_environment(config, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(SHARED / "tfds"))
    assert quiet(config(data_dir=None)).splits["test"].n_tokens == 55770


@needs_shared
def test_configured_splits_cut_the_joined_text(config):
    corpus = quiet(config(data_dir=str(SHARED / "tfds"), splits=(0.7, 0.3, 0.0), tokenizer="byte"))
    whole = (SHARED / "tiny_shakespeare" / "input.txt").read_text()
    assert text_of(corpus, "train") + text_of(corpus, "validation") == whole
    assert corpus.splits["train"].n_tokens == int(0.7 * 1_115_394)


@needs_shared
def test_our_builder_writes_the_same_files_as_tfds(tmp_path):
    text = (SHARED / "tiny_shakespeare" / "input.txt").read_bytes()
    assert hashlib.sha256(text).hexdigest() == shakespeare.SHA256
    assert len(text) == shakespeare.SIZE
    shakespeare._prepare(text.decode(), tmp_path)
    stock = SHARED / "tfds" / "tiny_shakespeare" / "1.0.0"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in stock.iterdir()}
    for path in stock.glob("*.array_record*"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_the_text_is_downloaded_once(config, server, tmp_path):
    first = quiet(config())
    shutil.rmtree(tmp_path / "cache")
    second = quiet(config())
    assert server.requests == 1
    assert first.fingerprint == second.fingerprint
    assert text_of(second, "train") == SPEECH[: int(len(SPEECH) * 0.9)]
    assert "".join(text_of(second, split) for split in SPLITS) == SPEECH
    assert [path.name for path in (tmp_path / "tfds").rglob("*") if path.is_dir()] == ["tiny_shakespeare", "1.0.0"]


@pytest.mark.parametrize("content", [b"<html>Please log in to the hotel's network</html>", SPEECH.encode() * 2000])
def test_a_file_with_a_wrong_checksum_is_not_kept(config, server, tmp_path, content):
    server.content = content
    with pytest.raises(Unavailable, match="wrong checksum"):
        quiet(config())
    assert not (tmp_path / "tfds").exists()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nFirst", "IncompleteRead"),
    ],
)
def test_a_malformed_or_incomplete_answer_is_a_failed_download(answer, reason, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with listener.accept()[0] as connection:
                connection.recv(2**16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(shakespeare, "URL", f"http://127.0.0.1:{listener.getsockname()[1]}/input.txt")
        with pytest.raises(Unavailable, match=rf"cannot be downloaded from .*{reason}") as error:
            shakespeare.download()
        thread.join()
    assert "\n" not in error.value.problems[0]


class Answer:
    """An HTTP response that repeats one chunk without end."""

    def __init__(self, chunk):
        self.chunk, self.n_chunks = chunk, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, size):
        self.n_chunks += 1
        assert self.n_chunks < 1000, "the download does not stop reading"
        return self.chunk


def test_a_slow_download_is_abandoned(monkeypatch):
    now = iter(range(0, 10_000, 5))  # every call is five seconds after the last
    monkeypatch.setattr(shakespeare.urllib.request, "urlopen", lambda url, timeout: Answer(b"x"))
    monkeypatch.setattr(shakespeare.time, "monotonic", lambda: next(now))
    with pytest.raises(Unavailable, match="13 of 1115394 bytes in 60 s"):
        shakespeare.download()


def test_an_endless_download_is_abandoned(monkeypatch):
    monkeypatch.setattr(shakespeare.urllib.request, "urlopen", lambda url, timeout: Answer(b"x" * 2**16))
    with pytest.raises(Unavailable, match="wrong checksum"):
        shakespeare.download()


def test_without_a_network_the_error_lists_three_alternatives(config, no_network, tmp_path):
    with pytest.raises(UserError) as error:
        quiet(config())
    message = str(error.value)
    assert "Temporary failure in name resolution" in message
    assert "run once with a network connection" in message
    assert "TFDS_DATA_DIR or config.data.data_dir" in message
    assert 'config.data.source="text:PATH"' in message
    assert 'config.data.offline="python_docs"' in message
    assert not (tmp_path / "tfds").exists()


def test_without_a_network_a_config_may_fall_back_with_a_warning(config, no_network, monkeypatch):
    monkeypatch.setattr(sources, "find_python_docs", lambda config: sources.Source("python_docs", "d", _documents))
    lines = []
    corpus = open_corpus(config(offline="python_docs"), say=lines.append)
    assert corpus.name == "python_docs (fallback)"
    assert text_of(corpus, "train") == "for statements"
    assert len(corpus.notices) == 1
    assert "WARNING: training on python_docs INSTEAD of tfds:tiny_shakespeare" in corpus.notices[0]
    assert corpus.notices[0] in lines


def _documents():
    return {"train": ["for statements"]}


def test_only_a_missing_network_leads_to_the_fallback(config, no_network):
    with pytest.raises(UserError, match="is not a file, nor a folder"):
        quiet(config(source="text:/no/such/file", offline="python_docs"))


@pytest.fixture
def prepared(tmp_path):
    """Prepare version 1.0.0 below a TFDS root."""
    directory = tmp_path / "tfds" / "tiny_shakespeare" / "1.0.0"
    directory.mkdir(parents=True)
    shakespeare._prepare(SPEECH, directory)
    return directory


@pytest.mark.parametrize(
    "missing", ["dataset_info.json", "features.json", "tiny_shakespeare-validation.array_record-00000-of-00001"]
)
def test_an_incomplete_directory_is_an_error(config, prepared, no_network, missing):
    (prepared / missing).unlink()
    with pytest.raises(UserError, match=r"1\.0\.0 is .*prepare it again"):
        quiet(config())


@pytest.mark.parametrize("key", ["name", "splits", "shardLengths"])
def test_a_description_without_a_needed_key_is_an_error(config, prepared, key):
    info = prepared / "dataset_info.json"
    info.write_text(info.read_text().replace(f'"{key}"', '"other"'))
    with pytest.raises(UserError, match=rf"dataset_info\.json is corrupted: .*has no '{key}'; delete") as error:
        quiet(config())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "[" * 10**5,
        lambda text: text[: len(text) // 2],
        lambda text: "\0" * len(text),
        lambda text: text.replace('"1"', "[1]").replace('"text"', "7"),
        lambda text: text.replace('"1"', '"²"').replace('"features"', '"feet"'),
        lambda text: text.replace('"1"', f'"{"9" * 5000}"').replace('"featuresDict": {', '"featuresDict": 1, "x": {'),
        lambda text: text.replace('"splits": [', '"splits": {"a": 1}, "x": [').replace('"featuresDict"', '"f"'),
    ],
)
def test_corrupted_metadata_is_an_error_of_one_line(config, prepared, name, damage):
    path = prepared / name
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=r"is corrupted: .*prepare it again|has no feature .text.") as error:
        quiet(config())
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_truncated_shard_is_an_error(config, prepared):
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
    assert sources.prepared_directory(tmp_path, "wiki/en").name == "1.10.0"
    assert sources.prepared_directory(tmp_path, "wiki/en:1.9.0").name == "1.9.0"
    assert sources.prepared_directory(tmp_path, "wiki/de") is None


def test_another_unprepared_dataset_is_an_error_of_one_line_with_the_command(config, no_network):
    with pytest.raises(UserError) as error:
        quiet(config(source="tfds:lm1b"))
    assert "tfds build lm1b --file_format=array_record --data_dir=" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
