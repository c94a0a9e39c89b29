"""The cache: entries are complete, made once by several processes, and rebuilt if they are damaged."""

import errno
import os
import threading

import pytest

from lm.data import cache
from lm.system import files


def write_whole(work):
    (work / "a").write_text("whole")


def test_a_directory_appears_complete_or_not_at_all(tmp_path):
    target = tmp_path / "entry"

    def fail_half_way(work):
        write_whole(work)
        assert not target.exists()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        cache.publish(target, fail_half_way)
    assert list(tmp_path.iterdir()) == []
    cache.publish(target, write_whole)
    assert [path.name for path in target.iterdir()] == ["a"]


def test_two_that_publish_the_same_directory_do_not_mix_files(tmp_path):
    """The second one publishes while the first one writes."""
    target = tmp_path / "entry"

    def write(text):
        return lambda work: [(work / name).write_text(text) for name in ("a", "b")]

    def write_late(work):
        write("1" * 1000)(work)
        cache.publish(target, write("2" * 1000))

    cache.publish(target, write_late)
    assert (target / "a").read_text() == (target / "b").read_text() == "2" * 1000
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


@pytest.mark.parametrize("damage", ["none", "a has another sha256 than when it was written"])
def test_processes_that_share_the_cache_make_or_rebuild_an_entry_once(tmp_path, damage):
    """Threads simulate processes: each opens the lock file itself, and flock locks open files, not
    processes.
    """
    target, made, lines, warnings = tmp_path / "entry", [], [], []
    waiting = threading.Event()

    def say(line):
        if line.startswith("WARNING"):
            warnings.append(line)
        else:
            lines.append(line)
            waiting.set()

    def write(work):
        made.append(work)
        assert waiting.wait(timeout=60)  # another thread waits for the lock
        write_whole(work)

    if damage != "none":
        cache.make_entry(target, write_whole, say)
        (target / "a").write_text("whale")
    makers = [
        threading.Thread(target=cache.make_entry, args=(target, write, say)) for _ in range(3)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert len(made) == 1
    assert set(lines) == {f"waiting for another process to write {target}"}
    expected = [f"WARNING: the cache entry {target} is corrupted ({damage}); it is rebuilt"]
    assert warnings == (expected if damage != "none" else [])
    assert (target / "a").read_text() == "whole"
    assert {path.name for path in tmp_path.iterdir()} <= {"entry", ".entry.lock"}


def test_without_locks_an_entry_is_still_made(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    cache.make_entry(tmp_path / "entry", write_whole, print)
    assert (tmp_path / "entry" / "a").read_text() == "whole"


def test_an_entry_that_appears_late_on_a_shared_file_system_is_kept(tmp_path, monkeypatch):
    """Another host has published it: renaming fails because the entry exists, and it becomes
    visible a moment later.
    """
    target, answers = tmp_path / "entry", iter([[], [], ["entry"]])
    cache.publish(target, lambda work: (work / "a").write_text("first"))
    monkeypatch.setattr(cache.files.os, "listdir", lambda _: next(answers))
    cache.publish(target, lambda work: (work / "a").write_text("second"))
    assert (target / "a").read_text() == "first"


def test_files_that_appear_late_on_a_shared_file_system_are_not_damage(tmp_path, monkeypatch):
    """Another process made the entry while this one waited for it."""
    target, waiting, locked = tmp_path / "entry", threading.Event(), threading.Event()
    answers = iter(["a is missing", "a is missing", None])

    def say(line):
        assert "WARNING" not in line
        waiting.set()

    def make_first():
        with cache.lock(target, pytest.fail):
            locked.set()
            assert waiting.wait(timeout=60)
            cache.publish(target, write_whole)

    other = threading.Thread(target=make_first)
    other.start()
    assert locked.wait(timeout=60)
    monkeypatch.setattr(cache, "find_damage", lambda _: next(answers))
    cache.make_entry(target, lambda _: pytest.fail("written again"), say)
    other.join(60)
    assert (target / "a").read_text() == "whole"


def test_files_that_were_added_or_are_absent_are_damage(tmp_path):
    """Changes of the files themselves: tests/data/test_tokens.py."""
    target = tmp_path / "entry"
    cache.make_entry(target, write_whole, print)
    assert cache.find_damage(target) is None
    (target / "b").write_text("added")
    assert cache.find_damage(target) == "checksums.json does not list b"
    # another process is rebuilding it
    assert cache.find_damage(tmp_path / "absent") == "checksums.json is missing"


def test_the_digest_of_a_large_file_is_cached_until_the_file_changes(tmp_path, monkeypatch):
    """Also if the size and the modification time stay the same: written in place, or replaced by
    another file.
    """
    monkeypatch.setattr(cache, "_MIN_CACHED_DIGEST", 3)
    path = tmp_path / "shard.bin"
    path.write_bytes(b"abc")
    # sha256("abc") of FIPS 180-2, appendix B.1
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert cache.digest_of(path, tmp_path / "cache") == digest
    (entry,) = (tmp_path / "cache" / "digests").iterdir()
    for damaged in (b"", b"1" + entry.read_bytes()[1:], b"\xff"):
        entry.write_bytes(damaged)
        assert cache.digest_of(path, tmp_path / "cache") == digest
    with monkeypatch.context() as patch:
        patch.setattr(
            cache.hashlib, "file_digest", lambda *_: pytest.fail("the file was read again")
        )
        assert cache.digest_of(path, tmp_path / "cache") == digest
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    other = tmp_path / "other.bin"
    other.write_bytes(b"abe")
    os.utime(other, ns=times)
    path.write_bytes(b"abd")
    os.utime(path, ns=times)
    assert cache.digest_of(path, tmp_path / "cache") != digest
    other.replace(path)
    assert cache.digest_of(path, tmp_path / "cache") == cache.hashlib.sha256(b"abe").hexdigest()


def test_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.user_cache(None) == tmp_path / "lm"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.user_cache(None) == tmp_path / ".cache" / "lm"
    assert files.user_cache("~/elsewhere") == tmp_path / "elsewhere"
