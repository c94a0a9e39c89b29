"""The command lm.train: mistakes are reported before anything is computed or written."""

import signal

from running import CONFIG

from lm import data
from lm.train import main as train_main

TINY = f"--config={CONFIG}"


REFUSALS = {
    "every mistake at once": (
        [TINY, "--resume", "--config.model.d_modle=3", "--config.train.steps=abc"],
        ["--resume", "--workdir", "config.model.d_modle", "d_model?", "config.train.steps: 'abc'"],
    ),
    "misspelled option": ([TINY, "--resum"], ["--resum"]),
    "no config": ([], ["--config"]),
    "workdir is a file": ([TINY, f"--workdir={CONFIG}"], ["is a file"]),
    "workdir is a URL": (
        [TINY, "--workdir=gs://bucket/run"],
        ["--workdir gs://bucket/run", "mount the bucket"],
    ),
}


def test_mistakes_are_reported_without_files(command, tmp_path):
    for case, (arguments, expected) in REFUSALS.items():
        code, output = command(train_main, *arguments)
        assert code == 2, case
        assert [text for text in expected if text not in output] == [], case
        assert not any(tmp_path.iterdir())


RUN_REFUSALS = {
    "not resumed": ([], ["already holds a run", "--resume"]),
    "another experiment": (
        ["--resume", "--config.model.d_model=32", "--config.optimizer.b2=0.9"],
        ["config.model.d_model: 16 -> 32", "config.optimizer.b2: 0.95 -> 0.9"],
    ),
    "cosine does not grow": (
        ["--resume", "--config.train.steps=24"],
        ["config.train.steps: 12 -> 24", "schedule"],
    ),
    "shrink": (["--resume", "--config.train.steps=6"], ["config.train.steps: 12 -> 6", "shrink"]),
}


def test_a_run_is_never_overwritten(bench, train):
    reference = bench.reference()
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("*")}
    for case, (arguments, expected) in RUN_REFUSALS.items():
        code, output = train(reference, *arguments)
        assert code == 2, case
        assert [text for text in expected if text not in output] == [], case
        assert {path: path.stat().st_mtime_ns for path in reference.rglob("*")} == before


def test_options_that_the_compiler_does_not_know(train, tmp_path):
    for option, expected in (
        ("xla_absent=1", "xla_absent"),
        ("xla_cpu_enable_fast_math=yes", "'yes' is not a valid"),
    ):
        code, output = train(tmp_path / "run", f"--config.train.compiler_options={option}")
        assert (code, "config.train.compiler_options: " in output, expected in output) == (
            2,
            True,
            True,
        )


def test_mistakes_that_need_the_data(train, tmp_path):
    code, output = train(tmp_path / "run", "--config.data.source=text:absent.txt")
    assert code == 2
    assert "absent.txt" in output
    code, output = train(tmp_path / "run", "--config.data.cache_dir=gs://bucket/cache")
    assert (code, "config.data.cache_dir gs://bucket/cache: URLs" in output) == (2, True)
    branch = (
        f"--branch_from={tmp_path / 'absent'}",
        "--config.init_from=gone",
        "--config.optimizer.schedule=wsd",
    )
    # a branch does not need the run that its source began from
    code, output = train(tmp_path / "run", *branch)
    assert (code, "--branch_from" in output, "init_from" in output) == (2, True, False)
    prompt, long = "--config.eval.sample_prompt=Zeus", "--config.train.seq_len=1000"
    code, output = train(tmp_path / "run", "--config.eval.sample_tokens=5", prompt, long)
    assert code == 2
    assert "config.eval.sample_prompt" in output
    assert "config.train.seq_len" in output
    assert not any(tmp_path.iterdir())
    (tmp_path / "one.txt").write_text("a" * 2000)
    probes = "--config.eval.probes=recall", f"--config.data.source=text:{tmp_path / 'one.txt'}"
    code, output = train(tmp_path / "run", *probes)
    assert (code, "config.eval.probes" in output, (tmp_path / "run").exists()) == (2, True, False)


def test_ctrl_c_before_training_leaves_no_files(train, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "open_corpus", interrupted)
    assert train(tmp_path / "run") == (128 + signal.SIGINT, "interrupted\n")
    assert not any(tmp_path.iterdir())
