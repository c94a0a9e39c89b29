"""The platform of a run, and its allocator: glibc malloc retains freed memory unless the environment configures it."""

import ctypes
import os
import subprocess
import sys
import types
from platform import libc_ver

import jax
import pytest

from lm import runtime
from lm.errors import UserError


@pytest.fixture
def only_cpu(monkeypatch):
    """A machine on which JAX fell back to the CPU."""

    def devices(name):
        raise RuntimeError(f"Backend '{name}' failed to initialize: driver too old.\nAvailable backends are ['cpu'].")

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


@pytest.mark.parametrize(("platform", "backend"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_a_missing_platform_is_an_error_with_the_reason_of_jax(only_cpu, platform, backend):
    with pytest.raises(UserError) as caught:
        runtime.require_platform(platform)
    assert f"--platform {platform}: JAX found cpu: Backend '{backend}' failed to initialize: driver" in str(
        caught.value
    )
    assert runtime.ADVICE[platform] in str(caught.value)


def test_the_variable_that_excludes_a_platform_is_named(only_cpu, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserError, match=r"JAX found cpu \(with JAX_PLATFORMS=cpu\): "):
        runtime.require_platform("gpu")


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initialize backend 'cuda'")])
def test_a_missing_platform_in_the_environment_is_an_error(monkeypatch, error):
    def default_backend():
        raise error

    monkeypatch.setattr(jax, "default_backend", default_backend)
    for platform, prefix in (("gpu", "--platform gpu: "), (None, "")):
        with pytest.raises(UserError, match=f"^{prefix}JAX found no device"):
            runtime.require_platform(platform)


def test_an_available_platform_is_used(monkeypatch):
    runtime.require_platform(None)
    for platform in ("gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        runtime.require_platform(platform)


def test_train_stops_without_the_platform_before_it_creates_the_workdir(train, tmp_path, only_cpu):
    code, output = train(tmp_path / "run", "--platform=gpu")
    assert code == 2
    assert "--platform gpu: JAX found cpu" in output
    assert not (tmp_path / "run").exists()


@pytest.fixture
def mallopt_calls(monkeypatch):
    """The calls of a C library that has mallopt."""
    calls = {}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=calls.__setitem__))
    for name in runtime.os.environ:
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES":
            monkeypatch.delenv(name)
    return calls


FAULTS_OF_SECOND_BLOCK = """
import resource, threading
import numpy as np
from lm import runtime

assert runtime.can_set_malloc()
runtime.retain_freed_memory()
found = []

def allocate():  # 128 MiB, more than a thread's own arena can hold
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.empty(2**27, np.uint8).fill(1)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print(*found)
"""


@pytest.mark.skipif(libc_ver()[0] != "glibc", reason="needs glibc's malloc")
def test_freed_memory_is_kept_for_the_next_block_of_a_thread():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    environment["NUMPY_MADVISE_HUGEPAGE"] = "0"  # count pages of 4 KiB
    command = [sys.executable, "-c", FAULTS_OF_SECOND_BLOCK]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    first, second = map(int, output.split())
    assert first > 1000
    assert second < 100


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
