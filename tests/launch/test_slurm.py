"""On a real SLURM with two nodes on this machine, jobs are requeued if a restart can help, resume,
and share a sweep.

Needs Debian's slurm-wlm and munge (apt-get install slurm-wlm munge). All files of the cluster are
in one temporary directory.
"""

import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from running import CONFIG, checksums, free_ports, metrics_of, several, summary_of

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in NEEDED),
        reason="slurm-wlm and munge are not installed",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons need root"),
]

CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire=20
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool.%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=2000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=2
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Start a cluster; yields the environment variables with which sbatch and srun find it."""
    base = tmp_path_factory.mktemp("cluster")
    (base / "state").mkdir()
    for node in ("n1", "n2"):
        (base / f"spool.{node}").mkdir()
    (base / "munge.key").write_bytes(secrets.token_bytes(1024))
    (base / "munge.key").chmod(0o400)
    ports = free_ports(4)
    (base / "slurm.conf").write_text(CONF.format(host=platform.node(), base=base, ports=ports))
    found = {
        "SLURM_CONF": str(base / "slurm.conf"),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{ports[3]}",
    }
    env = os.environ | found
    files = [f"--{kind}-file={base / f'munge.{kind}'}" for kind in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={base / 'munge.socket'}", *files],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    running = []
    try:
        for daemon in daemons:
            log = open(base / f"{'-'.join(daemon[:1] + daemon[3:4])}.out".replace("/", "_"), "w")  # noqa: SIM115
            running.append(subprocess.Popen(daemon, env=env, stdout=log, stderr=log))
            log.close()
            time.sleep(2)
        wait_until(
            lambda: "idle" in output(env, "sinfo", "-h", "-o", "%T"),
            60,
            lambda: output(env, "sinfo", "-R"),
        )
        yield found
    finally:
        subprocess.run(["scancel", "--user=root"], env=env, capture_output=True)
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def output(env, *command: str) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def wait_until(condition, seconds: float, explain) -> None:
    """Wait for a condition; after `seconds` fail with what explain() returns."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.5)


def submit(bench, env, workdir, *arguments: str) -> str:
    """Submit a job and return its ID."""
    command = [
        sys.executable,
        "-m",
        "launch.slurm",
        "--time",
        "10",
        "--workdir",
        str(workdir),
        *arguments,
    ]
    sent = subprocess.run(
        command, cwd=bench.base, env=env, capture_output=True, text=True, timeout=60
    )
    assert sent.returncode == 0, sent.stderr
    return sent.stdout.split()[3]


def state_of(env, job: str, log: Path) -> str:
    """Return SLURM's description of a job and the end of its log."""
    return output(env, "scontrol", "show", "job", job) + (
        log.read_text()[-3000:] if log.exists() else "no log"
    )


def test_a_preempted_job_is_requeued_and_equals_an_uninterrupted_run(bench, slurm, tmp_path):
    steps = ("--config.train.steps=300", "--config.eval.every=0", "--config.checkpoint.every=0")
    run = (
        f"--config={CONFIG}",
        f"--config.data.source=text:{bench.text}",
        "--config.log.tensorboard=false",
        *steps,
    )
    env, workdir = bench.env | slurm, tmp_path / "run"
    job = submit(bench, env, workdir, "--nodes", "2", "--", *run)
    log, lines = workdir / "slurm.log", workdir / "metrics.jsonl"

    def explain() -> str:
        return state_of(env, job, log)

    wait_until(lambda: lines.exists() and '"step": 20,' in lines.read_text(), 240, explain)
    output(
        env,
        "sbatch",
        "--partition=urgent",
        "--nodes=2",
        f"--output={tmp_path / 'urgent.log'}",
        "--wrap=sleep 1",
    )
    wait_until(
        lambda: re.search(r"Restarts=[1-9]", output(env, "scontrol", "show", "job", job)),
        400,
        explain,
    )
    # Until the job finishes, the summary is that of the preempted start.
    wait_until(lambda: summary_of(workdir)["status"] == "finished", 240, explain)
    whole = tmp_path / "whole"  # the same run by two processes, undisturbed
    with several(bench, whole, 2, *steps) as running:
        assert [process.wait(timeout=300) for process in running] == [0, 0]
    assert len(metrics_of(workdir)) == len(metrics_of(whole)) > 300
    assert metrics_of(workdir) == metrics_of(whole)
    assert checksums(workdir, 300) == checksums(whole, 300)


def test_sbatch_receives_options_unchanged(bench, slurm, tmp_path):
    env, comment = bench.env | slurm, r"it's 'two' words, a \ and a #"
    further = shlex.join(["--hold", f"--comment={comment}", "--no-requeue", "--time=30"])
    job = submit(
        bench, env, tmp_path / "it's a run", f"--sbatch={further}", "--", f"--config={CONFIG}"
    )
    described = output(env, "scontrol", "show", "job", job)
    output(env, "scancel", job)
    for line in (
        "JobName=it's a run\n",
        f"Comment={comment} ",
        "TimeLimit=00:30:00 ",
        " Requeue=0 ",
    ):
        assert line in described
    assert f"StdOut={tmp_path}/it's a run/slurm.log\n" in described


ONE_TASK_FAILS = """\
import os, runpy, signal
from lm.system.errors import UserError


def get_config():
    if os.environ.get("SLURM_PROCID") == "1":
        {action}
    return runpy.run_path({config!r})["get_config"]()
"""


def submit_with_failing_task(bench, env, tmp_path: Path, action: str) -> str:
    """Submit a run in tmp_path/50%j whose task 1 does `action` when it loads its config; returns
    the ID of the job.
    """
    (tmp_path / "fails.py").write_text(ONE_TASK_FAILS.format(action=action, config=str(CONFIG)))
    run = (f"--config={tmp_path / 'fails.py'}", f"--config.data.source=text:{bench.text}")
    return submit(bench, env, tmp_path / "50%j", "--nodes", "2", "--", *run)


def test_a_mistake_of_one_task_ends_the_job(bench, slurm, tmp_path):
    """The other task is stopped while it imports jax, and srun exits with its code 143."""
    env, log = bench.env | slurm, tmp_path / "50%j" / "slurm.log"
    job = submit_with_failing_task(bench, env, tmp_path, 'raise UserError("wrong on this node")')
    wait_until(
        lambda: "JobState=FAILED" in state_of(env, job, log), 120, lambda: state_of(env, job, log)
    )
    assert "ExitCode=2:0" in output(env, "scontrol", "show", "job", job)
    assert "wrong on this node" in log.read_text()
    assert "the job is not requeued" in log.read_text()


def test_a_job_whose_task_died_is_requeued_and_finishes(bench, slurm, tmp_path):
    env, log = bench.env | slurm, tmp_path / "50%j" / "slurm.log"
    die = 'os.environ.get("SLURM_RESTART_COUNT") or os.kill(os.getpid(), signal.SIGKILL)'
    job = submit_with_failing_task(bench, env, tmp_path, die)
    wait_until(
        lambda: "JobState=COMPLETED" in output(env, "scontrol", "show", "job", job),
        400,
        lambda: state_of(env, job, log),
    )
    assert "Restarts=1" in output(env, "scontrol", "show", "job", job)
    assert summary_of(log.parent)["status"] == "finished"
    assert not list(log.parent.glob(".slurm-*"))


def test_jobs_of_an_array_share_a_sweep(bench, slurm, tmp_path):
    env, workdir = bench.env | slurm, tmp_path / "sweep"
    job = submit(
        bench, env, workdir, "--array", "2", "--", f"--config={CONFIG.with_name('tiny_sweep.py')}"
    )
    logs = [tmp_path / f"sweep-{i}.log" for i in range(2)]

    def completed() -> bool:
        return output(env, "scontrol", "show", "job", job).count("JobState=COMPLETED") == 2

    wait_until(completed, 400, lambda: "".join(state_of(env, job, log) for log in logs))
    runs = map(json.loads, (workdir / "runs.jsonl").read_text().splitlines())
    made = Counter(
        (run["phase"], run["variant"], run["optimizer.learning_rate"], run["seed"]) for run in runs
    )
    assert set(made.values()) == {1}
    # 3 rates of each of 3 variants and one more of glu; 2 fresh seeds of each
    assert len(made) == 10 + 6
    for log in logs:  # each job trained some of them
        assert re.search(r"^(tuning|final) \d+/", log.read_text(), re.MULTILINE), log.read_text()
