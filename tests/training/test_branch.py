"""Branches of a run: several lengths from one run, bit-identical to runs of those lengths, and what
is refused.
"""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from checkpointing import assert_same, make_state, save_steps
from running import assert_same_run
from tiny import with_keys

from lm.config import Config, OptimizerConfig, to_dict
from lm.system.errors import TemporaryError, UserError
from lm.system.locks import lock
from lm.training.branch import branch
from lm.workdir.checkpoints import restore_params
from lm.workdir.metrics import to_line
from lm.workdir.saved_run import holds_run

# The decay of a run of N steps begins at step N / 2.
WSD = ("--config.optimizer.schedule=wsd", "--config.optimizer.decay_fraction=0.5", "--config.optimizer.warmup_steps=1",
       "--config.checkpoint.every=2", "--config.checkpoint.keep=100")  # fmt: skip


@pytest.mark.slow
def test_branches_are_bit_identical_to_runs_of_their_length_from_the_start(train, tmp_path):
    """From a run of 12 steps, whose decay begins at step 6: a shorter one from step 4, and a longer
    one from step 6.
    """
    assert train(tmp_path / "long", *WSD, "--config.train.steps=12")[0] == 0
    for steps, first in ((8, 4), (16, 6)):
        length = f"--config.train.steps={steps}"
        code, output = train(
            tmp_path / f"branch {steps}", *WSD, length, f"--branch_from={tmp_path / 'long'}"
        )
        assert code == 0, output
        assert f"branching from step {first} of {tmp_path / 'long'}" in output
        assert f"resuming at step {first}" in output
        assert "WARNING" not in output
        assert train(tmp_path / f"direct {steps}", *WSD, length)[0] == 0
        assert_same_run(tmp_path / f"branch {steps}", tmp_path / f"direct {steps}", steps)
    again = train(
        tmp_path / "branch 8", *WSD, "--config.train.steps=8", f"--branch_from={tmp_path / 'long'}"
    )
    assert again[0] == 2
    assert "already holds a run" in again[1]


def config(steps: int = 100, **optimizer) -> Config:
    o = OptimizerConfig(**{"schedule": "wsd", "decay_fraction": 0.3} | optimizer)
    return with_keys(Config(optimizer=o), train_steps=steps)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What a branch reads of a run of 200 steps with checkpoints at steps 20, 40 and 60."""
    path = tmp_path_factory.mktemp("runs") / "long"
    save_steps(path, (20, 40, 60), keep=9)
    (path / "config.json").write_text(json.dumps(to_dict(config(200))))
    (path / "run.json").write_text("{}")
    lines = [to_line({"step": step, "loss": 1.0}) for step in range(1, 61)]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (path / "checkpoints" / "20.corrupted-1").mkdir()
    return path


def branched(source, directory, config) -> list[str]:
    """Branch a run; return the lines to show."""
    lines = []
    branch(str(source), str(directory), config, say=lines.append)
    return lines


def test_a_branch_starts_at_the_last_shared_checkpoint(source, tmp_path):
    """The rates of a run of N steps are those of any longer one for the first floor(0.7 N) steps."""
    for steps, expected in {100: 60, 80: 40, 58: 40, 57: 20, 29: 20, 1000: 60}.items():
        new = tmp_path / f"{steps}"
        assert branched(source, new, config(steps)) == [
            f"branching from step {expected} of {source}"
        ]
        assert [path.name for path in (new / "checkpoints").iterdir()] == [f"{expected}"]
        assert_same(restore_params(new)[1], make_state(expected).params)
        assert len((new / "metrics.jsonl").read_text().splitlines()) == expected
        assert json.loads((new / "config.json").read_text())["train"]["steps"] == steps
    lines = branched(source, tmp_path / "other", with_keys(config(), train_on_spike="skip"))
    assert lines[1:] == ["with another setting: config.train.on_spike: none -> skip (run -> now)"]


def test_a_branch_that_would_differ_is_refused(source, tmp_path):
    for changed, expected in (
        (config(28), "has checkpoints of steps 20, 40, 60, and none up to step 19"),
        (config(schedule="cosine"), "needs optimizer.schedule = 'wsd'"),
        (config(decay_steps=50), "and optimizer.decay_steps = none"),
        (
            with_keys(config(), model_multi_token_prediction=True),
            "mtp_2, mtp_3 would change with train.steps",
        ),
        (
            config(learning_rate=0.5),
            "another experiment; set these back:\nconfig.optimizer.learning_rate",
        ),
    ):
        with pytest.raises(UserError) as caught:
            branch(str(source), str(tmp_path / "new"), changed)
        assert expected in "\n".join(caught.value.problems)
    with pytest.raises(UserError, match="holds no run"):
        branch(str(tmp_path), str(tmp_path / "new"), config())
    assert not (tmp_path / "new").exists()


def test_a_branch_that_was_killed_at_any_moment_is_completed_by_the_same_command(
    source, tmp_path, monkeypatch
):
    """Here of the commands that follow each other in one directory, each is killed, and then one is
    not.
    """
    new = tmp_path / "new"
    moments = (
        (shutil, "copyfile", 0),
        (Path, "replace", 0),
        (Path, "replace", 2),
        (shutil, "rmtree", 0),
    )
    for owner, name, after in (*moments, (shutil, "rmtree", 1)):
        calls, function = itertools.count(), getattr(owner, name)

        def killed(*args, calls=calls, function=function, after=after, **kwargs):
            if next(calls) == after:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, killed)
            with pytest.raises(KeyboardInterrupt):
                branched(source, new, config(100))
        assert not holds_run(new), name
    branched(source, new, config(100))
    assert {path.name for path in new.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "run.json",
    }
    assert restore_params(new)[0] == 60
    assert len((new / "metrics.jsonl").read_text().splitlines()) == 60


def test_a_branch_of_a_damaged_or_used_directory_leaves_no_run(source, tmp_path):
    damaged, new = shutil.copytree(source, tmp_path / "damaged"), tmp_path / "new"
    (damaged / "checkpoints" / "60" / "meta" / "metadata").write_text("{")
    with pytest.raises(UserError, match=r"checkpoint of step 60 in .* is corrupted"):
        branch(str(damaged), str(new), config(100))
    assert not new.exists()
    new.mkdir()
    with lock(new), pytest.raises(TemporaryError, match="is in use by"):
        branch(str(source), str(new), config(100))
    assert not holds_run(new)
    (damaged / "run.json").unlink()  # not needed to resume a run
    assert branched(damaged, new, config(80)) == [f"branching from step 40 of {damaged}"]


def test_a_directory_that_holds_a_run_is_left_as_it_is(source, tmp_path):
    """So the command of a branch that was interrupted can be rerun with --resume, even if its
    source is gone.
    """
    new = tmp_path / "new"
    branched(source, new, config(100))
    (new / "metrics.jsonl").write_text("those of later steps")
    assert branched(source, new, config(100)) == branched(tmp_path / "gone", new, config(100)) == []
    assert (new / "metrics.jsonl").read_text() == "those of later steps"
