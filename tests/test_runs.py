"""The command lm.runs, and the command lm, which runs all others."""

import json
import shutil

from lm import __main__, runs


def test_runs_are_listed_with_what_differs(bench, command, tmp_path):
    for name in ("first", "second"):
        shutil.copytree(bench.reference(), tmp_path / "runs" / name)
    path = tmp_path / "runs" / "second" / "config.json"
    config = json.loads(path.read_text())
    config["train"]["seed"] = 7
    path.write_text(json.dumps(config))
    (tmp_path / "runs" / "second" / "summary.json").unlink()
    (tmp_path / "runs" / "third").mkdir()
    (tmp_path / "runs" / "third" / "config.json").write_text("{")
    code, output = command(__main__.main, "runs")
    header, first, second, third = output.splitlines()
    assert code == 0
    assert header.split() == ["run", "status", "steps", "best", "at", "size", "differs", "in"]
    assert first.split()[:3] == ["first", "finished", "12"]
    assert second.split()[:4] == ["second", "not", "finished", "12"]
    assert second.endswith("train.seed=7")
    assert "config.json is corrupted" in third
    assert command(runs.main, tmp_path / "nothing")[0] == 2


def test_the_command_lm_runs_the_others(command):
    for name in __main__.COMMANDS:
        code, output = command(__main__.main, name, "--help")
        assert (code, f"python -m lm.{name}" in output) == (0, True), name
    assert "train a model" in command(__main__.main)[1]
    assert command(__main__.main, "trian")[0] == 2
