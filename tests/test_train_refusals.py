"""The command lm.train: mistakes are reported before anything is computed or written."""

import signal
import subprocess
import sys

import pytest
from running import CONFIG, ROOT, summary_of


def in_empty_directory(bench, tmp_path, *arguments) -> subprocess.CompletedProcess:
    """Run the command without jax; check that it leaves no file."""
    directory = tmp_path / "empty"
    directory.mkdir()
    env = bench.env | {"PYTHONPATH": f"{bench.without_jax()}:{ROOT}"}
    command = [sys.executable, "-m", "lm.train", *arguments]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=60)
    assert not any(directory.iterdir())
    return done


def test_help_lists_the_keys_and_needs_no_jax(bench, tmp_path):
    done = in_empty_directory(bench, tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("--config", "--workdir", "--resume", "exit codes", "configs/shakespeare.py", "model.d_model = 256"):
        assert text in done.stdout


TINY = f"--config={CONFIG}"


REFUSALS = {
    "every mistake at once": (
        [
            TINY,
            "--config.model.d_modle=3",
            "--config.train.steps=abc",
            "--config.model.dropout=1",
            "--config.trian.x=1",
        ],
        ["config.model.d_modle", "d_model?", "config.train.steps: 'abc'", "config.model.dropout", "config.trian"],
    ),
    "stray argument": ([TINY, "--config.model.tie_embeddings", "False"], ["False", "--config.SECTION.KEY=VALUE"]),
    "misspelled option": ([TINY, "--resum"], ["--resum"]),
    "no config": ([], ["--config"]),
    "missing config file": (["--config=configs/shakespear.py"], ["configs/shakespear.py"]),
    "resume where": ([TINY, "--resume"], ["--resume", "--workdir"]),
    "workdir is a file": ([TINY, f"--workdir={CONFIG}"], ["is a file"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_mistakes_are_reported_without_jax_and_without_files(bench, tmp_path, case):
    arguments, expected = REFUSALS[case]
    done = in_empty_directory(bench, tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    for text in expected:
        assert text in done.stderr


RUN_REFUSALS = {
    "not resumed": ([], ["already holds a run", "--resume"]),
    "another experiment": (
        ["--resume", "--config.model.d_model=32", "--config.optimizer.b2=0.9"],
        ["config.model.d_model: 16 -> 32", "config.optimizer.b2: 0.95 -> 0.9"],
    ),
    "cosine does not grow": (["--resume", "--config.train.steps=24"], ["config.train.steps: 12 -> 24", "schedule"]),
    "shrink": (["--resume", "--config.train.steps=6"], ["config.train.steps: 12 -> 6", "shrink"]),
}


@pytest.mark.parametrize("case", RUN_REFUSALS)
def test_a_run_is_never_overwritten(bench, tmp_path, case):
    reference = bench.reference()
    arguments, expected = RUN_REFUSALS[case]
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("*")}
    done = in_empty_directory(bench, tmp_path, *bench.arguments(reference, *arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    for text in expected:
        assert text in done.stderr
    assert {path: path.stat().st_mtime_ns for path in reference.rglob("*")} == before


def test_mistakes_that_need_the_data(train, tmp_path):
    code, output = train(tmp_path / "run", "--config.data.source=text:absent.txt")
    assert code == 2
    assert "absent.txt" in output
    prompt, long = "--config.eval.sample_prompt=Zeus", "--config.train.seq_len=1000"
    code, output = train(tmp_path / "run", "--config.eval.sample_tokens=5", prompt, long)
    assert code == 2
    assert "config.eval.sample_prompt" in output
    assert "config.train.seq_len" in output
    assert not any(tmp_path.iterdir())


@pytest.fixture
def no_network(tmp_path, monkeypatch) -> list[str]:
    """Return the arguments of a run on Tiny Shakespeare, which is not prepared and cannot be downloaded."""
    from lm.data import shakespeare

    monkeypatch.setattr(shakespeare, "URL", "http://127.0.0.1:9/input.txt")  # no server listens on this port
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    return ["--config.data.source=tfds:tiny_shakespeare", f"--config.data.data_dir={tmp_path / 'tfds'}"]


def test_the_error_without_network_names_alternatives(train, no_network, tmp_path):
    code, output = train(tmp_path / "run", *no_network)
    assert code == 2
    for alternative in ("network", "TFDS_DATA_DIR", "text:PATH", "python_docs"):
        assert alternative in output
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_fallback_prints_a_warning(train, no_network, tmp_path):
    short = ["--config.train.steps=2", "--config.eval.final_splits=test", "--config.eval.batch_size=256"]
    code, output = train(tmp_path / "run", *no_network, "--config.data.offline=python_docs", *short)
    assert code == 0
    assert "WARNING: training on python_docs INSTEAD of" in output
    assert summary_of(tmp_path / "run")["data"] == "python_docs (fallback)"
    assert summary_of(tmp_path / "run")["data_notices"]


# Ctrl-C while the data is being prepared.
INTERRUPTED_EARLY = """
import os, signal, sys
from lm import data, train
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
data.open_corpus = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGINT)
sys.exit(train.main(sys.argv[1:]))
"""


def test_ctrl_c_before_training_leaves_no_files(bench, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED_EARLY, *bench.arguments(tmp_path / "run")]
    done = subprocess.run(command, env=bench.env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())
