"""Submit a run to SLURM: python -m launch.slurm --nodes 4 --gpus-per-node 8 -- --config configs/gpt2_124m.py

The arguments after `--` are those of python -m lm.train. The job has one task per GPU, because JAX gives each task the
GPU of its local index. When the job is preempted or its time limit is near, it saves a checkpoint, is requeued, and
resumes. With --array N the job is a sweep: N jobs of one task each, with all GPUs of their node, share its runs.
"""

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from launch.arguments import after_dashes, check_sweep, check_train
from lm.errors import UserError, run_command
from lm.training.workdir import check_init_from

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
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}  # srun does not take this from sbatch
# If one task fails, end the others: they would wait for it.
srun --kill-on-bad-exit=1 {command}
code=$?
# 143: stopped by SIGTERM, after saving a checkpoint.
if [ $code -eq 143 ]; then scontrol requeue {job}; fi
exit $code
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse_arguments(argv)
    return run_command(lambda: check_and_submit(args))


def check_and_submit(args: argparse.Namespace) -> int:
    check_options(args)
    words = after_dashes(args.train)
    workdir = "set it before the two dashes"
    if args.array:
        file, config = check_sweep(words, workdir=workdir), None
    else:
        file, config = check_train(words, workdir=workdir)
    folder = "sweeps" if args.array else "runs"
    args.workdir = Path(args.workdir or f"{folder}/{Path(file).stem}").absolute()
    if config:
        check_init_from(config, args.workdir)
    script = job_script(args, words)
    if args.dry_run:
        print(script, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not installed here; submit from a login node, or use --dry-run")
    return submit(script, log_path(args))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.slurm",
        description="Submit a run or a sweep to SLURM.",
        epilog="example: python -m launch.slurm --nodes 4 --gpus-per-node 8 -- --config configs/gpt2_124m.py",
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default: %(default)s)")
    parser.add_argument(
        "--gpus-per-node", type=int, default=0, help="number of tasks per node; 0: one task, on the CPUs (default: 0)"
    )
    parser.add_argument(
        "--time", default="24:00:00", help="time limit, after which the job is requeued (default: %(default)s)"
    )
    parser.add_argument(
        "--workdir", help="directory on storage that all nodes share (default: runs/CONFIG, sweeps/CONFIG)"
    )
    parser.add_argument(
        "--array", type=int, default=0, metavar="N", help="submit a sweep (python -m lm.sweep) as N jobs"
    )
    parser.add_argument("--name", help="name of the job (default: that of the workdir)")
    parser.add_argument("--sbatch", default="", metavar="='--X=1 --Y=2'", help="further options of sbatch, after =")
    parser.add_argument("--dry-run", action="store_true", help="print the job script and exit")
    parser.add_argument(
        "train", nargs=argparse.REMAINDER, help="-- and the arguments of python -m lm.train or lm.sweep"
    )
    return parser.parse_args(argv)


def check_options(args: argparse.Namespace) -> None:
    """Check the options before the two dashes; raises UserError."""
    if args.time.isdecimal() and int(args.time) * 60 < 2 * SECONDS_TO_SAVE:
        raise UserError(
            f"--time {args.time}: {args.time} minutes are too few, the last {SECONDS_TO_SAVE // 60} are for saving"
        )
    try:
        shlex.split(args.sbatch)
    except ValueError as error:
        raise UserError(f"--sbatch: {args.sbatch!r}: {error}") from None
    if args.nodes < 1:
        raise UserError(f"--nodes must be at least 1 (it is {args.nodes})")
    if args.gpus_per_node < 0:
        raise UserError(f"--gpus-per-node must be at least 0 (it is {args.gpus_per_node})")
    if args.array < 0:
        raise UserError(f"--array must be the number of jobs (it is {args.array})")
    if args.array and args.nodes > 1:
        raise UserError(f"--nodes {args.nodes}: each job of a sweep has one node; set --array to the number of jobs")


def log_path(args: argparse.Namespace) -> Path:
    """Return the job's log file. %a stands for the index of a job in an array."""
    return args.workdir.with_name(f"{args.workdir.name}-%a.log") if args.array else args.workdir / "slurm.log"


def job_script(args: argparse.Namespace, words: list[str]) -> str:
    """Return the script for sbatch."""
    further = [f"#SBATCH {word}\n" for word in shlex.split(args.sbatch)]
    gpus = [f"#SBATCH --gpus-per-node={args.gpus_per_node}\n"] if args.gpus_per_node else []
    array = [f"#SBATCH --array=0-{args.array - 1}\n"] if args.array else []
    command = [sys.executable, "-m", "lm.sweep" if args.array else "lm.train", *words, "--workdir", str(args.workdir)]
    command += [] if args.array else ["--resume"]
    return SCRIPT.format(
        name=shlex.quote(args.name or args.workdir.name),
        nodes=args.nodes,
        tasks=1 if args.array else args.gpus_per_node or 1,
        options="".join(gpus + array + further),
        time=args.time,
        seconds=SECONDS_TO_SAVE,
        log=shlex.quote(str(log_path(args))),
        directory=shlex.quote(str(Path.cwd())),
        command=shlex.join(command),
        # The ID of the array alone would requeue all of its jobs.
        job="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if args.array else "$SLURM_JOB_ID",
    )


def submit(script: str, log: Path) -> int:
    """Pass the script to sbatch and return its exit code. Creates the directory of the log, which sbatch does not."""
    log.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["sbatch"], input=script, text=True, capture_output=True, check=False)
    print((done.stdout + done.stderr).strip(), file=sys.stderr if done.returncode else sys.stdout)
    if done.returncode:
        with contextlib.suppress(OSError):  # the directory holds something else
            log.parent.rmdir()
    else:
        first_log = str(log).replace("%a", "0")
        print(f"watch: tail -f {first_log}; save and requeue: scancel --signal=TERM JOB; stop for good: scancel JOB")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
