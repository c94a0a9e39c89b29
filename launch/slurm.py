"""Submit a run to SLURM.

    python -m launch.slurm --nodes 4 --gpus-per-node 8 -- --config configs/gpt2_124m.py

The arguments after `--` are those of python -m lm.train. The job has one task per GPU, because JAX
gives each task the GPU of its local index. When the job is preempted or its time limit is near, it
saves a checkpoint, is requeued, and resumes. It is also requeued when a task dies, up to --restarts
times in a row without progress. It is not requeued after a mistake in the config. With --array N
the job is a sweep: an array of N jobs shares its runs. Each of these jobs has one task and all GPUs
of a node.
"""

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from launch.arguments import NOT_CHECKED, after_dashes, check_sweep, check_train, compile_step
from lm.system.errors import UserError, with_exit_code
from lm.system.files import refuse_url
from lm.system.parser import Parser
from lm.workdir.saved_run import check_init_from, check_workdir

SECONDS_TO_SAVE = 120  # between SIGTERM and the end of the time limit
EXAMPLES = """\
examples:
  python -m launch.slurm --nodes 4 --gpus-per-node 8 --workdir runs/gpt2 -- --config configs/gpt2_124m.py
  python -m launch.slurm --array 4 -- --config configs/sweeps/swiglu_vs_silu.py --budget full
  python -m launch.slurm --nodes 2 --dry-run -- --config configs/gpt2_124m.py
"""

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
{gpus}{array}#SBATCH --time={time}
#SBATCH --signal=TERM@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
{options}cd {directory} || exit
workdir={workdir}
mkdir -p "$workdir" || exit

# This file contains the number of starts in a row that saved nothing. Its modification time is that of this start.
starts=$workdir/.slurm-$SLURM_JOB_ID
saved() {{
  [ -n "$(find "$workdir" -regex '.*/\\(checkpoints/[0-9]+\\|runs\\.jsonl\\)' -newer "$starts" -print -quit)" ]
}}
n=1
if [ -f "$starts" ] && ! saved; then n=$(($(cat "$starts") + 1)); fi
echo $n > "$starts" || exit

# Each task adds its exit code to this file if it is 2 (a mistake) or 3 (an invalid loss): srun returns the highest
# code, which may be the 143 of a task that srun stopped.
permanent=$starts.failed
: > "$permanent"
task='trap : TERM; "$@"; code=$?; case $code in 2 | 3) echo $code >> "$0" ;; esac; exit $code'

# srun does not inherit --cpus-per-task from sbatch. Without it, a step has all CPUs of the job.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
# If one task fails, end the others: they would wait for it.
srun --kill-on-bad-exit=1 bash -c "$task" "$permanent" {command}
code=$?

failed=$(head -n 1 "$permanent")
if [ $code -ne 0 ] && [ -z "$failed" ] && {{ [ $n -le {restarts} ] || saved; }}; then
  echo "exit code $code: requeueing the job, to resume from the last checkpoint"
  scontrol requeue {job}
  exit $code
fi
if [ -n "$failed" ]; then
  code=$failed
  echo "exit code $code: a restart would fail again; the job is not requeued"
elif [ $code -ne 0 ]; then
  echo "exit code $code: $n starts in a row saved no checkpoint or result; the job is not requeued"
fi
rm -f "$starts" "$permanent"
exit $code
"""


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Check the arguments of the launcher and of the run, submit the job, and return the exit code."""
    args = parse_arguments(argv)
    check_options(args)
    argv = after_dashes(args.train)
    workdir = "set it before the two dashes"
    n_devices = args.nodes * args.gpus_per_node or None
    config = None
    if args.array:
        folder = "sweeps"
        file = check_sweep(argv, workdir=workdir)
    else:
        folder = "runs"
        file, config = check_train(argv, workdir=workdir, n_devices=n_devices)
    args.workdir = Path(args.workdir or f"{folder}/{Path(file).stem}").absolute()
    if config:
        saved = check_workdir(args.workdir, config, resume=True)
        check_init_from(config, saved)
        for line in saved.changed_settings(config) if saved else ():
            print(line, file=sys.stderr)
        if args.check:
            if code := compile_step(argv, config, f"{args.check}:{n_devices}"):
                return code
        elif n_devices:
            print(NOT_CHECKED.format(" GPU, such as --check h100,"), file=sys.stderr)
    script = job_script(args, argv)
    if args.dry_run:
        print(script, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not installed here; submit from a login node, or use --dry-run")
    return submit(script, log_path(args.workdir, "0" if args.array else None))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("", "Submit a run or a sweep to SLURM.", EXAMPLES)
    parser.prog = "python -m launch.slurm"
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="number of nodes (default: %(default)s)")
    add(
        "--gpus-per-node",
        type=int,
        default=0,
        help="number of tasks per node; 0: one task, on the CPUs (default: 0)",
    )
    add(
        "--time",
        default="24:00:00",
        help="time limit, after which the job is requeued (default: %(default)s)",
    )
    add(
        "--restarts",
        type=int,
        default=5,
        metavar="N",
        help="stop requeueing after this many restarts in a row without a new checkpoint or result "
        "(default: %(default)s)",
    )
    add(
        "--workdir",
        help="directory on storage that all nodes share (default: runs/CONFIG, sweeps/CONFIG)",
    )
    add(
        "--array",
        type=int,
        default=0,
        metavar="N",
        help="submit a sweep (python -m lm.sweep) as N jobs",
    )
    add("--name", help="name of the job (default: that of the workdir)")
    add(
        "--sbatch",
        default="",
        metavar="='--X=1 --Y=2'",
        help="further options of sbatch (the = is required); they override those of the script",
    )
    add(
        "--check",
        metavar="GPU",
        help="first compile the training step for GPUs such as h100 (lm.train --compiled)",
    )
    add("--dry-run", action="store_true", help="print the job script and exit")
    add(
        "train",
        nargs=argparse.REMAINDER,
        help="-- and the arguments of python -m lm.train or lm.sweep",
    )
    return parser.parse_args(argv)


def check_options(args: argparse.Namespace) -> None:
    """Check the options before the two dashes; raises UserError."""
    for option in ("name", "workdir", "time", "sbatch"):
        if (value := getattr(args, option)) and not value.isprintable():
            raise UserError(
                f"--{option} {value!r}: a line break or control character cannot be passed to SLURM"
            )
    if args.time.isdecimal() and int(args.time) * 60 < 2 * SECONDS_TO_SAVE:
        raise UserError(
            f"--time {args.time}: {args.time} minutes are too few, the last "
            f"{SECONDS_TO_SAVE // 60} are for saving"
        )
    try:
        shlex.split(args.sbatch)
    except ValueError as error:
        raise UserError(f"--sbatch: {args.sbatch!r}: {error}") from None
    if args.nodes < 1:
        raise UserError(f"--nodes must be at least 1 (it is {args.nodes})")
    for option, value in (("gpus-per-node", args.gpus_per_node), ("restarts", args.restarts)):
        if value < 0:
            raise UserError(f"--{option} must be at least 0 (it is {value})")
    if args.array < 0:
        raise UserError(f"--array must be at least 1, the number of jobs (it is {args.array})")
    if args.check and (args.array or not args.gpus_per_node):
        raise UserError(
            f"--check {args.check}: it compiles a run on GPUs; set --gpus-per-node, without --array"
        )
    if args.array and args.nodes > 1:
        raise UserError(
            f"--nodes {args.nodes}: each job of a sweep has one node; set --array to the number of "
            "jobs"
        )
    refuse_url(args.workdir, "--workdir")


def log_path(workdir: Path, index: str | None = None) -> Path:
    """Return the log file of a job, or of the job with this index in an array."""
    if index is None:
        return workdir / "slurm.log"
    return workdir.with_name(f"{workdir.name}-{index}.log")


def job_script(args: argparse.Namespace, argv: list[str]) -> str:
    """Return the script for sbatch."""
    rest = [*argv, "--workdir", str(args.workdir), "--platform"]
    rest.append("gpu" if args.gpus_per_node else "cpu")
    log_folder = Path(str(args.workdir).replace("%", "%%"))
    if args.array:
        module = "lm.sweep"
        tasks = 1
        array = f"#SBATCH --array=0-{args.array - 1}\n"
        # The ID of the array alone would requeue all of its jobs.
        job = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
        log = log_path(log_folder, "%a")
    else:
        module = "lm.train"
        rest.append("--resume")
        tasks = args.gpus_per_node or 1
        array = ""
        job = "$SLURM_JOB_ID"
        log = log_path(log_folder)
    gpus = f"#SBATCH --gpus-per-node={args.gpus_per_node}\n" * (args.gpus_per_node > 0)
    # last, because sbatch uses the last value of an option
    further = " ".join(map(quote_for_sbatch, shlex.split(args.sbatch)))
    options = f"#SBATCH {further}\n" if further else ""
    return SCRIPT.format(
        name=quote_for_sbatch(args.name or args.workdir.name),
        nodes=args.nodes,
        tasks=tasks,
        gpus=gpus,
        array=array,
        time=quote_for_sbatch(args.time),
        seconds=SECONDS_TO_SAVE,
        log=quote_for_sbatch(str(log)),
        options=options,
        directory=shlex.quote(str(Path.cwd())),
        workdir=shlex.quote(str(args.workdir)),
        command=shlex.join([sys.executable, "-m", module, *rest]),
        restarts=args.restarts,
        job=job,
    )


def quote_for_sbatch(text: str) -> str:
    r"""Quote an argument for an #SBATCH line: a backslash in single quotes is an escape there.

    >>> print(quote_for_sbatch("--partition=gpu"), quote_for_sbatch("--comment=it's two argv"))
    --partition=gpu '--comment=it\'s two argv'
    """
    if shlex.quote(text) == text:
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def submit(script: str, log: Path) -> int:
    """Pass the script to sbatch, and return its exit code; the log's folder is made here."""
    log.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["sbatch"], input=script, text=True, capture_output=True, check=False)
    print((done.stdout + done.stderr).strip(), file=sys.stderr if done.returncode else sys.stdout)
    if done.returncode:
        with contextlib.suppress(OSError):  # the directory holds something else
            log.parent.rmdir()
    else:
        print(
            f"watch: tail -f {log}; save and requeue: scancel --signal=TERM JOB; stop without "
            "requeueing: scancel JOB"
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
