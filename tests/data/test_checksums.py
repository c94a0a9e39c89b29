"""Checksums of cached files find every change."""

import random

import pytest

from lm.data import checksums


@pytest.mark.parametrize("size", [0, 1, checksums.BLOCK, checksums.BLOCK + 1, 3 * checksums.BLOCK])
def test_every_changed_byte_is_found(tmp_path, size):
    content = random.Random(0).randbytes(size)
    (tmp_path / "tokens.bin").write_bytes(content)
    checksums.record(tmp_path)
    assert checksums.find_damage(tmp_path) is None
    for at in {0, size // 2, size - 1} & set(range(size)):
        changed = bytearray(content)
        changed[at] ^= 0x10
        (tmp_path / "tokens.bin").write_bytes(changed)
        start = at // checksums.BLOCK * checksums.BLOCK
        assert checksums.find_damage(tmp_path) == f"tokens.bin has changed in the MiB at byte {start}"


def test_repeated_checks_of_a_very_large_file_read_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", 8)
    monkeypatch.setattr(checksums, "MAX_BLOCKS", 4)
    (tmp_path / "tokens.bin").write_bytes(bytes(100))
    checksums.record(tmp_path)
    chosen = [checksums._chosen(13) for _ in range(200)]
    assert all(len(blocks) == 4 and blocks == sorted(set(blocks)) for blocks in chosen)
    assert set().union(*chosen) == set(range(13))
    (tmp_path / "tokens.bin").write_bytes(bytes(60) + b"x" + bytes(39))
    assert {checksums.find_damage(tmp_path) for _ in range(200)} == {
        None,
        "tokens.bin has changed in the MiB at byte 56",
    }


def test_a_file_without_a_checksum_is_damage(tmp_path):
    """It was added, or checksums.json has lost it."""
    checksums.record(tmp_path)
    (tmp_path / "tokens.bin").write_bytes(b"x")
    assert checksums.find_damage(tmp_path) == "checksums.json does not list tokens.bin"


def test_a_directory_that_another_process_removes_meanwhile_is_damaged(tmp_path, monkeypatch):
    """Another process has found the same damage and moves the directory away to rebuild it."""
    entry, read_json = tmp_path / "entry", checksums.read_json
    entry.mkdir()
    (entry / "tokens.bin").write_bytes(b"text")
    checksums.record(entry)

    def read_and_remove(*arguments):
        recorded = read_json(*arguments)
        entry.rename(tmp_path / "aside")
        return recorded

    monkeypatch.setattr(checksums, "read_json", read_and_remove)
    assert checksums.find_damage(entry) == "checksums.json is missing"
