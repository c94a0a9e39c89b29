"""Mirrors: what is copied can be fetched, nothing torn is, one run owns a mirror, and failures do
not stop training.
"""

import contextlib
import itertools
import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from running import assert_same_run, checkpoint_steps, flip_a_bit, several
from tiny import with_keys

from lm.config import Config
from lm.data import shakespeare
from lm.system import urls
from lm.system.errors import TemporaryError, UserError
from lm.system.files import to_json, with_checksum
from lm.workdir import mirror as mirror_module
from lm.workdir.checkpoints import Checkpoints
from lm.workdir.metrics import to_line
from lm.workdir.mirror import Mirror
from lm.workdir.saved_run import holds_run


class Kept(MemoryFileSystem):
    """A file system behind a network, for what is tested: in memory, but with a name that is no
    reason to refuse it.
    """

    protocol = "kept"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("kept://", "memory://"))


fsspec.register_implementation("kept", Kept)


def write_run(workdir: Path, *steps: int) -> Path:
    """Make what a mirror reads of a run with checkpoints at these steps; other checkpoints are
    deleted.
    """
    for step in set(steps) - set(checkpoint_steps(workdir) if workdir.exists() else []):
        folder = workdir / "checkpoints" / str(step) / "state" / "d"
        folder.mkdir(parents=True)
        (folder / "array").write_bytes(bytes([step]) * 1000)
        (folder.parent / "_METADATA").write_text("the same for all steps")
    for step in set(checkpoint_steps(workdir)) - set(steps):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    (workdir / "config.json").write_text("{}")
    (workdir / "metrics.jsonl").write_text(
        "".join(f"{to_line({'step': step, 'loss': 1.0})}\n" for step in steps)
    )
    (workdir / "summary.json").write_text(str(steps))
    (workdir / "samples").mkdir(exist_ok=True)
    (workdir / "samples" / "step.txt").write_text("a text")
    (workdir / ".lock").touch()
    return workdir


def content(workdir: Path) -> dict[str, bytes]:
    found = {
        str(path.relative_to(workdir)): path.read_bytes()
        for path in workdir.rglob("*")
        if path.is_file()
    }
    return {name: text for name, text in found.items() if name != ".lock"}


def copy(url: str, workdir: Path) -> list[str]:
    """Copy a run; return the lines for the user."""
    lines, mirror = [], Mirror(url, workdir)
    mirror.claim(Config())
    mirror.start(lambda steps: None, lines.append)
    mirror.finish()
    return lines


def fetch(url: str, workdir: Path) -> list[str]:
    lines = []
    assert Mirror(url, workdir).fetch(Config(), lines.append)
    return lines


@pytest.fixture(scope="module")
def s3():
    """The URL of a bucket of an S3 server on this machine."""
    pytest.importorskip(
        "s3fs",
        reason="pip install '.[s3]': its botocore needs an older python-dateutil than the rest",
    )
    server = pytest.importorskip(
        "moto.server", reason="pip install 'moto[s3]' flask flask-cors"
    ).ThreadedMotoServer(port=0, verbose=False)
    server.start()
    keys = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            keys | {"AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port())}
        ).items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}/deep"
    return (
        f"file://{tmp_path}/mirror/deep" if request.param == "file" else f"kept://{tmp_path.name}"
    )


def test_what_was_copied_is_fetched_and_what_the_run_deleted_is_deleted(url, tmp_path):
    run = tmp_path / "run"
    assert not Mirror(url, run).fetch(Config(), print)
    Mirror(url, run).claim(Config())
    assert not Mirror(url, run).fetch(Config(), print)  # there is no copy yet
    for steps in ((4, 8), (8, 12)):
        write_run(run, *steps)
        assert copy(url, run) == [f"{url} has a copy of step {steps[-1]}"]
        (tmp_path / f"fetched {steps}" / "samples").mkdir(parents=True)  # of a start without a run
        (tmp_path / f"fetched {steps}" / "samples" / "old.txt").write_text("an old text")
        lines = fetch(url, tmp_path / f"fetched {steps}")
        assert lines == [f"starting from the copy in {url}, of step {steps[-1]}"]
        assert content(tmp_path / f"fetched {steps}") == content(run)
    system, root = fsspec.core.url_to_fs(url)
    n_contents = len(set(content(run).values()))
    assert len(system.ls(f"{root}/files")) == n_contents
    assert len(system.ls(root)) == 2  # and one manifest
    assert not Mirror(url, run).fetch(Config(), print)  # the workdir holds a run


def test_a_bucket_is_not_made(s3, tmp_path):
    with pytest.raises(UserError, match="--mirror s3://typo/run: NoSuchBucket"):
        Mirror("s3://typo/run", tmp_path).claim(Config())
    assert fsspec.filesystem("s3").ls("") == ["bucket"]


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_at(number: int, monkeypatch, torn: bool):
    """Kill the process at its write number `number`, which leaves a part of the content or nothing."""
    local, calls = LocalFileSystem, itertools.count(1)

    def dying(name):
        action = getattr(local, name)

        def call(self, path, *content):
            if next(calls) < number:
                return action(self, path, *content)
            if torn and name != "rm_file":
                action(self, path, *content)
                target = path if name == "pipe_file" else content[0]
                os.truncate(target, os.path.getsize(target) // 2)
            raise Killed

        return call

    with monkeypatch.context() as patch:
        for name in ("pipe_file", "put_file", "rm_file"):
            patch.setattr(local, name, dying(name))
        with contextlib.suppress(Killed):
            yield


@pytest.mark.parametrize("torn", [False, True])
def test_a_copy_that_is_killed_at_any_write_leaves_the_last_complete_one(
    tmp_path, monkeypatch, torn
):
    old, run = write_run(tmp_path / "old", 4, 8), write_run(tmp_path / "run", 8, 12)
    known, number, killed = [content(old), content(run)], 0, True
    while killed:
        number, killed = number + 1, True
        url = f"file://{tmp_path}/{number}"
        copy(url, old)
        with killed_at(number, monkeypatch, torn):
            mirror = Mirror(url, run)
            mirror.claim(Config())
            mirror.finish()
            killed = False
        fetch(url, tmp_path / f"fetched {number}")
        assert content(tmp_path / f"fetched {number}") in known
        copy(url, run)  # the next start
        fetch(url, tmp_path / f"again {number}")
        assert content(tmp_path / f"again {number}") == content(run)
        assert len(list((tmp_path / str(number)).iterdir())) == 2
    assert number > 10


def stored(mirror: Path, name: str) -> Path:
    """Return where the content of a file is."""
    (manifest,) = mirror.glob("manifest-*")
    return mirror / "files" / json.loads(manifest.read_text())["files"][name]["sha256"]


def test_damaged_files_of_checkpoints_are_left_out_with_a_warning(tmp_path):
    """The checkpoint is then found to be corrupted, and an older one is restored."""
    url, run, array = (
        f"file://{tmp_path}/mirror",
        write_run(tmp_path / "run", 4, 8),
        "checkpoints/8/state/d/array",
    )
    copy(url, run)
    for number, damage in enumerate((flip_a_bit, Path.unlink, lambda path: os.truncate(path, 5))):
        shutil.copytree(tmp_path / "mirror", tmp_path / str(number))
        damage(stored(tmp_path / str(number), array))
        lines = fetch(f"file://{tmp_path}/{number}", tmp_path / f"fetched {number}")
        assert lines[0].startswith(
            f"WARNING: file://{tmp_path}/{number}: {array} is missing or damaged"
        )
        assert content(tmp_path / f"fetched {number}") == {
            x: y for x, y in content(run).items() if x != array
        }


@pytest.mark.parametrize("name", ["loss.png", "samples/step.txt", "tensorboard/events.1"])
@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink])
def test_a_damaged_picture_or_sample_is_named_and_the_rest_is_restored(tmp_path, name, damage):
    url, run = f"file://{tmp_path}/mirror", write_run(tmp_path / "run", 4)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("shown, and nothing is computed from it")
    copy(url, run)
    damage(stored(tmp_path / "mirror", name))
    lines = fetch(url, tmp_path / "new")
    assert lines[0].startswith(f"WARNING: {url}: {name} is missing or damaged")
    assert content(tmp_path / "new") == {x: y for x, y in content(run).items() if x != name}


def escaping(path: str):
    """Return a function that moves a file of a manifest, which stays valid, to another path."""

    def change(mirror: Path) -> None:
        (manifest,) = mirror.glob("manifest-*")
        written = json.loads(manifest.read_text())
        written["files"][path] = written["files"].pop("metrics.jsonl")
        del written["crc32"]
        manifest.write_text(to_json(with_checksum(written)))

    return change


@pytest.mark.parametrize(
    ("reason", "damage"),
    [
        (
            "metrics.jsonl is missing or damaged",
            lambda mirror: flip_a_bit(stored(mirror, "metrics.jsonl")),
        ),
        ("config.json is missing or damaged", lambda mirror: shutil.rmtree(mirror / "files")),
        ("has no intact manifest", lambda mirror: os.truncate(next(mirror.glob("manifest-*")), 99)),
        ("has no intact manifest", lambda mirror: flip_a_bit(next(mirror.glob("manifest-*")))),
        ("has no intact manifest", escaping("../../outside")),
        ("has no intact manifest", escaping("/tmp/outside")),
    ],
)
def test_a_mirror_that_cannot_be_restored_is_refused_and_starts_no_run(tmp_path, reason, damage):
    url = f"file://{tmp_path}/mirror"
    copy(url, write_run(tmp_path / "run", 4, 8))
    damage(tmp_path / "mirror")
    with pytest.raises(UserError, match=f"--mirror {url}.* {reason}.*give another URL"):
        Mirror(url, tmp_path / "new").fetch(Config(), print)
    assert not holds_run(tmp_path / "new")


def test_a_mirror_belongs_to_one_run(tmp_path):
    url, run = f"file://{tmp_path}/mirror", write_run(tmp_path / "run", 4)
    copy(url, run)
    with pytest.raises(UserError, match="belongs to another run") as error:
        Mirror(url, run).claim(with_keys(Config(), train_seed=7))
    assert "config.train.seed: 0 -> 7" in str(error.value)
    with pytest.raises(UserError, match=r"config\.train\.seed: 0 -> 7"):
        Mirror(url, tmp_path / "new").fetch(with_keys(Config(), train_seed=7), print)
    assert fetch(url, tmp_path / "fetched")
    with pytest.raises(UserError, match=r"config\.train\.steps: \d+ -> 3"):
        Mirror(url, run).claim(with_keys(Config(), train_steps=3))


def test_of_two_starts_the_later_one_owns_the_mirror(tmp_path):
    url, run = f"file://{tmp_path}/mirror", write_run(tmp_path / "run", 4)
    lines, first, second = [], Mirror(url, run), Mirror(url, write_run(tmp_path / "other", 4, 8))
    first.claim(Config())
    second.claim(Config())
    first.start(lambda steps: None, lines.append)
    assert not first.finish()
    assert "another start of a run owns it now" in lines[-1]
    assert second.finish()
    fetch(url, tmp_path / "fetched")
    assert content(tmp_path / "fetched") == content(tmp_path / "other")


def test_an_old_copy_of_a_workdir_does_not_replace_a_newer_one(tmp_path):
    url, run = f"file://{tmp_path}/mirror", write_run(tmp_path / "run", 4, 8)
    copy(url, run)
    assert copy(url, write_run(tmp_path / "old", 4)) == [f"{url} has a copy of step 8"]
    fetch(url, tmp_path / "fetched")
    assert content(tmp_path / "fetched") == content(run)


@pytest.fixture
def flaky(monkeypatch):
    """A switch: while it is set, nothing can be written to a mirror in memory."""
    down, write = threading.Event(), fsspec.get_filesystem_class("memory").pipe_file

    def pipe_file(self, *args, **kwargs):
        if down.is_set():
            raise ConnectionError("the network is gone")
        return write(self, *args, **kwargs)

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", pipe_file)
    monkeypatch.setattr(mirror_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(mirror_module, "RETRY_SECONDS", 0.02)
    return down


def wait_for(condition) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_mirror_that_disappears_is_one_warning_and_is_copied_to_again(flaky, tmp_path):
    url, run, lines, held = f"kept://{tmp_path.name}", write_run(tmp_path / "run", 4), [], []
    mirror = Mirror(url, run)
    mirror.claim(Config())
    mirror.start(held.append, lines.append)
    wait_for(lambda: held[-2:] == [[4], []])  # kept while it was copied
    flaky.set()
    write_run(run, 4, 8)
    wait_for(lambda: held.count([4, 8]) > 3)  # it is tried again and again
    assert lines == [
        f"WARNING: {url}: ConnectionError: the network is gone; training continues, and the run is "
        "copied again later"
    ]
    assert not mirror.finish()
    assert "lacks the checkpoints of steps 8" in lines[-1]
    assert "--resume" in lines[-1]
    fetch(url, tmp_path / "fetched")
    assert checkpoint_steps(tmp_path / "fetched") == [4]
    flaky.clear()
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    again, lines = Mirror(url, run), []
    again.claim(Config())
    again.start(held.append, lines.append)
    wait_for(lambda: held[-2:] == [[4, 8], []])
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    write_run(run, 8, 12)
    assert again.finish()
    assert lines == [
        f"WARNING: {url} was emptied; copying everything again",
        f"{url} has a copy of step 12",
    ]
    fetch(url, tmp_path / "again")
    assert content(tmp_path / "again") == content(run)


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_no_failure(flaky, tmp_path, monkeypatch):
    url, run, lines = f"kept://{tmp_path.name}", write_run(tmp_path / "run", 4, 8), []
    describe = mirror_module._describe

    def late(content):
        if content == run / "checkpoints/4/state/d/array" and content.exists():
            shutil.rmtree(run / "checkpoints" / "4")
        return describe(content)

    monkeypatch.setattr(mirror_module, "_describe", late)
    mirror = Mirror(url, run)
    mirror.claim(Config())
    mirror.start(lambda steps: None, lines.append)
    wait_for(lambda: mirror._manifest["steps"] == [8])
    assert mirror.finish()
    assert lines == [f"{url} has a copy of step 8"]


def test_a_mirror_that_cannot_be_reached_stops_a_start(flaky, tmp_path):
    flaky.set()
    with pytest.raises(
        TemporaryError, match="--mirror kept://x: ConnectionError: the network is gone"
    ):
        Mirror("kept://x", tmp_path).claim(Config())
    with pytest.raises(UserError, match="--mirror file:///proc/x: "):
        Mirror("file:///proc/x", tmp_path).claim(Config())


# ---- Runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s4://bucket/run", "there is no driver"),
        ("dir://run", "there is no driver"),  # of a file system inside of another
        ("reference://run", "there is no driver"),
        ("/mirror", "it is not a URL"),
        ("mirror", "it is not a URL"),
        ("", "it is not a URL"),
        ("file:/mirror", "it is not a URL"),
        ("memory://run", "the memory of this process"),
        ("file:///", "it names no folder"),
        ("file:////./", "it names no folder"),
        ("local:///..", "it names no folder"),
        ("s3://", "it names no folder"),
        ("file://mirror", "give file:///"),
        ("file://./mirror", "give file:///"),
        ("file://~/mirror", "give file:///"),
        ("file://{run}", "lies in --workdir"),
        ("local://{run}/", "lies in --workdir"),
        ("file://{run}/mirror", "lies in --workdir"),
        ("file://{parent}", "lies in --workdir"),
        ("file://{parent}/link/mirror", "lies in --workdir"),
        ("file://{parent}/other", "it holds a run"),
    ],
)
def test_a_url_that_cannot_keep_a_copy_is_one_line_before_anything_is_written(
    train, tmp_path, url, problem
):
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    write_run(tmp_path / "other", 4)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    url = url.format(run=tmp_path / "run", parent=tmp_path)
    code, output = train(tmp_path / "run", f"--mirror={url}")
    assert (code, output.count("\n"), (tmp_path / "run").exists()) == (2, 1, False)
    assert url in output
    assert problem in output


def test_a_server_that_cannot_be_written_to_is_a_mistake(tmp_path, monkeypatch):
    def write(*_, **__):  # as HTTP
        raise NotImplementedError

    monkeypatch.setattr(Kept, "pipe_file", write)
    with pytest.raises(UserError, match="nothing can be written there") as error:
        Mirror("kept://readonly", tmp_path).claim(Config())
    assert error.value.code == 2


# ---- Servers that do not answer ------------------------------------------------------------------


@pytest.fixture
def silent(monkeypatch):
    """The address of a server that accepts connections and never answers; a call may take half a
    second.
    """
    monkeypatch.setattr(urls, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_never_answers_is_an_error_with_advice(silent, train, tmp_path, monkeypatch):
    """Mirrors, texts, patterns of texts, what is compressed, and the download of Tiny Shakespeare
    have one limit.
    """
    monkeypatch.setattr(shakespeare, "URL", f"{silent}/input.txt")
    monkeypatch.setattr(shakespeare, "DEADLINE", 0.5)
    cases = [
        [f"--mirror={silent}/run"],
        [f"--config.data.source=text:{silent}/text.txt"],
        [f"--config.data.source=jsonl:{silent}/texts/*.jsonl.gz"],
        [f"--config.data.source=hf:{silent}/set/"],
        ["--config.data.source=tfds:tiny_shakespeare", f"--config.data.data_dir={tmp_path}/tfds"],
    ]
    for words in cases:
        began = time.monotonic()
        code, output = train(tmp_path / "run", *words)
        assert (code, "no answer within 0 s" in output or "no answer within 1 s" in output) == (
            2 if "tfds" in words[0] else 1,
            True,
        ), output
        assert time.monotonic() - began < 30


def test_a_server_that_becomes_silent_during_a_copy_is_a_failure_of_the_copy(tmp_path, monkeypatch):
    url, run = f"kept://{tmp_path.name}", write_run(tmp_path / "run", 4)
    mirror = Mirror(url, run)
    mirror.claim(Config())
    monkeypatch.setattr(urls, "ANSWER_SECONDS", 0.2)
    end = threading.Event()
    monkeypatch.setattr(Kept, "put_file", lambda *_, **__: end.wait(60))
    lines = []
    mirror.start(lambda steps: None, lines.append)
    assert not mirror.finish()
    assert "TimeoutError: no answer within 0 s" in lines[-1]
    end.set()


def test_a_file_that_arrives_slowly_has_no_limit(tmp_path, monkeypatch):
    url, run = f"kept://{tmp_path.name}", write_run(tmp_path / "run", 4)
    monkeypatch.setattr(urls, "ANSWER_SECONDS", 0.4)
    put = MemoryFileSystem.put_file

    def slow(self, lpath, rpath, callback, **_):
        for _ in range(4):
            time.sleep(0.2)
            callback.relative_update(1)
        return put(self, lpath, rpath)

    monkeypatch.setattr(Kept, "put_file", slow)
    assert copy(url, run) == [f"{url} has a copy of step 4"]


def test_a_run_goes_on_without_its_mirror_and_says_so_at_the_end(
    flaky, bench, train, tmp_path, monkeypatch
):
    url, save = f"kept://{tmp_path.name}", Checkpoints.save

    def save_and_fail(self, step, *args):
        flaky.set()
        return save(self, step, *args)

    monkeypatch.setattr(Checkpoints, "save", save_and_fail)
    code, output = train(tmp_path / "run", f"--mirror={url}")
    assert code == 1
    assert (
        f"WARNING: {url}: ConnectionError: the network is gone. It lacks the checkpoints of steps"
        in output
    )
    assert_same_run(tmp_path / "run", bench.reference())
    monkeypatch.undo()
    code, output = train(tmp_path / "run", f"--mirror={url}", "--resume")
    assert (code, f"{url} has a copy of step 12" in output) == (0, True)
    assert_same_run(tmp_path / "run", bench.reference())


@pytest.mark.slow
def test_a_run_that_was_killed_and_deleted_starts_from_its_mirror(bench, tmp_path):
    """The same command on an empty workdir gives the bits of an uninterrupted run."""
    mirror = f"--mirror=file://{tmp_path}/mirror"
    with (
        bench.start(tmp_path / "run", mirror, at="SLEEP log 12") as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        wait_for(lambda: "sleeping" in process.stdout.readline())

        def manifest():
            return "".join(path.read_text() for path in (tmp_path / "mirror").glob("manifest-*"))

        wait_for(lambda: "checkpoints/8/" in manifest())
    shutil.rmtree(tmp_path / "run")
    done = bench.train(tmp_path / "run", mirror)
    assert done.returncode == 0, done.stderr
    assert f"starting from the copy in file://{tmp_path}/mirror, of step 8" in done.stdout
    assert_same_run(tmp_path / "run", bench.reference())
    assert checkpoint_steps(tmp_path / "run") == checkpoint_steps(bench.reference())


@pytest.mark.slow
def test_the_first_of_several_processes_copies_and_fetches(bench, tmp_path):
    for _ in range(2):
        with several(bench, tmp_path / "run", 2, f"--mirror=file://{tmp_path}/mirror") as running:
            assert [process.wait(600) for process in running] == [0, 0]
        output = (tmp_path / "run.0.log").read_text()
        assert f"file://{tmp_path}/mirror has a copy of step 12" in output
        shutil.rmtree(tmp_path / "run")
    assert "of step 12\n" in output.partition("starting from the copy in")[2]
