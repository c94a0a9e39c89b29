import multiprocessing
import os
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
    cache.make_entry(target, lambda work: (work / "a").write_text("whole"), warnings.put)
    assert (target / "a").read_text() == "whole"


def test_processes_that_find_the_same_damage_rebuild_the_entry_once(tmp_path):
    target = tmp_path / "entry"
    cache.make_entry(target, lambda work: (work / "a").write_text("whole"), pytest.fail)
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
