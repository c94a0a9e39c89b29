"""Run tests/configs/tiny_sweep.py, or a sweep with other fields, as a command, and read the results."""

import json
import subprocess
import sys

from running import ROOT

SWEEP = ROOT / "tests" / "configs" / "tiny_sweep.py"
# Save a checkpoint after every dispatch, so that a kill at any moment finds one.
EAGER = """
import sys
from lm import sweep
from lm.sweeps.training import stacked
stacked.SAVE_EVERY = 0
sys.exit(sweep.main(sys.argv[1:]))
"""
CHANGED = """
import dataclasses
import runpy

from lm.sweeps import Budget, Search, choice, log_uniform, match_params


def get_sweep():
    tiny = runpy.run_path({path!r})["get_sweep"]()
    return dataclasses.replace(tiny, {fields})
"""


def changed(path, fields: str):
    """Write a file with the tiny sweep and other fields, which may refer to those of `tiny`; return its path."""
    path.write_text(CHANGED.format(path=str(SWEEP), fields=fields))
    return path


def run(bench, *arguments, module="lm.sweep", config=SWEEP):
    config = [f"--config={config}"] if config else []
    command = [sys.executable, "-m", module, *config, *map(str, arguments)]
    return subprocess.run(command, cwd=bench.base, env=bench.env, capture_output=True, text=True, timeout=900)


def results(workdir) -> dict:
    """Return the finished runs by (phase, variant, learning rate, seed), without times, checksums and provenance."""
    found = {}
    for path in (workdir / "results").glob("*.json"):
        for run in json.loads(path.read_text()):
            key = run["phase"], run["variant"], run["learning_rate"], run["seed"]
            assert key not in found, "a run was trained twice"
            left_out = ("seconds", "seconds_of", "sha256", "provenance")
            found[key] = {name: value for name, value in run.items() if name not in left_out}
    return found
