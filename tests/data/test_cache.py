"""The cache: entries are complete, made once by several processes, and rebuilt if they are damaged."""

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

from lm.data import cache


def test_a_directory_appears_complete_or_not_at_all(tmp_path):
    target = tmp_path / "entry"

    def fail_half_way(work):
        (work / "one").write_text("1")
        assert not target.exists()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        cache.publish(target, fail_half_way)
    assert list(tmp_path.iterdir()) == []
    cache.publish(target, lambda work: (work / "one").write_text("1"))
    assert [path.name for path in target.iterdir()] == ["one"]


def _publish_between_the_others(target, barrier, number):
    def write(work):
        barrier.wait(timeout=120)  # neither process has found the directory
        (work / "a").write_text(f"{number}" * 1000)
        (work / "b").write_text(f"{number}" * 1000)

    cache.publish(target, write)


def test_two_processes_that_publish_the_same_directory_do_not_mix_files(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    target = tmp_path / "entry"
    processes = [
        context.Process(target=_publish_between_the_others, args=(target, barrier, number)) for number in (1, 2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (target / "a").read_text() == (target / "b").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def _make_damaged_entry(target, barrier, warnings):
    barrier.wait(timeout=120)
    cache.make_entry(target, lambda work: (work / "a").write_text("whole"), print, warnings.put)
    assert (target / "a").read_text() == "whole"


def test_processes_that_find_the_same_damage_rebuild_the_entry_once(tmp_path):
    target = tmp_path / "entry"
    cache.make_entry(target, lambda work: (work / "a").write_text("whole"), print, pytest.fail)
    (target / "a").write_text("whale")
    context = multiprocessing.get_context("spawn")
    barrier, warnings = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_make_damaged_entry, args=(target, barrier, warnings)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    warning = f"WARNING: the cache entry {target} is corrupted (a has changed in the MiB at byte 0); it is rebuilt"
    assert warnings.get(timeout=10) == warning
    assert warnings.empty()
    assert {path.name for path in tmp_path.iterdir()} <= {"entry", ".entry.lock"}


def test_processes_that_share_the_cache_make_an_entry_once(tmp_path):
    """Threads simulate processes: each opens the lock file itself, and flock locks open files, not processes."""
    target, made, lines = tmp_path / "entry", [], []
    waiting = threading.Event()

    def say(line):
        lines.append(line)
        waiting.set()

    def write(work):
        made.append(work)
        assert waiting.wait(timeout=60)  # the other thread waits for the lock
        (work / "a").write_text("whole")

    makers = [threading.Thread(target=cache.make_entry, args=(target, write, say, pytest.fail)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert len(made) == 1
    assert lines == [f"waiting for another process to write {target}"]
    assert (target / "a").read_text() == "whole"


def test_without_locks_an_entry_is_still_made(tmp_path, monkeypatch):
    def acquire(*_, **__):
        raise NotImplementedError("this file system has no locks")

    monkeypatch.setattr(cache.filelock.FileLock, "acquire", acquire)
    cache.make_entry(tmp_path / "entry", lambda work: (work / "a").write_text("whole"), print, pytest.fail)
    assert (tmp_path / "entry" / "a").read_text() == "whole"


def test_an_entry_that_appears_late_on_a_shared_file_system_is_kept(tmp_path, monkeypatch):
    """Another host has published it: renaming fails because the entry exists, and it becomes visible a moment later."""
    target, answers = tmp_path / "entry", iter([False, False, True])
    cache.publish(target, lambda work: (work / "a").write_text("first"))
    monkeypatch.setattr(cache.files, "_is_listed", lambda _: next(answers))
    cache.publish(target, lambda work: (work / "a").write_text("second"))
    assert (target / "a").read_text() == "first"


def test_files_that_appear_late_on_a_shared_file_system_are_not_damage(tmp_path, monkeypatch):
    """Another process made the entry while this one waited for it."""
    target, waiting = tmp_path / "entry", threading.Event()
    answers = iter(["a is missing", "a is missing", None])

    def make_first():
        with cache.lock(target, pytest.fail):
            locked.set()
            assert waiting.wait(timeout=60)
            cache.publish(target, lambda work: (work / "a").write_text("first"))

    locked = threading.Event()
    other = threading.Thread(target=make_first)
    other.start()
    assert locked.wait(timeout=60)
    monkeypatch.setattr(cache.checksums, "find_damage", lambda _: next(answers))
    cache.make_entry(target, lambda _: pytest.fail("written again"), lambda _: waiting.set(), pytest.fail)
    other.join(60)
    assert (target / "a").read_text() == "first"


def test_mapping_a_file_of_another_size_is_an_error(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(np.arange(10, dtype=np.uint16).tobytes())
    np.testing.assert_array_equal(cache.map_tokens(path, "uint16", (10,)), np.arange(10))
    with pytest.raises(ValueError, match="has 20 bytes, expected 22"):
        cache.map_tokens(path, "uint16", (11,))
    path.write_bytes(b"")
    assert cache.map_tokens(path, "uint16", (0,)).shape == (0,)


def test_the_digest_of_a_large_file_is_cached_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_MIN_CACHED_DIGEST", 3)
    path = tmp_path / "shard.bin"
    path.write_bytes(b"abc")
    # sha256("abc") of FIPS 180-2, appendix B.1
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert cache.digest_of(path, tmp_path / "cache") == digest
    with monkeypatch.context() as patch:
        patch.setattr(cache.hashlib, "file_digest", lambda *_: pytest.fail("the file was read again"))
        assert cache.digest_of(path, tmp_path / "cache") == digest
    path.write_bytes(b"abd")
    later = time.time() + 10
    os.utime(path, (later, later))
    assert cache.digest_of(path, tmp_path / "cache") != digest


def test_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.user_cache(None) == tmp_path / "lm"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.user_cache(None) == tmp_path / ".cache" / "lm"
    assert cache.user_cache("elsewhere").name == "elsewhere"
