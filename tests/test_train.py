"""The command lm.train: the files of a run, its output, and its execution options."""

import json
import sys

import fsspec
import jax
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from running import checkpoint_steps, metrics_of, summary_of

from lm import compare, evaluate, runs
from lm.cost.devices import peak_flops
from lm.data import prepare
from lm.training.finish import joined
from lm.workdir.metrics import best_step, validation_losses

# One layer of width 16 (2 heads of 8, SwiGLU of 64: 8/3 16 rounded to 64), untied, over 14
# characters: embedding and head 2 * 14 * 16, three norms 3 * 16, attention 4 * 16 * 16,
# feed-forward 3 * 16 * 64.
N_PARAMS = 2 * 14 * 16 + 3 * 16 + 4 * 16 * 16 + 3 * 16 * 64


def strict_json(text: str):
    """Parse strict JSON, which has neither NaN nor Infinity."""
    return json.loads(text, parse_constant=pytest.fail)


# ---- A run from start to end ---------------------------------------------------------------------


def test_a_run_writes_every_documented_file(bench):
    workdir = bench.reference()
    names = {path.name for path in workdir.iterdir()} - {".lock"}
    assert names == {
        "config.json", "run.json", "tokenizer.json", "metrics.jsonl", "tensorboard", "checkpoints", "samples",
        "summary.json", "loss.png",
    }  # fmt: skip
    config = strict_json((workdir / "config.json").read_text())
    assert (config["name"], config["model"]["d_model"], config["train"]["steps"]) == (
        "tiny",
        16,
        12,
    )
    (start,) = strict_json((workdir / "run.json").read_text())["starts"]
    assert {"time", "versions", "git", "host", "argv"} <= set(start)
    assert start["versions"]["jax"] == jax.__version__
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (workdir / "samples").iterdir()] == ["step_12.txt"]
    assert len((workdir / "samples" / "step_12.txt").read_text()) == len("\n") + 10
    assert any((workdir / "tensorboard").iterdir())
    assert 12 in checkpoint_steps(workdir)


def test_the_summary_has_the_counts_and_losses_of_the_run(bench):
    workdir = bench.reference()
    summary = strict_json((workdir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("finished", 12, 12 * 4 * 16)
    assert (summary["n_params"], summary["data"]) == (N_PARAMS, "text.txt")
    printed = (bench.base / "reference.txt").read_text()
    assert [
        text in printed for text in (f"{N_PARAMS:,} parameters", "unigram baseline", "step 12/12")
    ] == [True] * 3
    final = {
        line["split"]: line
        for line in metrics_of(workdir)
        if "split" in line and line["step"] == 12
    }
    assert summary["val_loss"] == final["validation"]["loss"]
    assert summary["test_loss"] == final["test"]["loss"]
    # Every character is one byte, and one token: bits per byte are the loss in bits.
    assert summary["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / np.log(2), rel=1e-12)
    assert summary["wall_seconds"] > 0
    assert sum(summary["goodput"].values()) == pytest.approx(1, abs=1e-3)
    assert min(summary["goodput"].values()) >= 0
    assert (
        summary["config_digest"]
        == json.loads((workdir / "run.json").read_text())["experiment_digest"]
    )


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
    assert {line["tokens"] for line in lines if line.get("split") == "validation"} == {
        n_validation - 1
    }
    assert lines[-2]["loss"] < lines[4]["loss"]  # the model learned


def test_a_run_may_have_the_largest_seed(train, tmp_path):
    keys = ("--config.train.steps=1", "--config.eval.every=0", "--config.eval.final_splits=test")
    assert train(tmp_path / "run", "--config.train.seed=4294967295", *keys)[0] == 0
    assert metrics_of(tmp_path / "run")[-1]["split"] == "test"


def test_splits_are_joined_by_their_tokens_and_bytes():
    common = {"windows": 4, "data": "text"}
    parts = [
        # 1.5 bytes per token
        common
        | {
            "loss": 2.0,
            "tokens": 300,
            "bits_per_byte": 2 / np.log(2) / 1.5,
            "ema_loss": 1.0,
            "best_loss": 0.5,
        },
        common
        | {
            "loss": 3.0,
            "tokens": 100,
            "bits_per_byte": 3 / np.log(2),
            "ema_loss": 2.0,
            "best_loss": 0.1,
        },
    ]
    line = joined(parts)
    assert (line["loss"], line["tokens"], line["windows"]) == (900 / 400, 400, 8)
    assert (line["ema_loss"], line["best_loss"]) == (500 / 400, 160 / 400)
    assert line["bits_per_byte"] == pytest.approx(900 / np.log(2) / (450 + 100))
    assert joined([part | {"bits_per_byte": None} for part in parts])["bits_per_byte"] is None


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
    """With eval.max_batches, the final evaluation of the full split does not score the last
    checkpoint.
    """
    keys = ["--config.optimizer.schedule=constant", "--config.model.dropout=0"]
    keys.append("--config.optimizer.learning_rate=1e-12")  # too small to change the loss
    assert train(tmp_path / "run", *keys, "--config.eval.max_batches=1")[0] == 0
    losses = validation_losses(metrics_of(tmp_path / "run"))
    assert set(losses) == {4, 8, 12}
    assert max(losses.values()) - min(losses.values()) < 1e-5
    assert abs(losses[12] - summary_of(tmp_path / "run")["val_loss"]) > 1e-4  # over the full split
    # Extended with more batches: the new scores are compared with one another only, and the best
    # one so far is kept.
    best = best_step(losses, losses)
    keys += ["--config.eval.max_batches=2", "--config.checkpoint.keep=1"]
    for steps in (20, 28):
        assert train(tmp_path / "run", *keys, f"--config.train.steps={steps}", "--resume")[0] == 0
    # step 12 anew
    assert set(validation_losses(metrics_of(tmp_path / "run"))) == {
        12,
        16,
        20,
        24,
        28,
    }
    assert best in checkpoint_steps(tmp_path / "run")


@pytest.mark.slow
def test_a_run_stops_when_its_patience_ends_and_does_not_go_on(train, tmp_path):
    keys = (
        "--config.optimizer.learning_rate=1e-30",
        "--config.eval.every=2",
        "--config.eval.patience=2",
    )
    code, output = train(tmp_path / "run", *keys)
    assert (code, "no smaller validation loss" in output) == (0, True)
    summary = summary_of(tmp_path / "run")
    # the loss of step 2 stays the smallest
    assert (summary["status"], summary["steps"]) == (
        "stopped",
        6,
    )
    assert train(tmp_path / "run", *keys, "--resume")[0] == 0
    assert summary_of(tmp_path / "run")["steps"] == summary["steps"]


@pytest.mark.slow
def test_a_run_whose_reader_goes_away_continues(bench, tmp_path):
    with (
        open(tmp_path / "stderr.txt", "w") as stderr,
        bench.start(tmp_path / "run", stderr=stderr) as run,
    ):
        run.stdout.readline()
        run.stdout.close()
        assert run.wait(timeout=600) == 0
    assert summary_of(tmp_path / "run")["status"] == "finished"


# ---- Execution options ---------------------------------------------------------------------------


@pytest.mark.slow
def test_details_and_a_profile_are_written_and_do_not_change_the_run(bench, train, tmp_path):
    detail, profile = "--config.log.detail_every=4", "--config.train.profile=(3,4)"
    code, output = train(tmp_path / "run", detail, profile)
    assert code == 0
    lines = [line for line in metrics_of(tmp_path / "run") if "detail" in line]
    assert [line["step"] for line in lines] == [0, 4, 8]
    kinds = {"attention", "activations", "gradients", "parameters", "updates", "update_ratio"}
    assert set(lines[0]["detail"]) == kinds
    assert lines[0]["detail"]["parameters"]["final_norm/scale_D"] == 1.0  # gains start at one
    assert lines[0]["detail"]["activations"]["layers/output"][0] > 0
    assert (tmp_path / "run" / "diagnostics.png").read_bytes().startswith(b"\x89PNG")
    assert f"diagnostics by layer: {tmp_path / 'run' / 'diagnostics.png'}" in output
    assert [line for line in metrics_of(tmp_path / "run") if "detail" not in line] == metrics_of(
        bench.reference()
    )
    assert "profile of steps 3 to 4" in output
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


# ---- Passwords in URLs ---------------------------------------------------------------------------


class Remote(MemoryFileSystem):
    """A file system behind a network, for what is tested."""

    protocol = "remote"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("remote://", "memory://"))


SECRETS = [  # each has "hunter", which is what nobody else may read
    "user:hunter@host/text.txt",
    "hunter@host/text.txt",
    "user:with/hunter@host/text.txt",
    "host/text.txt?X-Amz-Signature=hunter&X-Amz-Date=1",
    "host/text.txt?hunter",
]


@pytest.mark.parametrize("place", SECRETS)
def test_no_secret_of_a_url_is_recorded_or_printed(
    place, bench, train, command, tmp_path, monkeypatch
):
    """Neither by a run, its mirror and its resumption, nor by what reads the run; the user gives
    the URL again.
    """
    fsspec.register_implementation("remote", Remote, clobber=True)
    monkeypatch.setattr(Remote, "store", {})
    monkeypatch.setattr(Remote, "pseudo_dirs", [""])
    url, folder = f"remote://{place}", f"remote://user:hunter@{tmp_path.name}/mirror"
    Remote().pipe_file(url, bench.text.read_bytes())
    workdir, printed = tmp_path / "run", []
    given = f"--config.data.source=text:{url}", f"--mirror={folder}"
    monkeypatch.setattr(sys, "argv", ["lm.train", *given])
    printed.append(train(workdir, *given))
    (workdir / "summary.json").unlink()  # so that there is something to resume
    printed.append(train(workdir, *given, "--resume"))
    printed.append(command(evaluate.main, f"--workdir={workdir}", f"--data=text:{url}"))
    printed.append(command(runs.main, tmp_path, "--keys"))
    printed.append(
        command(
            prepare.main,
            f"--input=text:{url}",
            "--tokenizer=byte",
            "--workers=1",
            "--output=shards",
        )
    )
    assert [code for code, _ in printed] == [0] * len(printed), printed
    assert "trigram" in printed[2][1]  # the text is that of the run
    printed.append(command(evaluate.main, f"--workdir={workdir}"))
    printed.append(
        train(
            tmp_path / "other", "--config.data.source=text:" + url.replace("text.txt", "absent.txt")
        )
    )
    printed.append(command(compare.main, workdir, bench.reference()))
    assert [code for code, _ in printed[5:]] == [2, 2, 0], printed[5:]
    assert "--data" in printed[5][1]
    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    files |= {
        f"mirror{name}": file.getvalue()
        for name, file in Remote.store.items()
        if "/mirror/" in name
    }
    assert sum(name.startswith("mirror") for name in files) > 5
    assert not [
        name
        for name, content in files.items()
        if b"hunter" in content or "hunter" in name.split("/")[-1]
    ]
    assert not [output for _, output in printed if "hunter" in output]
    assert json.loads((workdir / "config.json").read_text())["data"]["source"].count("***") == 1
