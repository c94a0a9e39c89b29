"""The run that a workdir holds: what it records, read once, and whether a config may resume it."""

import contextlib
import dataclasses
import difflib
import math
import os
from pathlib import Path
from typing import Any

from lm.config import init_run
from lm.huggingface.config_files import is_checkpoint, read_config
from lm.system.errors import UserError
from lm.system.files import (
    COUNT,
    NUMBER,
    check_shape,
    parse_json,
    read_bytes,
    read_json,
    refuse_url,
    without_checksum,
)
from lm.workdir.config_changes import compare_configs
from lm.workdir.metrics import last_step

ARRIVING = "arriving.partial"  # a folder that is there while `directory.fill` fills the workdir
# key of a checkpoint's record: `read_settings` of the model that the run began from
SETTINGS = "huggingface"
# start of the name of the data in run.json: an imported run has no text of its own
WEIGHTS_OF = "weights of "

# Shapes of the JSON files of a run; see `lm.system.files.read_json`.
_CONFIG = {
    "name?": str,
    "train": {"steps": COUNT},
    "checkpoint": {"every": COUNT},
    "log": {"every": COUNT},
}
_START = {
    "versions": {str: (str, None)},
    "environment": {str: str},
    "git": ({"commit": str, "dirty": bool}, None),
    "notes?": [str],
}
_DATA = {"name": str, "fingerprint": str, "record?": {str: {"fingerprint?": str}}}
_RUN = {"data": (_DATA, None), "starts": [_START | {"devices": {str: (str, COUNT)}}]}
_SUMMARY = {
    "status": ("finished", "stopped", "interrupted", "nonfinite"), "steps": COUNT, "n_params?": COUNT,
    "best_val_loss?": (*NUMBER, None), "best_step?": (COUNT, None), "goodput?": {str: NUMBER},
}  # fmt: skip
_META = {
    "config": _CONFIG, "data": str, "data_fingerprint": str, "tokenizer": (str, None), "log_every?": COUNT,
    "protected?": [COUNT], "seconds?": {str: float}, f"{SETTINGS}?": {str: str},
}  # fmt: skip


# ---- What a workdir holds ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """What a workdir records of the run in it."""

    config: dict  # config.json
    newest_checkpoint: int | None  # the newest step with a checkpoint, None if there is none
    # {"name", "fingerprint"} of the tokens it trained on; None if unknown
    data: dict[str, str] | None
    starts: list[dict]  # versions, commit and command of each start
    summary: dict[str, Any]  # summary.json, {} if it is missing or damaged
    damage: str = ""  # what is wrong with summary.json, which a resumed run writes again

    @property
    def finished_at(self) -> int | None:
        """Return the last step, if the run took it and wrote its summary; else None."""
        return self.summary["steps"] if self.summary.get("status") == "finished" else None

    def changed_settings(self, config) -> list[str]:
        """Return a line for each key that differs in the config of a resumption."""
        _, changed = compare_configs(self.config, config, self.newest_checkpoint or 0)
        return [
            f"resuming with another setting, which does not change the experiment: {line}"
            for line in changed
        ]


def read_run(workdir: Path) -> SavedRun:
    """Read what a workdir records of the run in it.

    Raises:
        UserError: if config.json is missing, or it or run.json is damaged. Without run.json a run
            can be resumed.
    """
    require_run(workdir)
    newest = newest_checkpoint(workdir)
    try:
        config = read_json(
            workdir / "config.json", _CONFIG, "restore it, or give another --workdir"
        )
    except FileNotFoundError:
        raise UserError(
            f"--workdir {workdir} has no config.json; give the directory of a run"
        ) from None
    record: dict[str, Any] = {"data": None, "starts": []}
    summary: dict[str, Any] = {}
    damage = ""
    with contextlib.suppress(FileNotFoundError):
        record = read_json(workdir / "run.json", _RUN)
    try:
        summary = without_checksum(parse_json(read_bytes(workdir / "summary.json"), _SUMMARY))
    except FileNotFoundError:
        pass
    except ValueError as error:
        damage = f"{workdir / 'summary.json'} is corrupted: {error}; delete it"
    return SavedRun(config, newest, record["data"], record["starts"], summary, damage)


def require_run(workdir: Path) -> None:
    """Raise UserError if there is no such directory, with the names of similar runs beside it."""
    if workdir.exists():
        return
    there = [path.parent.name for path in workdir.parent.glob("*/config.json")]
    near = difflib.get_close_matches(workdir.name[:200], there, n=3, cutoff=0.4)
    advice = "python -m lm.runs DIR lists the runs in a directory"
    if near:
        advice = f"did you mean {' or '.join(str(workdir.parent / name) for name in near)}?"
    raise UserError(f"there is no run {workdir}; {advice}")


def holds_run(workdir: str | Path) -> bool:
    """Return whether a run in this directory made a step.

    Then it has metrics, a checkpoint or a summary, or anything else of these names. A run that
    failed before its first step, such as one whose model cannot be compiled, starts anew. One that
    is only partly copied into the directory is copied again.
    """
    workdir = Path(workdir)
    metrics = workdir / "metrics.jsonl"
    checkpoints = workdir / "checkpoints"
    if (workdir / ARRIVING).exists():
        return False
    if metrics.exists() and not (metrics.is_file() and metrics.stat().st_size == 0):
        return True
    if checkpoints.exists() and not (checkpoints.is_dir() and not any(checkpoints.iterdir())):
        return True
    return (workdir / "summary.json").exists()


def newest_checkpoint(workdir: str | Path) -> int | None:
    """Return the newest step with a checkpoint, None if there is none."""
    return max(checkpoint_steps(workdir), default=None)


def checkpoint_steps(workdir: str | Path) -> list[int]:
    """Return the steps with a checkpoint (a directory named by its step), in ascending order."""
    directory = Path(workdir, "checkpoints")
    try:
        names = os.listdir(directory)  # unlike glob, this does not hide an error of the disk
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if is_step(name) and (directory / name).is_dir())


def count_parameters(workdir: Path, step: int) -> int | None:
    """Return how many parameters the record of a checkpoint lists; None if it cannot be read."""
    shape = {"leaves": {str: {"shape": [COUNT]}}}
    path = workdir / "checkpoints" / str(step) / "meta" / "metadata"
    try:
        leaves = parse_json(read_bytes(path), shape)["leaves"]
    except (OSError, ValueError):  # whoever reads the checkpoint reports it
        return None
    return sum(math.prod(x["shape"]) for name, x in leaves.items() if name.startswith("params/"))


def is_step(name: str) -> bool:
    """Return whether the name of a file is the number of a step.

    >>> is_step("12"), is_step("12.corrupted-1"), is_step("²")
    (True, False, False)
    """
    return name.isascii() and name.isdigit()


# ---- Whether a config may be run there -----------------------------------------------------------


def check_workdir(workdir: str | Path, config, *, resume: bool) -> SavedRun | None:
    """Check, before anything is written, whether a config can be run in `workdir`.

    With `resume`, it continues the run that the directory holds, if any.

    Returns:
        The run to resume, or None if the directory holds none.

    Raises:
        UserError: if the directory holds a run and `resume` is false, or a run of another
            experiment, or if the workdir is a URL.
    """
    refuse_url(workdir, "--workdir")
    workdir = Path(workdir)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir {workdir} is a file; give a directory")
    if not holds_run(workdir):
        return None
    if not resume:
        raise UserError(
            f"--workdir {workdir} already holds a run, and a run is never overwritten: "
            "resume it with --resume, or give another --workdir"
        )
    saved = read_run(workdir)
    problems, _ = compare_configs(saved.config, config, saved.newest_checkpoint or 0)
    if problems:
        raise UserError(
            f"--resume: {workdir} holds a run of another experiment; set these back, or give "
            "another --workdir:",
            *(f"  {problem}" for problem in problems),
        )
    if lost := _lost_checkpoints(workdir, saved):
        raise UserError(
            f"--resume: {lost}; restore {workdir / 'checkpoints'}, or start again in another "
            "--workdir"
        )
    return saved


def _lost_checkpoints(workdir: Path, saved: SavedRun) -> str | None:
    """Return why a run without checkpoints must have had some, or None.

    A run that was killed before its first checkpoint starts again at step 0. But checkpoints/ is
    made before the first line of metrics, the summary is written after a checkpoint, and each save
    waits for the one before it.
    """
    if saved.newest_checkpoint is not None:
        return None
    every = saved.config["checkpoint"]["every"]
    last = last_step(workdir / "metrics.jsonl")
    was_saved = 0 < 2 * every < last or (workdir / "summary.json").exists()
    if not was_saved and (not last or (workdir / "checkpoints").is_dir()):
        return None
    steps = f"{last} steps" if last else "steps"
    return f"the run in {workdir} made {steps}, and its checkpoints were deleted"


def check_checkpoints(workdir: str | Path, metas: dict[int, dict], config, data: dict) -> None:
    """Check what checkpoints record: config.json and run.json may be lost.

    `metas` has their records by step, `data` the {"name", "fingerprint"} of the tokens.

    Raises:
        UserError: if a checkpoint is of another resolved config or of other data.
    """
    for step, meta in metas.items():
        check_meta(meta, f"--resume: the checkpoint of step {step} in {workdir}")
        problems, _ = compare_configs(meta["config"], config, step)
        if meta["data_fingerprint"] != data["fingerprint"]:
            problems.append(
                f"it trained on {meta['data']}; the data now ({data['name']}) has other text or "
                "other tokens"
            )
        if problems:
            raise UserError(
                f"--resume: the checkpoint of step {step} in {workdir} is of another experiment; "
                "correct this, or give another --workdir:",
                *(f"  {problem}" for problem in problems),
            )


def check_meta(meta: dict, where: str) -> None:
    """Raise UserError if the record of a checkpoint is not that of a run."""
    try:
        check_shape(meta, _META)
    except ValueError as error:
        raise UserError(f"{where}: it is not a checkpoint of a run ({error})") from None


def check_init_from(config, saved: SavedRun | None) -> None:
    """Raise UserError if config.init_from names neither a run nor a Hugging Face checkpoint.

    It is not needed to resume a saved run that has a checkpoint.
    """
    directory = init_run(config)
    if directory is None or Path(directory, "checkpoints").is_dir():
        return
    if saved is not None and saved.newest_checkpoint is not None:
        return
    if not is_checkpoint(directory):
        raise UserError(
            f"config.init_from: {directory} holds no checkpoints; give the directory of a run, or "
            "of a checkpoint of Hugging Face"
        )
    try:
        read_config(directory)
    except UserError as error:
        raise UserError(*(f"config.init_from: {problem}" for problem in error.problems)) from None
