"""The platform of a run, and its allocator: glibc malloc retains freed memory unless the environment configures it."""

import ctypes
import types

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
