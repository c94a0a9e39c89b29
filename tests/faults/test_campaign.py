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
from lm.data import cache

KINDS = (
    caches.damaged_tokens, inputs.random_texts, inputs.damaged_shards, inputs.random_tokenizers, configs.random_values,
    configs.random_files,
)  # fmt: skip


def test_all_faults_are_survived(faults):
    for kind in KINDS:
        for trial in itertools.islice(kind(faults, random.Random(0)), 10):
            assert trial.verdict == "survived", (kind.__name__, trial)


def test_a_damaged_cache_that_the_code_does_not_notice_is_silent(faults, monkeypatch):
    """With the checks of the cache switched off, changed bytes of the tokens are found by the
    comparison.
    """
    monkeypatch.setattr(cache, "find_damage", lambda _: None)
    trials = list(itertools.islice(caches.damaged_tokens(faults, random.Random(0)), 48))
    assert any("train.npy one byte flipped" in t.fault for t in trials if t.verdict == "silent"), (
        trials
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "kill_new",
        "kill_resumed",
        "files",
        "directories",
        "generate",
        "hostile",
        "mirror_files",
        "full_disk",
    ],
)
def test_runs_survive(tmp_path, kind):
    """The campaign runs in its own process, because it needs a compilation cache and other tests
    switch it off.
    """
    command = [sys.executable, "-m", "benchmarks.faults", "--kinds", kind, "--limit", "10"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if kind != "full_disk" or "not permitted" not in done.stdout:
        assert re.search(r"\| all \| 10 \| 10 \| 0 \| 0 \| 0 \|", done.stdout), done.stdout
