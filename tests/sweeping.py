"""Run tests/configs/tiny_sweep.py, or a sweep with other fields, in this process or as a command."""

import contextlib
import dataclasses
import io
import os
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from running import ROOT

from lm import sweep
from lm.sweeps.results import read_runs

SWEEP = ROOT / "tests" / "configs" / "tiny_sweep.py"
# A checkpoint after every dispatch, so that a kill at any moment finds one, and a second more for
# each evaluation, so that a signal comes while runs train.
SLOW = """
import sys, time
from lm import sweep
from lm.sweeps import stacked
from lm.sweeps.stacked import StackedRuns
stacked.SAVE_EVERY = 0
evaluate = StackedRuns._evaluate
StackedRuns._evaluate = lambda self, *arguments: time.sleep(1) or evaluate(self, *arguments)
sys.exit(sweep.main(sys.argv[1:]))
"""
CHANGED = """
import dataclasses
import runpy

from lm.sweeps import Budget, match_params


def get_sweep():
    tiny = runpy.run_path({path!r})["get_sweep"]()
    return dataclasses.replace(tiny, {fields})
"""


def changed(path, fields: str):
    """Write a file with the tiny sweep and other fields, which may refer to those of `tiny`; return
    its path.
    """
    path.write_text(CHANGED.format(path=str(SWEEP), fields=fields))
    return path


def run(bench, *arguments, main=sweep.main, config=SWEEP) -> tuple[int, str]:
    """Run a command in this process, where the bench's text is; return its exit code and output."""
    arguments = [*([f"--config={config}"] if config else []), *map(str, arguments)]
    output = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        patch.chdir(bench.base)
        patch.setenv("XDG_CACHE_HOME", bench.env["XDG_CACHE_HOME"])
        # The devices of this process are chosen already.
        patch.setenv(
            "XLA_FLAGS",
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1",
        )
        try:
            code = main(arguments)
        finally:  # tests run no programs of a cache
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()
    return code, output.getvalue()


def command(workdir, config=SWEEP) -> list[str]:
    """Return the command of a sweep that takes some seconds and saves every dispatch, for a process
    that is killed.
    """
    return [sys.executable, "-c", SLOW, f"--config={config}", f"--workdir={workdir}"]


def results(workdir) -> dict:
    """Return the finished runs by key, without times, devices and commits."""
    found = read_runs(workdir)
    assert len({run.key for run in found}) == len(found)
    left_out = {"seconds": 0.0, "tokens_per_second": None, "at_once": 0, "commit": ""}
    return {run.key: dataclasses.replace(run, **left_out) for run in found}
