"""A run's directory: who may write to it, what is recorded in it, and whether a run in it may be continued.

Files: config.json, run.json (one entry a start: versions, git commit, host, command), tokenizer.json, metrics.jsonl,
checkpoints/, summary.json, and .lock.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lm.config import flatten
from lm.errors import UserError
from lm.files import lock, to_json, write_text

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "ml-collections")
SUMMARY_FIELDS = (
    "status", "steps", "tokens", "n_params", "val_loss", "test_loss", "val_bits_per_byte", "wall_seconds", "data",
    "config_digest",
)  # fmt: skip
_MARKS_OF_A_RUN = ("config.json", "run.json", "metrics.jsonl", "checkpoints", "summary.json")


def _read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); the run in this directory cannot be continued") from None


# ---- Two digests of one config ---------------------------------------------------------------------------------


def _leaves(config, path: str = "config", execution: bool = False) -> Iterator[tuple[str, object, bool]]:
    """(path, value, execution) of every key; a section marked `execution` marks all of its keys."""
    for field in dataclasses.fields(config):
        value, here = getattr(config, field.name), f"{path}.{field.name}"
        marked = execution or bool(field.metadata.get("execution", False))
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, here, marked)
        else:
            yield here, json.loads(to_json(value)), marked


def _digest(config, execution: bool) -> str:
    kept = {path: value for path, value, marked in _leaves(config) if marked == execution}
    return hashlib.sha256(to_json(dict(sorted(kept.items()))).encode()).hexdigest()


def experiment_digest(config) -> str:
    """sha256 over the keys that decide what is computed: two runs with the same digest train the same model."""
    return _digest(config, execution=False)


def execution_digest(config) -> str:
    """sha256 over the keys that decide only how it is computed and recorded."""
    return _digest(config, execution=True)


def compare(old: dict, config) -> tuple[list[str], list[str]]:
    """What differs between a run's saved config and the one now asked for, as (experiment, execution) lines.

    `old` is the dict read from config.json, `config` the dataclass. `train.steps` is left out: see `steps_may_grow`.
    """
    was, differences = flatten(old, "config."), ([], [])
    defaults = {path: value for path, value, _ in _leaves(type(config)())}
    for path, now, execution in _leaves(config):
        before = was.pop(path, defaults[path])  # a key that is younger than the run had its default's effect
        if before != now and path != "config.train.steps":
            differences[execution].append(f"{path}: {before} -> {now} (run -> now)")
    differences[False].extend(f"{path}: {before} -> absent (run -> now)" for path, before in was.items())
    return differences


def steps_may_grow(old: int, new: int, optimizer, steps_made: int) -> str | None:
    """Why a run of `old` steps, of which `steps_made` are done, may not become one of `new` steps; None if it may.

    It may where the learning rate of every step already made stays what it was.
    """
    if new == old:
        return None
    line = f"config.train.steps: {old} -> {new} (run -> now)"
    if new < old:
        return f"{line}: a run may grow but not shrink; start a new one in another workdir"
    if optimizer.schedule == "constant" or optimizer.decay_steps is not None:
        return None
    # From here on the schedule ends with the run. Up to the first step of the decay it is the same for both lengths.
    decay_start = optimizer.warmup_steps
    if optimizer.schedule == "wsd":
        decay_start = max(decay_start, math.floor(old * (1 - optimizer.decay_fraction)))
    if steps_made <= decay_start:
        return None
    return (
        f"{line}: the {optimizer.schedule} schedule ends at train.steps, so the learning rate of steps "
        f"{decay_start + 1} to {steps_made}, already made, would have been another. Runs that are to grow need "
        "optimizer.schedule = 'constant' or a fixed optimizer.decay_steps from their first step on"
    )


# ---- The directory ---------------------------------------------------------------------------------------------


def default_workdir(name: str, root: str | Path = "runs") -> Path:
    """A path root/NAME-YYYYMMDD-HHMMSS that does not exist yet (with -2, -3 ... where two start in one second)."""
    first = Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    workdir, n = first, 1
    while workdir.exists():
        n += 1
        workdir = first.with_name(f"{first.name}-{n}")
    return workdir


def holds_run(workdir: str | Path) -> bool:
    """Whether a run was started in this directory."""
    return any((Path(workdir) / name).exists() for name in _MARKS_OF_A_RUN)


def steps_made(workdir: str | Path) -> int:
    """The newest step with a checkpoint (a directory named by its step), 0 if there is none."""
    found = Path(workdir, "checkpoints").glob("*")
    return max((int(path.name) for path in found if path.name.isdigit()), default=0)


def check(workdir: str | Path, config, *, resume: bool, data: dict | None = None) -> list[str]:
    """Whether `config` may be run in `workdir`, before anything is written; returns notices to print.

    data: {"name", "fingerprint"} of the tokens at hand, once they are known.

    Raises UserError if the directory holds a run that is not to be resumed, or one of another experiment.
    """
    workdir = Path(workdir)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir {workdir} is a file; give a directory")
    if not holds_run(workdir):
        return []
    if not resume:
        raise UserError(
            f"--workdir {workdir} already holds a run, and a run is never overwritten: "
            "continue it with --resume, or give another --workdir"
        )
    old = _read_json(workdir / "config.json")
    if old is None:
        raise UserError(f"--workdir {workdir} has no config.json, so the run in it cannot be continued")
    experiment, execution = compare(old, config)
    old_steps = old["train"]["steps"]
    refusal = steps_may_grow(old_steps, config.train.steps, config.optimizer, steps_made(workdir))
    problems = experiment + ([refusal] if refusal else [])
    if problems:
        raise UserError(
            f"--resume: {workdir} holds a run of another experiment; set these back, or give another --workdir:",
            *(f"  {problem}" for problem in problems),
        )
    trained_on = (_read_json(workdir / "run.json") or {}).get("data")
    if data and trained_on and trained_on["fingerprint"] != data["fingerprint"]:
        raise UserError(
            f"--resume: the run in {workdir} trained on {trained_on['name']}, and what is there now ({data['name']}) "
            "is not the same text or not the same tokens; bring back the data, or give another --workdir"
        )
    if config.train.steps != old_steps:
        execution = [*execution, f"config.train.steps: {old_steps} -> {config.train.steps} (run -> now)"]
    return [f"resuming with a difference that does not change the experiment: {line}" for line in execution]


class Run:
    """A workdir this process, or the first of several, holds the lock of; `close` gives it back. Created by `start`.

    lock: None in a process that is not the first; what it would write the first one writes.
    """

    def __init__(self, workdir: Path, lock, notices: list[str], experiment: str):
        self.workdir, self.notices, self._lock, self.experiment_digest = workdir, notices, lock, experiment

    def write_text(self, name: str, text: str) -> None:
        """Write workdir/name in one step."""
        if self._lock is None:
            return
        (self.workdir / name).parent.mkdir(exist_ok=True)
        write_text(self.workdir / name, text)

    def write_json(self, name: str, value) -> None:
        """Write workdir/name in one step, as strict JSON."""
        self.write_text(name, to_json(value, indent=2) + "\n")

    def write_summary(self, **values) -> None:
        """Write summary.json; the fields of SUMMARY_FIELDS that are not given are null."""
        self.write_json("summary.json", dict.fromkeys(SUMMARY_FIELDS) | values)

    def close(self) -> None:
        if self._lock:
            self._lock.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def start(workdir: str | Path, config, *, data: dict | None = None, resume: bool = False) -> Run:
    """Take a workdir for this process, and record the config and this start in it.

    Raises UserError as `check` does, and if another process has the directory.
    """
    workdir = Path(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir {workdir} cannot be made: {error.strerror}") from None
    taken = lock(workdir)
    try:
        notices = check(workdir, config, resume=resume, data=data)
        run = Run(workdir, taken, notices, experiment_digest(config))
        record = _read_json(workdir / "run.json") or {"starts": []}
        this_start = describe_start() | {"execution_digest": execution_digest(config)}
        if record["starts"]:
            notices += _changed_versions(record["starts"][-1], this_start)
        run.write_json("config.json", dataclasses.asdict(config))
        run.write_json(
            "run.json",
            {"experiment_digest": run.experiment_digest, "data": data, "starts": [*record["starts"], this_start]},
        )
        return run
    except BaseException:
        taken.close()
        raise


def describe_start() -> dict:
    """When, where and with what this process runs: time, host, command, versions and git commit."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor(),
        "argv": sys.argv,
        "versions": versions(),
        "git": git_state(),
    }


def command(module: str, arguments: list[str]) -> str:
    """What was typed, without the directories of the machine: paths begin at the repository, others are a name."""

    def shown(path: str) -> str:
        root = Path(__file__).resolve().parents[2]
        return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else Path(path).name

    # Alone, in --key=/path, and in --key=text:/path, but not gs://bucket.
    hidden = [re.sub(r"(^|[=:])(/(?!/).*)$", lambda found: found[1] + shown(found[2]), a) for a in arguments]
    return shlex.join(["python", "-m", module, *hidden])


def processor() -> str:
    """The processor's name, of which speeds on CPU follow; the kind of machine where no name is to be had."""
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that decide a run's numbers; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_state() -> dict | None:
    """{"commit", "dirty"} of the checkout this code runs from, None where it is not one."""
    here = Path(__file__).resolve()
    if not _git(here.parent, "ls-files", here.name):  # installed, perhaps inside somebody else's checkout
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(_git(here.parent, "status", "--porcelain"))} if commit else None


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _changed_versions(before: dict, now: dict) -> list[str]:
    old, new = before["versions"], now["versions"]
    return [
        f"{name} {old.get(name)} -> {new[name]} since the last start: the continuation need not be bit-identical"
        for name in new
        if new[name] != old.get(name)
    ]
