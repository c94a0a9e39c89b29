"""Submit a run to SLURM: python -m launch.slurm --nodes 4 --gpus-per-node 8 -- --config configs/gpt2_124m.py

What follows `--` goes to python -m lm.train. The job has one task for each GPU (JAX gives a task the GPU of its local
number), saves when it is preempted or its time is nearly over, is queued again by itself, and goes on. With --array N
it is a sweep, sent as N jobs of one task, which has all GPUs of its node: they share the sweep's runs.
"""

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SECONDS_TO_SAVE = 120  # between SIGTERM and the end of the time limit

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
{options}#SBATCH --time={time}
#SBATCH --signal=TERM@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
cd {directory}
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}  # which srun does not take from sbatch by itself
# A task that ends badly takes the others with it; without that they would wait for it.
srun --kill-on-bad-exit=1 {command}
code=$?
# 143: SIGTERM came, and the state is saved.
if [ $code -eq 143 ]; then scontrol requeue {job}; fi
exit $code
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.slurm", description="Submit a run to SLURM.")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: one task a node, on its CPUs")
    parser.add_argument("--time", default="24:00:00", help="limit of one start; the job is queued again after it")
    parser.add_argument("--workdir", help="where it lives, on storage that all nodes share (runs/CONFIG)")
    parser.add_argument("--array", type=int, default=0, metavar="N", help="send a sweep, python -m lm.sweep, as N jobs")
    parser.add_argument("--name", help="of the job (the workdir's)")
    parser.add_argument("--sbatch", default="", metavar="='--X=1 --Y=2'", help="further options of sbatch, after =")
    parser.add_argument("--dry-run", action="store_true", help="print the job script and submit nothing")
    parser.add_argument(
        "train", nargs=argparse.REMAINDER, help="-- and the arguments of python -m lm.train or lm.sweep"
    )
    a = parser.parse_args(argv)
    if problem := check(a):
        print(problem, file=sys.stderr)
        return 2
    a.workdir = a.workdir or f"{'sweeps' if a.array else 'runs'}/{config_of(a.train).stem}"
    text = script(a)
    if a.dry_run:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        print(
            "there is no sbatch here; submit from a login node of the cluster, or look with --dry-run", file=sys.stderr
        )
        return 2
    log(a).parent.mkdir(parents=True, exist_ok=True)
    sent = subprocess.run(["sbatch"], input=text, text=True, capture_output=True, check=False)
    print((sent.stdout + sent.stderr).strip(), file=sys.stderr if sent.returncode else sys.stdout)
    if sent.returncode:
        with contextlib.suppress(OSError):  # it holds another run
            log(a).parent.rmdir()
    else:
        watched = str(log(a)).replace("%a", "0")
        print(f"watch: tail -f {watched}; stop and keep: scancel --signal=TERM JOB; stop for good: scancel JOB")
    return sent.returncode


def check(a) -> str | None:
    """What is wrong with the command line, None if nothing."""
    if a.train[:1] != ["--"] or (config := config_of(a.train)) is None:
        return "give the run after two dashes: -- --config FILE"
    if not config.is_file():
        return f"--config {config}: there is no such file"
    if a.time.isdecimal() and int(a.time) * 60 < 2 * SECONDS_TO_SAVE:
        return f"--time {a.time}: of these minutes the last {SECONDS_TO_SAVE // 60} are for saving; give more"
    try:
        shlex.split(a.sbatch)
    except ValueError as error:
        return f"--sbatch: {a.sbatch!r}: {error}"
    if any(word in ("--workdir", "--resume") or word.startswith("--workdir=") for word in a.train):
        return "--workdir belongs before the two dashes, and --resume is always given"
    if a.nodes < 1 or a.gpus_per_node < 0:
        return f"{a.nodes} nodes with {a.gpus_per_node} GPUs are none; give at least 1 node"
    if a.array < 0 or (a.array and a.nodes > 1):
        return f"--array {a.array} --nodes {a.nodes}: each job of a sweep has one node; give --array the number of jobs"
    return None


def config_of(words: list[str]) -> Path | None:
    """The file that --config names among the words after the two dashes."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
        if word == "--config" and following:
            return Path(following)
    return None


def log(a) -> Path:
    workdir = Path(a.workdir).absolute()
    return workdir.with_name(f"{workdir.name}-%a.log") if a.array else workdir / "slurm.log"


def script(a) -> str:
    """The job script."""
    further = [f"#SBATCH {word}\n" for word in shlex.split(a.sbatch)]
    gpus = [f"#SBATCH --gpus-per-node={a.gpus_per_node}\n"] if a.gpus_per_node else []
    array = [f"#SBATCH --array=0-{a.array - 1}\n"] if a.array else []
    command = [sys.executable, "-m", "lm.sweep" if a.array else "lm.train", *a.train[1:], "--workdir"]
    command += [str(Path(a.workdir).absolute()), *([] if a.array else ["--resume"])]
    return SCRIPT.format(
        name=shlex.quote(a.name or Path(a.workdir).name),
        nodes=a.nodes,
        tasks=1 if a.array else a.gpus_per_node or 1,
        options="".join(gpus + array + further),
        time=a.time,
        seconds=SECONDS_TO_SAVE,
        log=shlex.quote(str(log(a))),
        directory=shlex.quote(str(Path.cwd())),
        command=shlex.join(command),
        # One job of an array has the array's own number: by that alone all of them would be queued again.
        job="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if a.array else "$SLURM_JOB_ID",
    )


if __name__ == "__main__":
    sys.exit(main())
