"""The command lm.sample."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from lm.sample import main


def sample(bench, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lm.sample", *arguments]
    return subprocess.run(command, cwd=bench.base, env=bench.env, capture_output=True, text=True, timeout=600)


def test_a_sample_continues_the_prompt_and_a_seed_repeats_it(bench):
    arguments = (f"--workdir={bench.reference()}", "--prompt=the cat", "--tokens=20", "--seed=3")
    first, second = (sample(bench, *arguments) for _ in range(2))
    assert (first.returncode, first.stdout) == (0, second.stdout), first.stderr
    assert first.stdout.startswith("the cat")
    assert len(first.stdout) == len("the cat") + 20 + len("\n")
    assert "step " in first.stderr


@pytest.mark.slow
def test_a_run_with_an_attention_that_this_device_lacks_can_be_sampled(bench, tmp_path):
    """A run that was trained with cuDNN on a GPU can be sampled on a CPU."""
    workdir = tmp_path / "run"
    shutil.copytree(bench.reference(), workdir)
    from lm.training import checkpoints

    for step in (workdir / "checkpoints").iterdir():
        record = json.loads((step / "meta" / "metadata").read_text())
        record["meta"]["config"]["model"]["attention"] = "cudnn"
        record.pop("sha256")
        record["sha256"] = checkpoints._record_digest(record)
        (step / "meta" / "metadata").write_text(json.dumps(record))
    done = sample(bench, f"--workdir={workdir}", "--tokens=5")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workdir=absent"], "holds no checkpoint"),
        (["--workdir=absent", "--temperature=nan", "--tokens=0"], "--temperature: nan"),
        (["--workdir=absent", "--step=²"], "--step: '²'"),
        (
            ["--workdir=absent", "--step=" + "9" * 5000],
            "(5002 characters) is not best, latest, or the number of a step",
        ),
        (["--workdir=absent", "--tokens=1000000000000"], "must be at least 1 and at most 1000000"),
        (["--workdir=absent", "--seed=" + "9" * 400], "(400 characters) must be at least 0 and less than 2**32"),
    ],
)
def test_mistakes_are_errors_without_a_traceback(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err


def test_a_prompt_that_the_tokenizer_does_not_know_is_an_error(bench):
    done = sample(bench, f"--workdir={bench.reference()}", "--prompt=Zeus")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert os.linesep + "Z" not in done.stdout
    assert "'Z'" in done.stderr
