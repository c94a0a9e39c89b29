"""Branch a run: start another one from its stable phase, with another number of steps.

Under the schedule "wsd" (warm-up, stable, decay) runs of all lengths take the same steps until the
first one decays. So one long run serves several lengths: each branch trains only its own decay, and
ends as if it had started at step 0.
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from lm.config import Config, as_resolved, to_dict
from lm.system.errors import UserError
from lm.system.files import COUNT, files_below, read_json, to_json, write_text
from lm.workdir.checkpoints import verify
from lm.workdir.config_changes import compare_configs, depends_on_steps, stable_steps
from lm.workdir.directory import fill
from lm.workdir.metrics import cut_back
from lm.workdir.saved_run import checkpoint_steps, holds_run


def branch(source: str, directory: str, config: Config, say: Callable[[str], None] = print) -> None:
    """Copy the last state that a run shares with that of a config to a directory, to be resumed.

    A directory that holds a run already, such as one that was branched before, is left as it is.
    The lines for `say` name the step of the state, and the settings that differ.

    Raises:
        UserError: before anything is written, if there is no such state; or if its checkpoint is
            corrupted.
        TemporaryError: if another process uses the new directory.
    """
    if holds_run(directory):
        return
    step, changed = _shared_step(Path(source), config)
    if jax.process_count() == 1:  # several would have to read it together
        verify(source, step)
    fill(Path(directory), lambda copy: _copy(Path(source), copy, step, config))
    say(f"branching from step {step} of {source}")
    for line in changed:
        say(f"with another setting: {line}")


def _shared_step(source: Path, config: Config) -> tuple[int, list[str]]:
    """Return the newest saved step up to which both learning rates are equal, and what differs."""
    try:
        old = read_json(source / "config.json", {"train": {"steps": COUNT}}, "give another run")
    except FileNotFoundError:
        raise UserError(
            f"--branch_from: {source} holds no run; give the directory of one"
        ) from None
    o = config.optimizer
    steps = config.train.steps
    if o.schedule != "wsd" or o.decay_steps is not None:
        raise UserError(
            "--branch_from: the config needs optimizer.schedule = 'wsd', and optimizer.decay_steps "
            "= none"
        )
    has_other_length = steps != old["train"]["steps"]
    if has_other_length and (changing := depends_on_steps(as_resolved(config))):
        raise UserError(f"--branch_from: {changing} would change with train.steps")
    problems, changed = compare_configs(old, config)
    if problems:
        raise UserError(
            f"--branch_from: {source} holds a run of another experiment; set these back:", *problems
        )
    last = min(stable_steps(n, o) for n in (steps, old["train"]["steps"]))
    saved = checkpoint_steps(source)
    shared = [step for step in saved if step <= last]
    if not shared:
        raise UserError(
            f"--branch_from: {source} has checkpoints of steps "
            f"{', '.join(map(str, saved)) or '-'}, and none up to step {last}, after which the "
            "learning rates differ; config.checkpoint.every and keep decide which exist"
        )
    return shared[-1], changed


def _copy(source: Path, copy: Path, step: int, config: Config) -> None:
    """Copy a checkpoint, and the metrics up to it."""
    for file in files_below(source / "checkpoints" / f"{step}"):
        target = copy / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    with contextlib.suppress(FileNotFoundError):  # a run can be resumed without these
        write_text(copy / "run.json", to_json(read_json(source / "run.json"), indent=2) + "\n")
    cut_back(source / "metrics.jsonl", step, copy / "metrics.jsonl")
    write_text(copy / "config.json", to_json(to_dict(config), indent=2) + "\n")
