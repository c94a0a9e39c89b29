"""The command lm.train: the files of a run, its output, and its errors."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from running import CONFIG, ROOT, checkpoint_steps, checksums, metrics_of, summary_of

from lm.cost.devices import peak_flops
from lm.training import job
from lm.training.checkpoints import restore_params
from lm.training.workdir import SUMMARY_FIELDS

# One layer of width 16 (2 heads of 8, SwiGLU of 64: 8/3 16 rounded to 64), untied, over 14 characters:
# embedding and head 2 * 14 * 16, three norms 3 * 16, attention 4 * 16 * 16, feed-forward 3 * 16 * 64.
N_PARAMS = 2 * 14 * 16 + 3 * 16 + 4 * 16 * 16 + 3 * 16 * 64


def strict_json(text: str):
    """Parse strict JSON, which has neither NaN nor Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


# ---- A run from start to end -------------------------------------------------------------------------------------


def test_a_run_writes_every_documented_file(bench):
    workdir = bench.reference()
    names = {path.name for path in workdir.iterdir()} - {".lock"}
    assert names == {
        "config.json", "run.json", "tokenizer.json", "metrics.jsonl", "tensorboard", "checkpoints", "samples",
        "summary.json", "val_losses.json", "loss.png",
    }  # fmt: skip
    config = strict_json((workdir / "config.json").read_text())
    assert (config["name"], config["model"]["d_model"], config["train"]["steps"]) == ("tiny", 16, 12)
    (start,) = strict_json((workdir / "run.json").read_text())["starts"]
    assert {"versions", "git", "host", "argv"} <= set(start)
    assert "embedding" in "".join(strict_json((workdir / "run.json").read_text())["parameters"])
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (workdir / "samples").iterdir()] == ["step_12.txt"]
    assert len((workdir / "samples" / "step_12.txt").read_text()) == len("\n") + 10
    assert any((workdir / "tensorboard").iterdir())
    assert 12 in checkpoint_steps(workdir)


def test_the_summary_has_the_counts_and_losses_of_the_run(bench):
    workdir = bench.reference()
    summary = strict_json((workdir / "summary.json").read_text())
    assert set(SUMMARY_FIELDS) <= set(summary)
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("finished", 12, 12 * 4 * 16)
    assert (summary["n_params"], summary["data"]) == (N_PARAMS, "text.txt")
    final = {line["split"]: line for line in metrics_of(workdir) if "split" in line and line["step"] == 12}
    assert summary["val_loss"] == final["validation"]["loss"]
    assert summary["test_loss"] == final["test"]["loss"]
    # Every character is one byte, and one token: bits per byte are the loss in bits.
    assert summary["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / np.log(2), rel=1e-12)
    assert summary["wall_seconds"] > 0
    assert summary["config_digest"] == json.loads((workdir / "run.json").read_text())["experiment_digest"]


def test_the_metrics_have_every_step_and_its_learning_rate(bench):
    workdir = bench.reference()
    lines = [strict_json(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "split" not in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    fields = {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "mfu"}
    assert all(fields <= set(line) for line in steps)
    assert [line["tokens"] for line in steps] == [64 * step for step in range(1, 13)]
    # A cosine from 1e-3 to a tenth of it over 12 steps; the first step has its first value.
    cosine = [1e-3 * (0.1 + 0.9 * (1 + np.cos(np.pi * step / 12)) / 2) for step in range(12)]
    np.testing.assert_allclose([line["learning_rate"] for line in steps], cosine, rtol=1e-6)
    assert all(line["mfu"] is None for line in steps) == (peak_flops("cpu", "float32") is None)
    evaluations = [(line["step"], line["split"]) for line in lines if "split" in line]
    assert evaluations == [(4, "validation"), (8, "validation"), (12, "validation"), (12, "test")]
    n_validation = len(bench.text.read_text()) * 19 // 20 - len(bench.text.read_text()) * 9 // 10
    assert {line["tokens"] for line in lines if line.get("split") == "validation"} == {n_validation - 1}
    assert lines[-2]["loss"] < lines[4]["loss"]  # the model learned


@pytest.mark.slow
def test_mfu_is_logged_if_the_peak_is_known(train, tmp_path, monkeypatch):
    monkeypatch.setattr("lm.training.step_log.peak_flops", lambda device_kind, dtype: 1e12)
    code, output = train(tmp_path / "run", "--config.train.steps=2")
    assert code == 0
    per_token = strict_json((tmp_path / "run" / "summary.json").read_text())["flops_per_token"]
    for line in map(strict_json, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[:2]):
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * per_token / 1e12)
        assert line["mfu"] < line["mfu_full_square"]
    assert "MFU" in output


@pytest.mark.slow
def test_all_checkpoints_are_scored_on_the_same_windows(train, tmp_path):
    """With eval.max_batches, the final evaluation of the full split does not score the last checkpoint."""
    rate = ("--config.optimizer.learning_rate=1e-12", "--config.model.dropout=0")  # too small to change the loss
    code, _ = train(tmp_path / "run", *rate, "--config.eval.max_batches=1")
    assert code == 0
    losses = json.loads((tmp_path / "run" / "val_losses.json").read_text())
    assert set(losses) == {"4", "8", "12"}
    assert max(losses.values()) - min(losses.values()) < 1e-5
    assert abs(losses["12"] - summary_of(tmp_path / "run")["val_loss"]) > 1e-4  # over the full split


@pytest.mark.slow
def test_wall_seconds_include_compilation(train, tmp_path, monkeypatch):
    compile_steps = job.compile_steps

    def compile_slowly(*args):
        time.sleep(5)
        return compile_steps(*args)

    monkeypatch.setattr(job, "compile_steps", compile_slowly)
    code, _ = train(tmp_path / "run", "--config.train.steps=1", "--config.eval.every=0")
    assert code == 0
    assert summary_of(tmp_path / "run")["wall_seconds"] >= 5


def test_a_log_file_has_plain_lines(bench):
    bench.reference()
    output = (bench.base / "reference.txt").read_text()
    assert "\r" not in output
    assert "\x1b" not in output
    for words in (f"{N_PARAMS:,} parameters", "unigram baseline", "step 12/12", "validation: loss", "lm.generate"):
        assert words in output
    assert output.splitlines().index(next(line for line in output.splitlines() if line.startswith("step  1/"))) <= 8
    assert "Traceback" not in output


def test_a_terminal_shows_every_step(bench, tmp_path):
    ours, theirs = pty.openpty()
    command = bench.command(tmp_path / "run")
    with subprocess.Popen(
        command, cwd=tmp_path, env=bench.env | {"TERM": "xterm"}, stdout=theirs, stderr=theirs
    ) as run:
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 2**16):
                output += chunk
        except OSError:  # on Linux: the other end is closed
            pass
    os.close(ours)
    assert run.returncode == 0
    shown = [line for line in output.decode().splitlines() if line.startswith("step ") and "tokens/s" in line]
    assert [line.split("/")[0].split() for line in shown] == [["step", str(step)] for step in range(1, 13)]
    assert b"validation: loss" in output


# ---- Refusals ----------------------------------------------------------------------------------------------------


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
    for words in ("--config", "--workdir", "--resume", "exit codes", "configs/shakespeare.py", "model.d_model = 256"):
        assert words in done.stdout


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
    for words in expected:
        assert words in done.stderr


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
    for words in expected:
        assert words in done.stderr
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


# ---- No network --------------------------------------------------------------------------------------------------


@pytest.fixture
def no_network(tmp_path, monkeypatch) -> list[str]:
    """Return the arguments of a run on Tiny Shakespeare, which is not prepared and cannot be downloaded."""
    from lm.data import shakespeare

    monkeypatch.setattr(shakespeare, "URL", "http://127.0.0.1:9/input.txt")  # a port on which nothing listens
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


# ---- A loss that is not finite -----------------------------------------------------------------------------------

DIVERGING = (
    "--config.optimizer.name=sgd",
    "--config.optimizer.learning_rate=1e30",
    "--config.optimizer.schedule=constant",
    "--config.optimizer.clip_norm=none",
    "--config.optimizer.weight_decay=0.0",
    "--config.eval.every=0",
)


def assert_only_finite_checkpoints(workdir):
    for step in checkpoint_steps(workdir):
        import jax

        _, params, _ = restore_params(workdir, step)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def bad_step(workdir) -> int:
    """Return the step whose loss or gradients were not finite; no later step was logged."""
    *good, last = metrics_of(workdir)
    assert not np.isfinite(last["loss"]) or not np.isfinite(last["grad_norm"])
    assert all(np.isfinite(line["loss"]) and np.isfinite(line["grad_norm"]) for line in good)
    assert [line["step"] for line in good] == list(range(1, last["step"]))
    return last["step"]


@pytest.mark.slow
def test_a_diverging_run_stops_with_a_report(train, tmp_path):
    code, output = train(tmp_path / "run", *DIVERGING)
    assert code == 3
    step = bad_step(tmp_path / "run")
    # The report has the step, the learning rate, norms by group, and the last finite checkpoint.
    assert re.search(rf"step {step}: the (loss|gradient norm) is not finite; training stopped", output)
    assert "learning rate 1e+30" in output
    assert all(group in output for group in ("gradient norm", "layers/attention ", "final_norm", "head"))
    assert f"step {step - 1}, in {tmp_path / 'run' / 'checkpoints'}" in output
    assert (summary_of(tmp_path / "run")["status"], summary_of(tmp_path / "run")["steps"]) == ("nonfinite", step - 1)
    assert max(checkpoint_steps(tmp_path / "run")) == step - 1
    assert_only_finite_checkpoints(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "skip"])
def test_an_update_that_is_not_finite_is_told_from_a_loss_or_gradient(train, tmp_path, action):
    """A learning rate near the largest float32 overflows the parameters in the first step."""
    keys = ("--config.optimizer.name=adamw", "--config.optimizer.learning_rate=3.4e38", "--config.train.steps=2")
    keys += ("--config.optimizer.weight_decay=10.0", f"--config.train.on_nonfinite={action}")
    code, output = train(tmp_path / "run", *DIVERGING, *keys)
    assert code == {"stop": 3, "skip": 0}[action]
    assert "step 1: the update is not finite (the loss and the gradient norm are); " in output


@pytest.mark.slow
def test_the_last_finite_state_does_not_depend_on_the_dispatches(train, tmp_path):
    for k in (1, 4):
        assert train(tmp_path / f"by_{k}", *DIVERGING, f"--config.train.steps_per_dispatch={k}")[0] == 3
    last = bad_step(tmp_path / "by_1") - 1
    assert bad_step(tmp_path / "by_4") == last + 1
    assert checksums(tmp_path / "by_1", last) == checksums(tmp_path / "by_4", last)


@pytest.mark.slow
def test_steps_that_are_not_finite_can_be_skipped(train, tmp_path):
    assert train(tmp_path / "run", *DIVERGING)[0] == 3
    code, output = train(tmp_path / "run", *DIVERGING, "--resume", "--config.train.on_nonfinite=skip")
    assert code == 0
    assert "the update was skipped" in output
    summary = strict_json((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 12)
    lines = [line for line in metrics_of(tmp_path / "run") if "split" not in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert summary["skipped"] == sum(not np.isfinite(line["loss"] + line["grad_norm"]) for line in lines) > 0
    assert_only_finite_checkpoints(tmp_path / "run")


# ---- Execution options ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_corpus_on_the_host_gives_the_same_run(bench, train, tmp_path):
    code, _ = train(tmp_path / "run", "--config.data.device_bytes=0")
    assert code == 0
    assert metrics_of(tmp_path / "run") == metrics_of(bench.reference())
    assert checksums(tmp_path / "run", 12) == checksums(bench.reference(), 12)


@pytest.mark.slow
def test_micro_batches_keep_the_dropout_masks(bench, train, tmp_path):
    code, _ = train(tmp_path / "run", "--config.train.micro_batch_size=2")
    assert code == 0
    reference = {line["step"]: line["loss"] for line in metrics_of(bench.reference()) if "split" not in line}
    ours = {line["step"]: line["loss"] for line in metrics_of(tmp_path / "run") if "split" not in line}
    np.testing.assert_allclose([ours[s] for s in ours], [reference[s] for s in ours], rtol=1e-5)


@pytest.mark.slow
def test_details_and_a_profile_are_written(train, tmp_path):
    detail, profile = "--config.log.detail_every=4", "--config.train.profile=(3,4)"
    code, output = train(tmp_path / "run", detail, profile, "--config.train.steps=6")
    assert code == 0
    lines = [line for line in metrics_of(tmp_path / "run") if "detail" in line]
    assert [line["step"] for line in lines] == [0, 4]
    assert set(lines[0]["detail"]) == {"gradients", "parameters", "updates", "activations"}
    assert lines[0]["detail"]["parameters"]["final_norm/scale_D"] == 1.0  # gains start at one
    assert lines[0]["detail"]["activations"]["layers/output"][0] > 0
    assert "profile of steps 3 to 4" in output
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_debug_computes_the_same_without_jit(bench, train, tmp_path):
    options = ("--config.train.debug=true", "--config.train.steps_per_dispatch=1")
    code, _ = train(tmp_path / "run", *options, "--config.eval.every=0")
    assert code == 0
    reference = [line["loss"] for line in metrics_of(bench.reference()) if "split" not in line]
    np.testing.assert_allclose(
        [line["loss"] for line in metrics_of(tmp_path / "run") if "split" not in line], reference, rtol=1e-5
    )


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
