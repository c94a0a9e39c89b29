"""A run that is killed, stopped or corrupted, and then resumed, ends like an uninterrupted run."""

import hashlib
import json
import re
import shutil
import signal
import time

import pytest
from running import (
    assert_same_run,
    checkpoint_steps,
    checksums,
    flip_a_bit,
    metrics_of,
    slow,
    small_disk,
    summary_of,
)
from test_ideas import BASE, PAIRS

from benchmarks.faults.runs import stopped_at
from lm.training.loop import Loop
from lm.workdir.metrics import cut_back


def steps_logged(workdir) -> list[int]:
    return [line["step"] for line in metrics_of(workdir) if "split" not in line]


def unfinished_copy(reference, workdir):
    """Copy a finished run, without its summary, so that it can be resumed."""
    shutil.copytree(reference, workdir)
    (workdir / "summary.json").unlink()
    return workdir


def exit_code(at: str) -> int:
    """Return the exit code of a run that a signal ended, such as "TERM evaluation 2"."""
    number = getattr(signal, f"SIG{at.split()[0]}")
    return -number if number == signal.SIGKILL else 128 + number


def damage(checkpoint) -> None:
    """Flip a bit in the middle of every file of arrays, because Orbax decides which of them it
    reads.
    """
    for file in (checkpoint / "state").glob("**/d/*"):
        flip_a_bit(file)


# How each start of a run ends: what is done to it at which moment (see tests/at_moment.py), more
# keys, its newest checkpoint, and the last step logged (None: that depends on timing).
STARTS = (
    # After dispatches of steps 1-2 and 3-4, before the line of step 3 and the first checkpoint.
    ("KILL log 3", (), 0, 2),
    # While the first checkpoint is being written.
    ("KILL save 1", (), 0, None),
    # In the evaluation at step 8 (the one at step 4 had 3 batches).
    ("KILL evaluation 5", (), 4, 8),
    # In the evaluation at step 8, which is not logged; that of step 4 is not repeated.
    ("TERM evaluation 2", ("--config.train.steps_per_dispatch=3",), 8, 8),
    # Before the line of step 9, after the line of the missing evaluation; step 10 has been sent by
    # then.
    ("INT log 2", ("--config.train.steps_per_dispatch=1",), 10, 10),
)


@pytest.mark.slow
def test_a_run_with_kills_and_both_signals_equals_an_uninterrupted_run(bench, tmp_path):
    reference, workdir = bench.reference(), tmp_path / "run"
    workdir.mkdir()  # --resume in an empty directory starts a new run
    for at, keys, saved, logged in STARTS:
        done = bench.train(workdir, "--resume", *keys, at=at)
        assert done.returncode == exit_code(at), at
        # an unfinished checkpoint is none
        assert not re.search("corrupted|Traceback", done.stdout + done.stderr)
        assert max(checkpoint_steps(workdir), default=0) == saved, at
        assert logged is None or steps_logged(workdir) == list(range(1, logged + 1)), at
        assert any((workdir / "checkpoints").glob("*tmp*")) == (at == "KILL save 1"), at
        if not at.startswith("KILL"):
            assert (summary_of(workdir)["status"], summary_of(workdir)["steps"]) == (
                "interrupted",
                saved,
            )
        else:
            with open(workdir / "metrics.jsonl", "a") as file:
                file.write('{"step": 9, "lo')
    done = bench.train(workdir, "--resume")
    assert (done.returncode, "resuming at step 10" in done.stdout) == (0, True)
    assert summary_of(workdir)["status"] == "finished"
    assert_same_run(workdir, reference)


def test_a_stopped_run_equals_an_uninterrupted_run(bench, train, tmp_path):
    keys = (
        "--config.log.tensorboard=true",
        "--config.eval.sample_tokens=10",
        "--config.train.steps_per_dispatch=1",
    )
    with stopped_at(9):
        assert train(tmp_path / "run", *keys)[0] == 128 + signal.SIGTERM
    assert (summary_of(tmp_path / "run")["status"], checkpoint_steps(tmp_path / "run")) == (
        "interrupted",
        [8, 10],
    )
    code, output = train(tmp_path / "run", *keys, "--resume")
    assert (code, "resuming at step 10" in output) == (0, True)
    assert_same_run(tmp_path / "run", bench.reference())


# Lines 6 and 12 are details, and line 19 is the evaluation of the test split. Batches 7 to 12
# belong to the final evaluations. The third checkpoint is the last.
MOMENTS = [
    "log 9",
    "log 12",
    "log 19",
    "evaluation 1",
    "evaluation 8",
    "evaluation 12",
    "save 2",
    "save 3",
]
ENDS = [
    *(f"KILL {moment}" for moment in MOMENTS),
    *(f"{name} evaluation 10" for name in ("TERM", "INT", "HUP")),
]


@pytest.mark.slow
@pytest.mark.parametrize("at", ENDS)
def test_a_run_that_is_ended_once_equals_an_uninterrupted_run(bench, tmp_path, at):
    ended = bench.train(tmp_path / "run", "--config.log.detail_every=4", at=at)
    assert ended.returncode == exit_code(at)
    assert at.startswith("KILL") or summary_of(tmp_path / "run")["status"] == "interrupted"
    done = bench.train(tmp_path / "run", "--resume", "--config.log.detail_every=4")
    assert done.returncode == 0, done.stderr
    whole = bench.base / "detailed"
    if not whole.exists():
        assert bench.train(whole, "--config.log.detail_every=4").returncode == 0
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(bench, tmp_path):
    with bench.start(tmp_path / "run", at="SLEEP evaluation 1") as process:
        try:
            for line in process.stdout:
                if line == "sleeping\n":
                    time.sleep(1)  # it may still be writing this line, and would not write the next
                    process.send_signal(signal.SIGINT)
                if "press Ctrl-C again" in line:
                    process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 128 + signal.SIGINT
        finally:
            process.kill()
    assert not (tmp_path / "run" / "summary.json").exists()
    assert checkpoint_steps(tmp_path / "run") == []  # nothing was saved


@pytest.mark.slow
@pytest.mark.parametrize("keys", PAIRS, ids=range(len(PAIRS)))
def test_a_run_with_ideas_resumes_to_the_same_bits(train, tmp_path, keys):
    """Each two ideas meet in one of these configs."""
    flags = [f"--config.model.{key}={value}" for key, value in (BASE | keys).items()]
    code, output = train(tmp_path / "whole", *flags)
    assert code == 0, output
    workdir = unfinished_copy(tmp_path / "whole", tmp_path / "parts")
    damage(workdir / "checkpoints" / "12")
    code, output = train(workdir, "--resume", *flags)
    assert code == 0, output
    assert output.count("corrupted checkpoint of step 12") == 1
    assert "falling back to step 8" in output
    assert_same_run(workdir, tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(bench, train):
    reference = bench.reference()
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("*")}
    code, output = train(reference, "--resume")
    assert (code, "finished run of 12 steps" in output) == (0, True)
    assert {path: path.stat().st_mtime_ns for path in reference.rglob("*")} == before


@pytest.mark.slow
def test_a_run_with_a_constant_schedule_can_be_extended(train, tmp_path):
    constant = "--config.optimizer.schedule=constant"
    for workdir, steps in (("grown", 6), ("grown", 12), ("whole", 12)):
        code, output = train(
            tmp_path / workdir, constant, f"--config.train.steps={steps}", "--resume"
        )
        assert code == 0
        assert ("config.train.steps: 6 -> 12" in output) == ((workdir, steps) == ("grown", 12))
    assert checksums(tmp_path / "grown", 12) == checksums(tmp_path / "whole", 12)
    assert steps_logged(tmp_path / "grown") == list(range(1, 13))
    assert summary_of(tmp_path / "grown")["val_loss"] == summary_of(tmp_path / "whole")["val_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 4])
def test_a_warm_started_run_resumes_without_its_source(bench, train, tmp_path, steps):
    """The checkpoint, also one of step 0, has all parameters."""
    source = tmp_path / "source"
    shutil.copytree(bench.reference(), source)
    keys = ("--config.optimizer.schedule=constant", f"--config.init_from={source}")
    assert train(tmp_path / "run", *keys, f"--config.train.steps={steps}")[0] == 0
    shutil.rmtree(source)
    code, output = train(tmp_path / "run", *keys, "--config.train.steps=8", "--resume")
    assert (code, f"resuming at step {steps}" in output) == (0, True)


def test_other_data_is_refused(bench, train, tmp_path):
    """Both run.json and the checkpoints record the data: run.json may be lost."""
    workdir = unfinished_copy(bench.reference(), tmp_path / "run")
    text = tmp_path / "other" / bench.text.name
    text.parent.mkdir()
    text.write_text(bench.text.read_text().replace("cat", "tac"))
    # The path is part of the experiment: the saved config gets the path of the other text.
    config = json.loads((workdir / "config.json").read_text())
    config["data"]["source"] = f"text:{text}"
    (workdir / "config.json").write_text(json.dumps(config))
    for step in checkpoint_steps(workdir):
        edit_meta(workdir, step, lambda meta: meta["config"]["data"].update(source=f"text:{text}"))
    before = (workdir / "metrics.jsonl").read_bytes()
    for record in ("as it was", '{"data": null, "starts": []}', None):
        if record is None:
            (workdir / "run.json").unlink()
        elif record != "as it was":
            (workdir / "run.json").write_text(record)
        code, output = train(workdir, "--resume", f"--config.data.source=text:{text}")
        assert (code, "other text or other tokens" in output) == (2, True)
        assert (workdir / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_seed_is_refused(bench, train, tmp_path):
    workdir = unfinished_copy(bench.reference(), tmp_path / "run")
    edit_meta(workdir, 12, lambda meta: meta["config"]["train"].update(seed=1))
    before = (workdir / "run.json").read_bytes()
    code, output = train(workdir, "--resume")
    assert code == 2
    assert "the checkpoint of step 12" in output
    assert "config.train.seed: 1 -> 0" in output
    assert (workdir / "run.json").read_bytes() == before


def edit_meta(workdir, step: int, edit) -> None:
    """Change what a checkpoint records of its run, with a new digest."""
    path = workdir / "checkpoints" / str(step) / "meta" / "metadata"
    record = json.loads(path.read_text())
    del record["sha256"]
    edit(record["meta"])
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record | {"sha256": digest}))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["deleted", "zeroed", "cut"])
def test_a_hole_in_the_metrics_is_reported(bench, train, tmp_path, damage):
    workdir = unfinished_copy(bench.reference(), tmp_path / "run")
    path = workdir / "metrics.jsonl"
    content = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(
            bytes(len(content))
            if damage == "zeroed"
            else b"".join(content.splitlines(True)[:3]) + b"{"
        )
    code, output = train(workdir, "--resume")
    assert code == 0
    first = 4 if damage == "cut" else 1
    assert f"WARNING: {path} is corrupted: lines of steps {first} to 12 are missing" in output
    assert checksums(workdir, 12) == checksums(bench.reference(), 12)


@pytest.mark.slow
def test_lines_of_a_larger_log_every_are_not_missing(train, tmp_path):
    """The second start saves at step 9, before its first line. The first one wrote none up to
    there, either.

    A hole that is shorter than the largest log.every is reported.
    """
    run = tmp_path / "run"
    for log, save, hole in ((100, 8, False), (5, 9, False), (1, 11, False), (1, 11, True)):
        keys = (
            "--config.eval.every=0",
            f"--config.log.every={log}",
            f"--config.checkpoint.every={save}",
        )
        code, output = train(run, "--resume", *keys)
        assert (code, "corrupted" in output, "steps 11 to 11 are missing" in output) == (
            0,
            hole,
            hole,
        )
        shutil.rmtree(run / "checkpoints" / "12")
        (run / "summary.json").unlink()
        cut_back(run / "metrics.jsonl", 10)


def test_a_run_whose_checkpoints_were_deleted_is_refused(bench, train, tmp_path):
    workdir = shutil.copytree(bench.reference(), tmp_path / "run")
    before = (workdir / "metrics.jsonl").read_bytes()
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "summary.json").write_text("{}")  # as of a run that was interrupted
    for damage in ("deleted", "emptied", "without summary"):
        if damage == "emptied":
            (workdir / "checkpoints").mkdir()
        if damage == "without summary":
            (workdir / "summary.json").unlink()
        code, output = train(workdir, "--resume")
        assert (code, "made 12 steps, and its checkpoints were deleted" in output) == (2, True)
        assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("lost", ["run", slow("run/metrics.jsonl")])
def test_a_run_whose_workdir_is_deleted_ends_with_one_line(train, tmp_path, monkeypatch, lost):
    def delete_and_save(self, state, step):
        path = tmp_path / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        save(self, state, step)

    save = Loop.save
    monkeypatch.setattr(Loop, "save", delete_and_save)
    code, output = train(tmp_path / "run")
    assert code == 1
    assert "run/metrics.jsonl was deleted, moved or replaced" in output.splitlines()[-1]
    assert (tmp_path / "run").exists() == (lost != "run")


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_one_line_and_leaves_no_partial_file(bench, tmp_path):
    with small_disk(tmp_path, "300k") as disk:
        done = bench.train(
            disk / "run", "--config.model.d_model=96", "--config.log.tensorboard=true"
        )
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1, done.stderr
        assert "run/checkpoints: No space left on device" in done.stderr
        assert not [
            path for path in disk.rglob("*") if "tmp" in path.name or "partial" in path.name
        ]
