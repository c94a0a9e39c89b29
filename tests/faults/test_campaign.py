"""A part of the campaign of faults: no silent change and no traceback."""

import itertools
import os
import random
import re
import subprocess
import sys

import pytest
from running import ROOT

from benchmarks.faults import caches, configs, inputs
from benchmarks.faults.runs import Bench


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """A `Bench` of the campaign."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # restored afterwards: Bench sets it
    return Bench(tmp_path / "bench")


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        (caches.damaged_tokens, 12),
        (inputs.random_texts, 5),
        (inputs.random_tokenizers, 5),
        (configs.random_values, 10),
        (configs.random_files, 10),
    ],
)
def test_all_faults_are_survived(faults, kind, n):
    for trial in itertools.islice(kind(faults, random.Random(0)), n):
        assert trial.verdict == "survived", trial


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["kill_new", "kill_resumed", "files", "directories", "generate", "hostile", "mirror_files", "full_disk"]
)
def test_runs_survive(tmp_path, kind):
    """The campaign runs in its own process, because it needs a compilation cache and other tests switch it off."""
    command = [sys.executable, "-m", "benchmarks.faults", "--kinds", kind, "--limit", "10"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if kind != "full_disk" or "not permitted" not in done.stdout:
        assert re.search(r"\| all \| 10 \| 10 \| 0 \| 0 \| 0 \|", done.stdout), done.stdout
