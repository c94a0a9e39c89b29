"""The commands lm.runs and lm.compare, and the command lm, which runs all others."""

import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from running import ROOT, summary_of

from lm import __main__, compare, runs
from lm.system.files import to_json, with_checksum, write_text
from lm.system.locks import lock
from lm.training.loss_curve import loss_curve
from lm.workdir.metrics import (
    MetricsWriter,
    cut_back,
    iter_metrics,
    last_step,
    read_metrics,
    to_line,
    validation_losses,
)
from lm.workdir.overview import read_overview
from lm.workdir.saved_run import WEIGHTS_OF


@pytest.fixture
def runs_of(bench, tmp_path):
    """Return make(name, steps=12, summary=True, cut=None, **config) -> the directory of a copy of
    the reference run.

    `steps` and the further keys are set in its config.json; after a `cut`, its metrics end at this
    step.
    """

    def make(name, steps=12, summary=True, cut=None, data=None, **keys):
        path = shutil.copytree(bench.reference(), tmp_path / "runs" / name)
        config = json.loads((path / "config.json").read_text())
        config |= {"name": keys.pop("config_name", config["name"])}
        config["train"] |= {"steps": steps, **keys}
        (path / "config.json").write_text(json.dumps(config))
        if not summary:
            (path / "summary.json").unlink()
        if cut is not None:
            cut_back(path / "metrics.jsonl", cut)
            shutil.rmtree(path / "checkpoints")
        if data:
            record = json.loads((path / "run.json").read_text())
            record["data"] |= data
            (path / "run.json").write_text(json.dumps(record))
        return path

    return make


def test_runs_are_listed_with_their_text_size_loss_and_status(runs_of, bench, command, tmp_path):
    """A status says what became of a run: a lock that is held, a summary, or the last step of how
    many.
    """
    runs_of("finished")
    runs_of("stopped", steps=60, summary=False, cut=8)
    runs_of("extended", steps=24)
    runs_of("fallback", data={"name": "python_docs (fallback)", "fingerprint": "f" * 64})
    held = runs_of("held", steps=60, summary=False)
    summary = json.loads((runs_of("early", steps=60) / "summary.json").read_text())
    del summary["crc32"]
    for name, status in (
        ("early", "stopped"),
        ("nonfinite", "nonfinite"),
        ("interrupted", "interrupted"),
    ):
        path = tmp_path / "runs" / name if name == "early" else runs_of(name, steps=60)
        write_text(path / "summary.json", to_json(with_checksum(summary | {"status": status})))
    imported = runs_of("imported", data={"name": f"{WEIGHTS_OF}model", "fingerprint": "a" * 64})
    for name in ("metrics.jsonl", "summary.json"):
        (imported / name).unlink()
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "config.json").write_text("{")
    (tmp_path / "runs" / "exported").mkdir()
    # of Hugging Face: no run
    (tmp_path / "runs" / "exported" / "config.json").write_text('{"model_type": "llama"}')
    with lock(held):
        code, output = command(__main__.main, "runs")
    lines = {line.split()[0]: re.split("  +", line) for line in output.splitlines() if line}
    assert code == 0
    assert lines.pop("run") == ["run", "data", "parameters", "steps", "loss", "status"]
    statuses = {
        "finished": "finished", "stopped": "stopped at 8 of 60", "extended": "stopped at 12 of 24",
        "fallback": "finished", "held": "running", "early": "ended early at 12 of 60", "imported": "imported",
        "nonfinite": "not finite at 12 of 60", "interrupted": "stopped at 12 of 60", "damaged": "damaged",
    }  # fmt: skip
    assert {name: lines[name][-1] for name in statuses} == statuses
    assert "exported" not in lines
    assert "config.json is corrupted" in output
    assert lines["fallback"][1] == "python_docs (fallback)"
    metrics, summary = (
        read_metrics(bench.reference() / "metrics.jsonl"),
        summary_of(bench.reference()),
    )
    own = [
        summary["data"],
        f"{summary['n_params']:,}",
        "12",
        f"{min(validation_losses(metrics).values()):.4f}",
    ]
    assert lines["finished"][1:5] == lines["held"][1:5] == own
    assert lines["imported"][1:3] == [f"{WEIGHTS_OF}model", own[1]]
    assert "losses are of different texts" in output
    assert command(runs.main, tmp_path / "nothing")[0] == 2


def test_runs_of_different_texts_are_compared_with_a_mark(runs_of, command, tmp_path, monkeypatch):
    """In the table, in a line of its own and in the labels of the picture, which is beside the
    runs.
    """
    runs_of("first")
    runs_of("second", seed=7)
    runs_of("fallback", data={"name": "python_docs (fallback)", "fingerprint": "f" * 64})
    code, output = command(compare.main, "runs/first", "runs/second")
    assert (code, "different texts" in output, "\ndata" in output) == (0, False, False)
    drawn = []
    monkeypatch.setattr(
        "lm.training.loss_curve.loss_curves", lambda *given: drawn.append(given) or loss_curve([])
    )
    code, output = command(compare.main, "runs/first", "runs/fallback")
    assert code == 0
    assert re.search(r"\ndata +text.*  python_docs \(fallback\)\n", output)
    assert "best validation loss, of different texts" in output
    assert "losses are of different texts, and cannot be compared" in output
    ((names, title),) = drawn
    assert [name.rpartition(" (python")[2] for name in names][1] == "_docs (fallback))"
    assert title == "losses are of different texts"
    assert (tmp_path / "runs" / "compare.png").is_file()
    assert not (tmp_path / "compare.png").exists()


COMMANDS_OF_A_RUN = {
    "generate": [],
    "evaluate": [],
    "inspect": ["--prompt=x"],
    "show": [],
    "hf": ["--output=out"],
}


@pytest.mark.parametrize("name", COMMANDS_OF_A_RUN)
def test_a_run_is_named_by_its_directory_alone_or_with_workdir(name, command, tmp_path):
    """A name without a run is refused with names that are near, before anything else."""
    more = [*(["export"] if name == "hf" else []), *COMMANDS_OF_A_RUN[name]]
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.json").write_text("{")
    for directory in (["runs/mine"], ["--workdir", "runs/mine"], ["--workdir=runs/mine"]):
        code, output = command(__main__.main, name, *more, *directory)
        assert (code, "runs/mine" in output, "usage" in output, "required" in output) == (
            2,
            True,
            False,
            False,
        ), output
    for directory in (["runs/mien"], ["--workdir=runs/mien"]):
        code, output = command(__main__.main, name, *more, *directory)
        text = output.replace(f"{tmp_path}/", "")
        assert (code, text) == (2, "there is no run runs/mien; did you mean runs/mine?\n")
    code, output = command(__main__.main, name, *more, "runs/mine", "--workdir=runs/mine")
    assert (code, "not allowed with" in output) == (2, True)
    assert output.startswith(f"lm {name}")


def test_mistakes_in_commands_are_answered_by_what_would_be_right(command):
    for arguments, advice in (
        (["trian"], "did you mean train?"), (["nonsense"], "lm --help"), (["prepare"], "did you mean data.prepare?"),
        (["train"], "for example: lm train --config configs/shakespeare.py"),
        (["sweep"], "for example: lm sweep --config"), (["train", "runs", "--config=a.py"], "unexpected argument"),
    ):  # fmt: skip
        code, output = command(__main__.main, *arguments)
        assert (code, advice in output, "usage" in output) == (2, True, False), output
        assert output.count("\n") <= 3


def test_texts_of_one_name_are_told_apart_by_their_fingerprints(runs_of, command, tmp_path):
    for name, digit in (("first", "a"), ("second", "b")):
        runs_of(name, data={"name": "text:novel.txt", "fingerprint": digit * 64})
    _, output = command(runs.main, tmp_path / "runs")
    assert "text:novel.txt aaaaaaaa" in output
    assert "text:novel.txt bbbbbbbb" in output


def test_keys_are_shown_on_request_and_among_configs_of_one_name(runs_of, command, tmp_path):
    for name, seed in (("first", 0), ("second", 7)):
        runs_of(name, seed=seed)
    runs_of("other", config_name="other", batch_size=2)
    os.mkfifo(runs_of("piped") / "pipe")
    assert "seed" not in command(runs.main, "runs")[1]
    code, output = command(runs.main, "runs", "--keys")
    assert (code, "pipe is a pipe or a device" in output) == (2, True)
    (tmp_path / "runs" / "piped" / "pipe").unlink()
    found = {
        line.split()[0]: line
        for line in command(runs.main, "runs", "--keys")[1].splitlines()
        if line
    }
    assert found["first"].endswith("  train.seed=0")
    assert found["second"].endswith("  train.seed=7")
    assert found["other"].endswith(" %")  # it is the only one of its name


@pytest.mark.parametrize("width", [60, 80, 200])
def test_lines_fit_the_terminal_and_are_whole_in_a_file(runs_of, command, monkeypatch, width):
    name = "a-long-name-of-a-run-that-nobody-can-read-20261128-043012"
    runs_of(
        name,
        seed=3,
        data={"name": "python_docs of a long name (fallback)", "fingerprint": "f" * 64},
    )
    runs_of("other", steps=60)
    assert f"{name}  python_docs of a long name (fallback)  " in command(runs.main, "runs")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((width, 24)))
    for arguments in ([], ["--keys"]):
        _, output = command(runs.main, "runs", *arguments)
        assert max(map(len, output.splitlines())) <= width
        assert "043012" in output  # the ends tell names apart
        assert "lback)" in output


def test_a_table_of_many_runs_and_long_metrics_takes_little_memory(runs_of, tmp_path):
    """The lines of training are not kept, in lm.runs, in a curve, or when a run is resumed: 10^6
    took 1.6 GiB.
    """
    path = runs_of("long", steps=10**6, summary=False) / "metrics.jsonl"
    with open(path, "a") as file:
        for step in range(13, 30_000):
            file.write(f"{to_line({'step': step, 'loss': 1.0, 'tokens': 5})}\n")
    loss_curve(iter_metrics(path))  # imports Matplotlib
    for read in (
        lambda: read_overview(path.parent),
        lambda: MetricsWriter(path.parent, resume_step=10**6, writes=False),
        lambda: sum(1 for _ in iter_metrics(path)),
        lambda: loss_curve(iter_metrics(path)),
        lambda: last_step(path),
    ):
        tracemalloc.start()
        read()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3e6  # a list of the lines takes 20 MB


def test_two_runs_are_compared_by_their_configs_losses_and_curves(bench, command, tmp_path):
    for name, seed in (("a", 0), ("b\x1b[2J", 7)):
        config = json.loads(
            (shutil.copytree(bench.reference(), tmp_path / name) / "config.json").read_text()
        )
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
        asked = {
            "_ARGCOMPLETE": "1",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "PYTHONPATH": str(ROOT),
        }
        out = {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out")}
        subprocess.run(
            [sys.executable, "-m", "lm"], env=os.environ | asked | out, timeout=60, check=True
        )
        assert (tmp_path / "out").read_text().strip() == expected


def test_the_command_lm_runs_the_others(command):
    for name in __main__.COMMANDS:
        code, output = command(__main__.main, name, "--help")
        assert (code, f"usage: lm {name}" in output) == (0, True), name
    assert "train a model" in command(__main__.main)[1]
    assert command(__main__.main, "trian")[0] == 2
