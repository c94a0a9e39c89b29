"""The job script of launch.slurm requeues a job only if a restart can finish it.

The script runs with stubs of srun, scontrol and Python; a task is a line of bash.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import slurm
from lm.sweeps.results import RUNS

CONFIGS = Path(__file__).parents[1] / "configs"
TRAIN = ("--", "--config", str(CONFIGS / "tiny.py"))
SWEEP = ("--", "--config", str(CONFIGS / "tiny_sweep.py"))

# Like srun, it returns the highest exit code of its tasks.
SRUN = """\
shift
highest=0
while read -r line; do
  TASK=$line "$@"
  code=$?
  if [ $code -gt $highest ]; then highest=$code; fi
done < "$HERE/tasks"
exit $highest
"""
STAND_INS = {"srun": SRUN, "scontrol": 'echo "$@" >> "$HERE/requeued"', "python": 'eval "$TASK"'}
STOPPED = "kill -TERM $$"  # a task that srun stops because another task failed
SAVE = 'sleep 0.02; mkdir -p "$HERE/a run/checkpoints/$RANDOM"'
SAVE_RESULT = f'sleep 0.02; echo >> "$HERE/a run/{RUNS}"'  # runs.jsonl, to which a sweep appends


def script_of(capsys, *options: str, command=TRAIN) -> str:
    """Return the script that launch.slurm submits."""
    code = slurm.main([*options, "--dry-run", *command])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.fixture
def job(tmp_path, monkeypatch, capsys):
    """Return job(*options, command=...), which returns start(*tasks). Each call of start starts the
    same job again.
    """
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path)

    def job(*options: str, command=TRAIN):
        script = script_of(capsys, "--workdir", str(tmp_path / "a run"), *options, command=command)
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SRUN_"))
        }
        env |= {"PATH": f"{tmp_path}:{env['PATH']}", "HERE": str(tmp_path), "SLURM_JOB_ID": "7"}
        env |= {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}

        def start(*tasks: str, **environment: str) -> tuple[int, str | None, str]:
            """Start the job; return its exit code, the command with which it was requeued, and its
            log.
            """
            (tmp_path / "tasks").write_text("".join(f"{task}\n" for task in tasks))
            (tmp_path / "requeued").unlink(missing_ok=True)
            run = subprocess.run(
                ["bash"], input=script, env=env | environment, capture_output=True, text=True
            )
            requeued = tmp_path / "requeued"
            return (
                run.returncode,
                requeued.read_text() if requeued.exists() else None,
                run.stdout + run.stderr,
            )

        return start

    return job


@pytest.mark.parametrize("code", [2, 3])
def test_a_mistake_or_a_loss_that_is_not_finite_is_not_requeued(job, code):
    """srun exits with the highest code, here that of another task, which it stopped."""
    found, requeued, log = job()(f"exit {code}", STOPPED)
    assert (found, requeued) == (code, None)
    assert f"exit code {code}: a restart would fail again" in log


def test_a_job_whose_task_dies_is_requeued_a_limited_number_of_times(job):
    start = job("--restarts", "2")
    dead = ("kill -KILL $$", STOPPED)
    for _ in range(2):
        assert start(*dead)[1] == "requeue 7\n"
    code, requeued, log = start(*dead)
    assert (code, requeued) == (143, None)
    assert "3 starts in a row saved no checkpoint or result" in log
    assert start(*dead)[1] == "requeue 7\n"  # the count starts again after a requeue by hand


def test_a_run_that_saves_is_requeued_any_number_of_times(job):
    """A checkpoint resets the count of restarts."""
    start = job("--restarts", "1")
    for task in ("exit 143", *[f"{SAVE}; exit 143"] * 3, "exit 143"):
        assert start(task, "exit 143")[:2] == (143, "requeue 7\n")
    assert start("exit 143")[1] is None


def test_a_job_that_cannot_count_its_starts_is_not_requeued(job, tmp_path):
    """Otherwise a full disk would requeue it forever. Here a directory has the name of the file
    with the count.
    """
    (tmp_path / "a run" / ".slurm-7").mkdir(parents=True)
    code, requeued, log = job()("exit 1")
    assert (code, requeued) == (1, None)
    assert ".slurm-7: Is a directory" in log


def test_a_result_of_a_sweep_counts_as_a_checkpoint_and_one_job_of_the_array_is_requeued(job):
    start = job("--restarts", "0", "--array", "2", command=SWEEP)
    assert start(f"{SAVE_RESULT}; exit 143")[1] == "requeue 6_1\n"
    assert start("exit 1")[1] is None


def test_a_finished_run_is_not_requeued_and_leaves_no_files(job, tmp_path):
    assert job()("exit 0", "exit 0")[:2] == (0, None)
    assert list((tmp_path / "a run").iterdir()) == []


def test_a_task_can_save_when_it_is_stopped(job):
    """SIGTERM goes to all processes of a task, including the shell that records its exit code."""
    saves = f"trap '{SAVE}; exit 2' TERM; kill -TERM $PPID; kill -TERM $$; exit 9"
    assert job()(saves)[0] == 2


@pytest.mark.parametrize(("cpus", "expected"), [({}, "none"), ({"SLURM_CPUS_PER_TASK": "8"}, "8")])
def test_tasks_get_all_cpus_unless_a_number_was_given(job, cpus, expected):
    assert f"cpus {expected}\n" in job()("echo cpus ${SRUN_CPUS_PER_TASK:-none}", **cpus)[2]
