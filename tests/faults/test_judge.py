"""The campaign's judge tells survived faults from losses, silent changes and tracebacks."""

import dataclasses
import itertools
import random

from benchmarks.faults import damage, sweeps
from benchmarks.faults.judge import Outcome, judge
from benchmarks.faults.runs import call
from lm.sweeps.results import Run, append_runs

VERDICTS = [
    (Outcome(0, ""), [], [], "survived"),
    (Outcome(2, "config.json is corrupted"), [], [], "survived"),
    (Outcome(0, ""), ["the last state differs"], [], "silent"),
    (Outcome(0, "WARNING: config.json"), ["the last state differs"], [], "lost"),
    (Outcome(2, "config.json is corrupted"), [], ["a checkpoint"], "lost"),
    (Outcome(2, "an error"), [], [], "traceback"),
    (Outcome(0, "Traceback (most recent call last):\n"), [], [], "traceback"),
    (Outcome(-11, ""), [], [], "traceback"),
    (Outcome(None, ""), [], [], "traceback"),
]


def test_verdicts():
    for outcome, differences, losses, verdict in VERDICTS:
        assert judge("", outcome, differences, losses, names=("config.json",)).verdict == verdict, (
            outcome
        )


def test_an_exception_and_a_hanging_command_have_no_exit_code():
    def fail(_):
        raise KeyError("steps")

    def hang(_):
        while True:
            pass

    assert call(fail, []).code is None
    assert call(fail, []).last_line == "KeyError: 'steps'"
    assert "hung" in call(hang, [], seconds=1).output


def test_a_run_of_a_sweep_that_is_trained_again_may_differ_in_times_only(tmp_path):
    run = Run(
        "final", "base", {"optimizer.learning_rate": 0.01}, 7, "finished", None, 8, 64, 2.4, 2.5
    )
    runs = {
        "whole": dataclasses.replace(run, seconds=9.0, tokens_per_second=100.0),
        "again": dataclasses.replace(run, seconds=8.0, tokens_per_second=200.0),
        "other": dataclasses.replace(run, test_loss=2.6),
    }
    for name, found in runs.items():
        (tmp_path / name).mkdir()
        append_runs(tmp_path / name, [found])
    assert sweeps.changes(tmp_path / "again", tmp_path / "whole") == []
    assert sweeps.changes(tmp_path / "other", tmp_path / "whole") == [
        "the run ('final', 'base', (0.01,), 7) differs"
    ]


def test_every_way_of_damage_changes_a_file(tmp_path):
    path = tmp_path / "file.json"
    for way, seed in itertools.product(damage.WAYS, range(20)):
        path.write_text('{"steps": 3, "losses": [1.5]}')
        damage.damage(path, way, random.Random(seed))
        assert (
            not path.exists() or path.read_text(errors="replace") != '{"steps": 3, "losses": [1.5]}'
        )
