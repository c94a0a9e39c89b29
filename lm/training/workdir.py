"""The directory of a run: who may write to it, what it records, and whether the run in it may be resumed.

Files: config.json, run.json (per start: versions, git commit, host, command), tokenizer.json, metrics.jsonl,
checkpoints/, summary.json, and .lock.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.config import REMOVED_KEYS, flatten, init_run
from lm.errors import UserError
from lm.files import COUNT, check_in_place, check_shape, lock, read_json, refuse_links, refuse_url, to_json, write_bytes
from lm.training.metrics import read_metrics
from lm.training.provenance import describe_start

SUMMARY_FIELDS = (
    "status", "steps", "tokens", "n_params", "val_loss", "test_loss", "val_bits_per_byte", "wall_seconds", "data",
    "config_digest",
)  # fmt: skip
# What a run writes. Other files in its directory, such as a scheduler's logs and those of W&B, may be links.
_WRITTEN = (
    ".lock", "config.json", "run.json", "tokenizer.json", "metrics.jsonl", "val_losses.json", "summary.json",
    "loss.png", "diagnostics.png", "checkpoints", "samples", "tensorboard", "profile", "wandb_id.txt",
    "huggingface",
)  # fmt: skip
_MARKS_OF_A_RUN = ("config.json", "run.json", "metrics.jsonl", "checkpoints", "summary.json")

# Shapes of the JSON files of a run; see `lm.files.read_json`.
_CONFIG = {"train": {"steps": COUNT}, "checkpoint": {"every": COUNT}}
_RUN = {"data": ({"name": str, "fingerprint": str}, None), "starts": [{"versions": {str: (str, None)}}]}
_META = {"config": _CONFIG, "data": str, "data_fingerprint": str, "tokenizer": (str, None)}


def check_meta(meta: dict, where: str) -> None:
    """Raise UserError if the record of a checkpoint is not that of a run, but of the stacked runs of a sweep."""
    try:
        check_shape(meta, _META)
    except ValueError as error:
        raise UserError(f"{where}: it is not a checkpoint of a run ({error})") from None


def _read_record(workdir: Path) -> dict:
    """Return the content of run.json, without starts if the file is missing."""
    try:
        return read_json(workdir / "run.json", _RUN)
    except FileNotFoundError:
        return {"data": None, "starts": []}


# ---- Digests and differences of configs ---------------------------------------------------------------


def _leaves(config, path: str = "config", execution: bool = False) -> Iterator[tuple[str, object, bool]]:
    """Yield (path, value, execution) of every key; a section marked `execution` marks all of its keys."""
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
    """Return the sha256 of the keys that decide what is computed; runs with equal digests train the same model."""
    return _digest(config, execution=False)


def execution_digest(config) -> str:
    """Return the sha256 of the keys that decide only how it is computed and recorded."""
    return _digest(config, execution=True)


def compare_configs(old: dict, config) -> tuple[list[str], list[str]]:
    """Compare a run's saved config with a new one.

    Args:
        old: the dict read from config.json.
        config: the new Config.

    Returns:
        Lines on the keys that decide what is computed, and lines on the others. `train.steps` is left out: see
        `refuse_growth`.
    """
    was, differences = flatten(old, "config."), ([], [])
    defaults = {path: value for path, value, _ in _leaves(type(config)())}
    for path, now, execution in _leaves(config):
        before = was.pop(path, defaults[path])  # a key added since then counts as its default
        if before != now and path != "config.train.steps":
            differences[execution].append(f"{path}: {before} -> {now} (run -> now)")
    removed = {path: before for path, before in was.items() if path.removeprefix("config.") not in REMOVED_KEYS}
    differences[False].extend(f"{path}: {before} -> absent (run -> now)" for path, before in removed.items())
    return differences


def stable_steps(steps: int, optimizer) -> int:
    """Return how many steps a run, whose schedule ends with it, has in common with every longer run."""
    if optimizer.schedule != "wsd":
        return optimizer.warmup_steps
    return max(optimizer.warmup_steps, math.floor(steps * (1 - optimizer.decay_fraction)))


def refuse_growth(old: int, new: int, optimizer, steps_made: int) -> str | None:
    """Return why a run of `old` steps cannot become one of `new` steps, or None if it can.

    It can if the learning rate of each of the `steps_made` steps stays what it was.
    """
    if new == old:
        return None
    line = f"config.train.steps: {old} -> {new} (run -> now)"
    ends_with_run = optimizer.schedule != "constant" and optimizer.decay_steps is None
    if new < old and not (ends_with_run and optimizer.schedule == "wsd" and steps_made <= stable_steps(new, optimizer)):
        return f"{line}: a run can grow but not shrink; start a new one in another workdir"
    decay_start = stable_steps(old, optimizer)
    if not ends_with_run or steps_made <= decay_start:
        return None
    return (
        f"{line}: the {optimizer.schedule} schedule ends at train.steps, so the learning rate of steps "
        f"{decay_start + 1} to {steps_made}, already trained, would change. To be extended, a run needs "
        "optimizer.schedule = 'constant' or a fixed optimizer.decay_steps from its first step"
    )


# ---- The directory ---------------------------------------------------------------------------------------------


def default_workdir(name: str, root: str | Path = "runs") -> Path:
    """Return a path root/NAME-YYYYMMDD-HHMMSS that does not exist, with -2, -3 ... if two start in one second."""
    first = Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    workdir, n = first, 1
    while workdir.exists():
        n += 1
        workdir = first.with_name(f"{first.name}-{n}")
    return workdir


def holds_run(workdir: str | Path) -> bool:
    """Return whether a run was started in this directory."""
    return any((Path(workdir) / name).exists() for name in _MARKS_OF_A_RUN)


def newest_checkpoint(workdir: str | Path) -> int | None:
    """Return the newest step with a checkpoint (a directory named by its step), None if there is none."""
    try:
        names = os.listdir(Path(workdir, "checkpoints"))  # unlike glob, this does not hide an error of the disk
    except (FileNotFoundError, NotADirectoryError):
        return None
    return max((int(name) for name in names if is_step(name)), default=None)


def is_step(name: str) -> bool:
    """Return whether the name of a file is the number of a step.

    >>> is_step("12"), is_step("12.corrupted-1"), is_step("²")
    (True, False, False)
    """
    return name.isascii() and name.isdigit()


def check_init_from(config, resumed: str | Path | None) -> None:
    """Raise UserError if config.init_from names neither a run with checkpoints nor a checkpoint of Hugging Face.

    It is not needed if the run in the directory `resumed` has one.
    """
    run = init_run(config)
    if resumed is not None and newest_checkpoint(resumed) is not None:
        return
    if run is None or Path(run, "checkpoints").is_dir():
        return
    from lm.huggingface.config_files import is_checkpoint, read_config  # imports NumPy

    if not is_checkpoint(run):
        raise UserError(
            f"config.init_from: {run} holds no checkpoints; give the directory of a run, or of a checkpoint of Hugging "
            "Face"
        )
    try:
        read_config(run)
    except UserError as error:
        raise UserError(*(f"config.init_from: {problem}" for problem in error.problems)) from None


def is_finished(workdir: str | Path, config) -> bool:
    """Return whether the run in this directory took its last step and wrote its summary."""
    try:
        summary = read_json(Path(workdir, "summary.json"), {"status": str, "steps": COUNT})
    except (FileNotFoundError, UserError):  # a damaged summary is written again
        return False
    return (summary["status"], summary["steps"]) == ("finished", config.train.steps)


def check_workdir(workdir: str | Path, config, *, resume: bool, data: dict | None = None) -> list[str]:
    """Check whether `config` can be run in `workdir`, before anything is written.

    Args:
        workdir: a directory, which need not exist.
        config: the config as the user gave it.
        resume: continue the run that the directory holds, if any.
        data: {"name", "fingerprint"} of the tokens, once they are known.

    Returns:
        Lines to show.

    Raises:
        UserError: if the directory holds a run and `resume` is false, a run of another experiment or other data, or a
            symbolic link where a run writes, or if the workdir is a URL.
    """
    refuse_url(workdir, "--workdir")
    workdir = Path(workdir)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir {workdir} is a file; give a directory")
    refuse_links(workdir / name for name in _WRITTEN)
    if not holds_run(workdir):
        return []
    if not resume:
        raise UserError(
            f"--workdir {workdir} already holds a run, and a run is never overwritten: "
            "resume it with --resume, or give another --workdir"
        )
    try:
        old = read_json(workdir / "config.json", _CONFIG, "restore it, or give another --workdir")
    except FileNotFoundError:
        raise UserError(f"--workdir {workdir} has no config.json, so the run in it cannot be resumed") from None
    experiment, execution = compare_configs(old, config)
    old_steps = old["train"]["steps"]
    refusal = refuse_growth(old_steps, config.train.steps, config.optimizer, newest_checkpoint(workdir) or 0)
    problems = experiment + ([refusal] if refusal else [])
    if problems:
        raise UserError(
            f"--resume: {workdir} holds a run of another experiment; set these back, or give another --workdir:",
            *(f"  {problem}" for problem in problems),
        )
    if lost := _lost_checkpoints(workdir, old["checkpoint"]["every"]):
        raise UserError(f"--resume: {lost}; restore {workdir / 'checkpoints'}, or start again in another --workdir")
    trained_on = _read_record(workdir)["data"]
    if data and trained_on and trained_on["fingerprint"] != data["fingerprint"]:
        raise UserError(
            f"--resume: the run in {workdir} trained on {trained_on['name']}, and the data now ({data['name']}) has "
            "other text or other tokens; restore the data, or give another --workdir"
        )
    if config.train.steps != old_steps:
        execution = [*execution, f"config.train.steps: {old_steps} -> {config.train.steps} (run -> now)"]
    return [f"resuming with another setting, which does not change the experiment: {line}" for line in execution]


def check_checkpoints(workdir: str | Path, metas: dict[int, dict], config, data: dict) -> None:
    """Check that the checkpoints in `workdir` are of this experiment; config.json and run.json may be damaged or lost.

    Args:
        workdir: the run's directory, for the error.
        metas: what the checkpoints record of their runs, by step.
        config: the resolved config.
        data: {"name", "fingerprint"} of the tokens.

    Raises:
        UserError: if a checkpoint is of another experiment or other data.
    """
    for step, meta in metas.items():
        check_meta(meta, f"--resume: the checkpoint of step {step} in {workdir}")
        problems, _ = compare_configs(meta["config"], config)
        if refusal := refuse_growth(meta["config"]["train"]["steps"], config.train.steps, config.optimizer, step):
            problems.append(refusal)
        if meta["data_fingerprint"] != data["fingerprint"]:
            problems.append(
                f"it trained on {meta['data']}; the data now ({data['name']}) has other text or other tokens"
            )
        if problems:
            raise UserError(
                f"--resume: the checkpoint of step {step} in {workdir} is of another experiment; "
                "correct this, or give another --workdir:",
                *(f"  {problem}" for problem in problems),
            )


def _lost_checkpoints(workdir: Path, every: int) -> str | None:
    """Return why a run without checkpoints must have had some, or None.

    A run that was killed before its first checkpoint starts again at step 0. But checkpoints/ is made before the first
    line of metrics, the summary is written after a checkpoint, and each save waits for the one before it.
    """
    path = workdir / "metrics.jsonl"
    if newest_checkpoint(workdir) is not None:
        return None
    last = max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0
    saved_twice = 0 < 2 * every < last
    if saved_twice or (last and not (workdir / "checkpoints").is_dir()) or (workdir / "summary.json").exists():
        return f"the run in {workdir} made {f'{last} ' if last else ''}steps, and its checkpoints were deleted"
    return None


class Workdir:
    """The directory of a run. `start` locks it for this process, and `close` releases it.

    Processes of a run other than the first have the same path and no lock: for them the write methods do nothing.

    Attributes:
        path: the directory.
        experiment_digest: that of the config, once the directory is started.
    """

    def __init__(self, path: str | Path):
        self.path, self.experiment_digest, self._lock = Path(path), None, None

    def start(self, config, *, data: dict | None = None, resume: bool = False) -> list[str]:
        """Lock the directory for this process, and record the config and this start in it.

        Args:
            config: the config as the user gave it.
            data: {"name", "fingerprint"} of the tokens.
            resume: continue the run that the directory holds, if any.

        Returns:
            Lines to show.

        Raises:
            UserError: as `check_workdir` does, or if another process has the directory.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--workdir {self.path} cannot be created: {error.strerror}") from None
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(lock(self.path))
        self._lock_file = os.open(self.path / ".lock", os.O_RDONLY | os.O_NOFOLLOW)
        self._lock.callback(os.close, self._lock_file)
        try:
            return self._record_start(config, data, resume)
        except BaseException:
            self.close()
            raise

    def _record_start(self, config, data: dict | None, resume: bool) -> list[str]:
        notices = check_workdir(self.path, config, resume=resume, data=data)
        starts = _read_record(self.path)["starts"]
        this_start = describe_start() | {"execution_digest": execution_digest(config)}
        if starts:
            notices += _changed_versions(starts[-1], this_start)
        self.write_json("config.json", dataclasses.asdict(config))
        self.experiment_digest = digest = experiment_digest(config)
        self.write_json("run.json", {"experiment_digest": digest, "data": data, "starts": [*starts, this_start]})
        return notices

    def add_to_record(self, **facts) -> None:
        """Add facts to run.json."""
        if self._lock:
            self.write_json("run.json", _read_record(self.path) | facts)

    def write_text(self, name: str, text: str) -> None:
        """Write path/name atomically."""
        self.write_bytes(name, text.encode)

    def write_bytes(self, name: str, content: Callable[[], bytes]) -> None:
        """Write path/name atomically; `content` is called only by the process that writes.

        Raises:
            TemporaryError: if the directory was deleted or moved.
        """
        if self._lock:
            check_in_place(self._lock_file, self.path / ".lock")
            (self.path / name).parent.mkdir(exist_ok=True)
            write_bytes(self.path / name, content())

    def write_json(self, name: str, value) -> None:
        """Write path/name atomically, as strict JSON."""
        self.write_text(name, to_json(value, indent=2) + "\n")

    def write_summary(self, **values) -> None:
        """Write summary.json; fields of SUMMARY_FIELDS that are not given are null."""
        self.write_json("summary.json", dict.fromkeys(SUMMARY_FIELDS) | values)

    def close(self) -> None:
        """Release the lock."""
        if self._lock:
            self._lock.close()
            self._lock = None


def _changed_versions(before: dict, now: dict) -> list[str]:
    old, new = before["versions"], now["versions"]
    return [
        f"{name} {old.get(name)} -> {new[name]} since the last start: the resumed run may not be bit-identical"
        for name in new
        if new[name] != old.get(name)
    ]
