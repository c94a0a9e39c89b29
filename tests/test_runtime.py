"""glibc malloc retains freed memory unless the environment configures it."""

import ctypes
import types

import pytest

from lm import runtime


@pytest.fixture
def mallopt_calls(monkeypatch):
    """The calls of a C library that has mallopt."""
    calls = {}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=calls.__setitem__))
    for name in runtime.os.environ:
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES":
            monkeypatch.delenv(name)
    return calls


def test_freed_memory_is_kept(mallopt_calls):
    assert runtime.can_set_malloc()
    runtime.retain_freed_memory()
    assert mallopt_calls == {runtime.MMAP_MAX: 0, runtime.TRIM_THRESHOLD: 2**31 - 1, runtime.TOP_PAD: 2**26}


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_environment_takes_precedence(mallopt_calls, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not runtime.can_set_malloc()
    runtime.retain_freed_memory()
    assert mallopt_calls == {}


def test_another_c_library_is_left_alone(mallopt_calls, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    assert not runtime.can_set_malloc()
    runtime.retain_freed_memory()
