"""The commands lm.runs and lm.compare, and the command lm, which runs all others."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT

from lm import __main__, compare, runs
from lm.workdir.metrics import read_metrics, validation_losses


def test_runs_are_listed_with_what_differs(bench, command, tmp_path):
    for name in ("first", "second"):
        shutil.copytree(bench.reference(), tmp_path / "runs" / name)
    path = tmp_path / "runs" / "second" / "config.json"
    config = json.loads(path.read_text())
    config["train"]["seed"] = 7
    path.write_text(json.dumps(config))
    (tmp_path / "runs" / "second" / "summary.json").unlink()
    config["train"]["steps"] = 24
    extended = shutil.copytree(bench.reference(), tmp_path / "runs" / "extended")  # from 12 steps, and killed
    (extended / "config.json").write_text(json.dumps(config))
    (tmp_path / "runs" / "third").mkdir()
    (tmp_path / "runs" / "third" / "config.json").write_text("{")
    (tmp_path / "runs" / "exported").mkdir()
    (tmp_path / "runs" / "exported" / "config.json").write_text('{"model_type": "llama"}')  # of Hugging Face: no run
    shutil.copytree(bench.reference(), tmp_path / "runs" / "fourth")
    os.mkfifo(tmp_path / "runs" / "fourth" / "pipe")
    code, output = command(__main__.main, "runs")
    header, extended, first, fourth, second, third = output.splitlines()
    assert code == 0
    assert header.split() == ["run", "status", "steps", "best", "at", "size", "goodput", "differs", "in"]
    assert first.split()[:3] == ["first", "finished", "12"]
    assert second.split()[:4] == ["second", "not", "finished", "12"]
    assert extended.split()[:4] == ["extended", "not", "finished", "12"]
    assert first.endswith("  train.seed=0  train.steps=12")
    assert second.endswith("  train.seed=7  train.steps=12")
    assert "config.json is corrupted" in third
    assert "pipe is a pipe or a device" in fourth
    assert command(runs.main, tmp_path / "nothing")[0] == 2


def test_two_runs_are_compared_by_their_configs_losses_and_curves(bench, command, tmp_path):
    for name, seed in (("a", 0), ("b\x1b[2J", 7)):
        config = json.loads((shutil.copytree(bench.reference(), tmp_path / name) / "config.json").read_text())
        config["train"]["seed"] = seed
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    code, output = command(compare.main, "a", "b\x1b[2J")
    assert (code, "\x1b" in output) == (0, False)
    rows = {line.split("  ")[0]: line.split()[-2:] for line in output.splitlines()}
    assert rows["config.train.seed"] == ["0", "7"]
    assert not any("config.model" in line for line in rows)
    lines = read_metrics(bench.reference() / "metrics.jsonl")
    best = min(validation_losses(lines).values())
    assert rows["best validation loss"] == [f"{best:.4f}"] * 2
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    os.mkfifo("pipe")
    assert command(compare.main, "a", "b\x1b[2J", "--output=pipe")[0] == 2
    assert Path("pipe").is_fifo()
    for mistake in (["a"], ["a", "a"], ["a", "nothing"]):
        assert command(compare.main, *mistake)[0] == 2, mistake


def test_a_shell_completes_commands_options_config_keys_and_their_values(tmp_path):
    pytest.importorskip("argcomplete")
    for line, expected in {
        "lm hf export --w": "--workdir",
        "lm train --config.optimizer.name=ad": "--config.optimizer.name=adamw",
    }.items():
        asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "PYTHONPATH": str(ROOT)}
        out = {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out")}
        subprocess.run([sys.executable, "-m", "lm"], env=os.environ | asked | out, timeout=60, check=True)
        assert (tmp_path / "out").read_text().strip() == expected


def test_the_command_lm_runs_the_others(command):
    for name in __main__.COMMANDS:
        code, output = command(__main__.main, name, "--help")
        assert (code, f"python -m lm.{name}" in output) == (0, True), name
    assert "train a model" in command(__main__.main)[1]
    assert command(__main__.main, "trian")[0] == 2
