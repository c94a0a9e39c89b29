"""malloc is told to keep freed memory, unless the environment already says how it should be."""

import ctypes
import types

import pytest

from lm import runtime as malloc


@pytest.fixture
def told(monkeypatch):
    """What a C library that has mallopt is told."""
    calls = {}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=calls.__setitem__))
    for name in malloc.os.environ:
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES":
            monkeypatch.delenv(name)
    return calls


def test_freed_memory_is_kept(told):
    assert malloc.keeps_freed_memory()
    malloc.keep_freed_memory()
    assert told == {malloc.MMAP_MAX: 0, malloc.TRIM_THRESHOLD: 2**31 - 1, malloc.TOP_PAD: 2**26}


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_environment_has_the_word(told, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not malloc.keeps_freed_memory()
    malloc.keep_freed_memory()
    assert told == {}


def test_another_c_library_is_left_alone(told, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    assert not malloc.keeps_freed_memory()
    malloc.keep_freed_memory()
