"""The campaign's judge calls a fault that the code does not notice silent, and reports losses and tracebacks."""

import dataclasses
import random

import pytest

from benchmarks.faults import caches, damage, sweeps
from benchmarks.faults.judge import Outcome, judge
from benchmarks.faults.runs import Bench, call
from lm.data import cache
from lm.sweeps.results import Run, append_runs


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """A `Bench` of the campaign."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # restored afterwards: Bench sets it
    return Bench(tmp_path / "bench")


def test_a_damaged_cache_that_the_code_does_not_notice_is_silent(faults, monkeypatch):
    """With the checks of the cache switched off, a flipped byte changes tokens, and the judge reports it."""
    settings = {"source": f"text:{faults.text}", "cache_dir": str(faults.base / "cache")}
    _, expected = caches.open_corpus(settings)
    (path,) = (faults.base / "cache").glob("tokens/*/train.npy")
    monkeypatch.setattr(cache, "find_damage", lambda _: None)
    damage.damage(path, "one byte flipped", random.Random(0))
    outcome, found = caches.open_corpus(settings)
    assert outcome.code == 0
    changed = [] if found == expected else ["other tokens"]
    assert judge("train.npy", outcome, changed) == ("train.npy", "silent", "other tokens")
    monkeypatch.undo()
    outcome, found = caches.open_corpus(settings)
    assert found == expected
    assert "is corrupted (train.npy has" in outcome.output
    assert judge("train.npy", outcome).verdict == "survived"


@pytest.mark.parametrize(
    ("outcome", "differences", "losses", "verdict"),
    [
        (Outcome(0, ""), [], [], "survived"),
        (Outcome(2, "config.json is corrupted"), [], [], "survived"),
        (Outcome(0, ""), ["the last state differs"], [], "silent"),
        (Outcome(0, "WARNING: config.json"), ["the last state differs"], [], "lost"),
        (Outcome(2, "config.json is corrupted"), [], ["a checkpoint"], "lost"),
        (Outcome(2, "an error"), [], [], "traceback"),
        (Outcome(0, "Traceback (most recent call last):\n"), [], [], "traceback"),
        (Outcome(-11, ""), [], [], "traceback"),
        (Outcome(None, ""), [], [], "traceback"),
    ],
)
def test_verdicts(outcome, differences, losses, verdict):
    assert judge("", outcome, differences, losses, names=("config.json",)).verdict == verdict


def test_an_exception_and_a_hanging_command_have_no_exit_code():
    def fail(_):
        raise KeyError("steps")

    def hang(_):
        while True:
            pass

    assert call(fail, []).code is None
    assert call(fail, []).exception.endswith("KeyError: 'steps'")
    assert "hung" in call(hang, [], seconds=1).output


def test_a_run_of_a_sweep_that_is_trained_again_may_differ_in_times_only(tmp_path):
    run = Run("final", "base", {"optimizer.learning_rate": 0.01}, 7, "finished", None, 8, 64, 2.4, 2.5)
    runs = {
        "whole": dataclasses.replace(run, seconds=9.0, tokens_per_second=100.0),
        "again": dataclasses.replace(run, seconds=8.0, tokens_per_second=200.0),
        "other": dataclasses.replace(run, test_loss=2.6),
    }
    for name, found in runs.items():
        (tmp_path / name).mkdir()
        append_runs(tmp_path / name, [found])
    assert sweeps.changes(tmp_path / "again", tmp_path / "whole") == []
    assert sweeps.changes(tmp_path / "other", tmp_path / "whole") == ["the run ('final', 'base', (0.01,), 7) differs"]


@pytest.mark.parametrize("way", damage.WAYS)
def test_every_way_of_damage_changes_a_file(tmp_path, way):
    path = tmp_path / "file.json"
    for seed in range(20):
        path.write_text('{"steps": 3, "losses": [1.5]}')
        damage.damage(path, way, random.Random(seed))
        assert not path.exists() or path.read_text(errors="replace") != '{"steps": 3, "losses": [1.5]}'
