"""The platform of a run, and what happens after a compilation."""

import os
import re
import subprocess
import sys

import jax
import pytest

from lm.system import runtime
from lm.system.errors import UserError


@pytest.fixture
def only_cpu(monkeypatch):
    """A machine on which JAX fell back to the CPU."""

    def devices(name):
        raise RuntimeError(
            f"Backend '{name}' failed to initialize: driver too old.\nAvailable backends are "
            "['cpu']."
        )

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


@pytest.mark.parametrize(
    ("platform", "backend", "excluded"),
    [("gpu", "cuda", None), ("tpu", "tpu", None), ("gpu", "cuda", "cpu")],
)
def test_a_missing_platform_is_an_error_with_the_reason_of_jax(
    only_cpu, monkeypatch, platform, backend, excluded
):
    found = "cpu"
    if excluded:
        monkeypatch.setenv("JAX_PLATFORMS", excluded)
        found = r"cpu \(with JAX_PLATFORMS=cpu\)"
    reason = rf"--platform {platform}: JAX found {found}: Backend '{backend}' failed to initialize: driver"
    with pytest.raises(UserError, match=reason) as caught:
        runtime.require_platform(platform)
    assert runtime.ADVICE[platform] in str(caught.value)


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Unable to initialize backend 'cuda'")]
)
def test_a_missing_platform_in_the_environment_is_an_error(monkeypatch, error):
    def default_backend():
        raise error

    monkeypatch.setattr(jax, "default_backend", default_backend)
    for platform, prefix in (("gpu", "--platform gpu: "), (None, "")):
        with pytest.raises(UserError, match=f"^{prefix}JAX found no device"):
            runtime.require_platform(platform)


def test_train_stops_without_the_platform_before_it_creates_the_workdir(train, tmp_path, only_cpu):
    code, output = train(tmp_path / "run", "--platform=gpu")
    assert code == 2
    assert "--platform gpu: JAX found cpu" in output
    assert not (tmp_path / "run").exists()


def test_settings_that_the_bits_of_a_run_depend_on_do_not_follow_the_environment():
    others = {
        "jax_threefry_partitionable": False,
        "jax_enable_x64": True,
        "jax_default_prng_impl": "rbg",
    }
    for name, value in others.items():
        jax.config.update(name, value)
    try:
        runtime.start_jax(retain_memory=False)
        assert {name: jax.config.values[name] for name in runtime.PROMISED} == runtime.PROMISED
    finally:
        for name, value in runtime.PROMISED.items():
            jax.config.update(name, value)


def test_on_gpus_xla_generates_no_kernels_of_products_unless_the_user_wants_them(monkeypatch):
    own = "--xla_gpu_enable_triton_gemm=true"
    for plugin, version, expected in (
        (True, "0.12.0.1", True),
        (True, "0.13.0", False),
        (None, "0.10.2", False),
    ):
        monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name, plugin=plugin: plugin)
        monkeypatch.setattr(
            runtime.importlib.metadata, "version", lambda package, version=version: version
        )
        monkeypatch.setenv("XLA_FLAGS", own)
        for _ in range(2):
            runtime.start_jax(retain_memory=False)
        assert os.environ["XLA_FLAGS"].split() == runtime.QUICK_TO_COMPILE.split() * expected + [
            own
        ]


def test_jax_reports_compilations_by_the_name_that_is_expected(monkeypatch):
    events = []
    listener = lambda event, seconds, **_: events.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.jit(lambda x: x * 3 + 17).lower(1.0).compile()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert runtime.COMPILED in events


LOGGED = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
logging.getLogger("jax._src.compiler").setLevel(logging.DEBUG)
from lm.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_processes_and_restarts_share_compiled_programs(bench, tmp_path):
    """Of three runs with one cache, two at once, the last one compiles neither step nor evaluation,
    unless a program is compiled so fast here that it is not kept.
    """
    environment = bench.env | {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(name: str):
        command = [sys.executable, "-c", LOGGED, *bench.arguments(tmp_path / name)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def programs(run, of: str) -> set[str]:
        output, _ = run.communicate()
        assert run.returncode == 0
        return set(re.findall(rf"{of} for '(\w+)'", output, re.IGNORECASE))

    not_kept = [programs(run, "not writing .* entry") for run in [start("first"), start("second")]]
    large = {"jit_init_state", "jit_train_steps", "jit_eval_step"} - set.union(*not_kept)
    assert "jit_train_steps" in large
    assert large <= programs(start("third"), "compilation cache hit")
