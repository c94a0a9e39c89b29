"""Branches of a run: several lengths from one run, bit-identical to runs of those lengths, and what is refused."""

import dataclasses
import json

import pytest
from running import assert_same_run

from lm.config import Config, to_dict
from lm.errors import UserError
from lm.training.branch import branch
from lm.workdir.saved_run import holds_run

# The decay of a run of N steps begins at step N / 2.
WSD = ("--config.optimizer.schedule=wsd", "--config.optimizer.decay_fraction=0.5", "--config.optimizer.warmup_steps=1",
       "--config.checkpoint.every=2", "--config.checkpoint.keep=100")  # fmt: skip


@pytest.mark.slow
def test_branches_are_bit_identical_to_runs_of_their_length_from_the_start(train, tmp_path):
    """From a run of 12 steps, whose decay begins at step 6: a shorter one from step 4, and a longer one from step 6."""
    assert train(tmp_path / "long", *WSD, "--config.train.steps=12")[0] == 0
    for steps, first in ((8, 4), (16, 6)):
        length = f"--config.train.steps={steps}"
        code, output = train(tmp_path / f"branch {steps}", *WSD, length, f"--branch_from={tmp_path / 'long'}")
        assert code == 0, output
        assert f"branching from step {first} of {tmp_path / 'long'}" in output
        assert f"resuming at step {first}" in output
        assert "WARNING" not in output
        assert train(tmp_path / f"direct {steps}", *WSD, length)[0] == 0
        assert_same_run(tmp_path / f"branch {steps}", tmp_path / f"direct {steps}", steps)
    again = train(tmp_path / "branch 8", *WSD, "--config.train.steps=8", f"--branch_from={tmp_path / 'long'}")
    assert again[0] == 2
    assert "already holds a run" in again[1]


def config(steps: int = 100, **optimizer) -> Config:
    c = Config()
    o = dataclasses.replace(c.optimizer, **{"schedule": "wsd", "decay_fraction": 0.3} | optimizer)
    return dataclasses.replace(c, optimizer=o, train=dataclasses.replace(c.train, steps=steps))


def long_run(path, steps=(20, 40, 60)):
    """Write what a branch reads of a run of 200 steps with checkpoints at these steps."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_dict(config(200))))
    (path / "run.json").write_text("{}")
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 61)))
    for step in steps:
        (path / "checkpoints" / f"{step}").mkdir(parents=True)
        (path / "checkpoints" / f"{step}" / "state").write_text(f"that of {step}")
    (path / "checkpoints" / "20.corrupted-1").mkdir()
    return path


def branched(source, directory, config) -> list[str]:
    """Branch a run; return the lines to show."""
    lines = []
    branch(str(source), str(directory), config, say=lines.append)
    return lines


@pytest.mark.parametrize(("steps", "expected"), [(100, 60), (80, 40), (58, 40), (57, 20), (29, 20), (1000, 60)])
def test_a_branch_starts_at_the_last_shared_checkpoint(tmp_path, steps, expected):
    """The rates of a run of N steps are those of any longer one for the first floor(0.7 N) steps."""
    source, new = long_run(tmp_path / "long"), tmp_path / "new"
    assert branched(source, new, config(steps)) == [f"branching from step {expected} of {source}"]
    assert [path.name for path in (new / "checkpoints").iterdir()] == [f"{expected}"]
    assert (new / "checkpoints" / f"{expected}" / "state").read_text() == f"that of {expected}"
    assert len((new / "metrics.jsonl").read_text().splitlines()) == expected
    assert json.loads((new / "config.json").read_text())["train"]["steps"] == steps


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (config(28), "has checkpoints of steps 20, 40, 60, and none up to step 19"),
        (config(schedule="cosine"), "needs optimizer.schedule = 'wsd'"),
        (config(decay_steps=50), "and optimizer.decay_steps = none"),
        (config(learning_rate=0.5), "another experiment; set these back:\nconfig.optimizer.learning_rate"),
    ],
)
def test_a_branch_that_would_differ_is_refused(tmp_path, changed, expected):
    source = long_run(tmp_path / "long")
    with pytest.raises(UserError) as caught:
        branch(str(source), str(tmp_path / "new"), changed)
    assert expected in "\n".join(caught.value.problems)
    assert not (tmp_path / "new").exists()


def test_a_branch_can_be_repeated_after_a_failed_copy(tmp_path):
    """As when the disk is full, or the run in the source deletes the checkpoint. The command may be rerun as it is."""
    source, new = long_run(tmp_path / "long"), tmp_path / "new"
    missing = source / "checkpoints" / "60" / "missing"
    missing.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="missing"):
        branch(str(source), str(new), config(100))
    assert not holds_run(new)
    missing.unlink()
    assert branched(source, new, config(100)) == [f"branching from step 60 of {source}"]
    assert {path.name for path in new.iterdir()} == {"checkpoints", "config.json", "metrics.jsonl", "run.json"}


def test_a_directory_that_holds_a_run_is_left_as_it_is(tmp_path):
    """So the command of a branch that was interrupted can be rerun with --resume, even if its source is gone."""
    source, new = long_run(tmp_path / "long"), tmp_path / "new"
    branched(source, new, config(100))
    (new / "metrics.jsonl").write_text("those of later steps")
    assert branched(source, new, config(100)) == branched(tmp_path / "gone", new, config(100)) == []
    assert (new / "metrics.jsonl").read_text() == "those of later steps"


def test_a_branch_of_a_run_without_its_record(tmp_path):
    """run.json is not needed to resume a run."""
    source = long_run(tmp_path / "long")
    (source / "run.json").unlink()
    assert branched(source, tmp_path / "new", config(100)) == [f"branching from step 60 of {source}"]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        branch(str(tmp_path), str(tmp_path / "new"), config())
