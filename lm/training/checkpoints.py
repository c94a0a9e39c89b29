"""Save, restore and verify the training state. The only room that knows Orbax.

On disk: workdir/checkpoints/STEP/state holds the arrays as nested dicts named by their paths, and
workdir/checkpoints/STEP/meta a JSON record of the caller's `meta` and each leaf's shape, dtype and checksum. Orbax
restores a flipped byte in silence and casts to whatever dtype is asked for; the record is there so that neither goes
unseen. workdir/val_losses.json holds the validation losses by step, which may be known before a checkpoint or after it.
"""

import functools
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from lm.errors import Passing, UserError
from lm.files import to_json, write_text
from lm.parallel.processes import from_first
from lm.parameters import nest
from lm.training.checksums import leaf_checksums, leaves_by_path

VAL_LOSSES = "val_losses.json"


class _Broken(Exception):
    """A checkpoint that is not whole; the message says what is wrong with it."""


# ---- Saving and resuming a run -----------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the best by validation loss are kept.

    `say` is called with each line meant for the user.
    """

    def __init__(self, workdir: str | Path, *, keep: int = 2, say: Callable[[str], None] = print):
        _quieten_orbax()
        self._directory, self._keep, self._say = _directory(workdir), keep, say
        # Kept in our own record: Orbax's metrics belong to the moment of saving, and would make one broken file in
        # the oldest checkpoint an error when the manager is opened.
        self._val_losses = _val_losses(self._directory)
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self,
                cleanup_tmp_directories=True,
                # Asked to make directories in the background, Orbax waits five minutes for one that cannot be made.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )

    def should_preserve(self, checkpoints, *, context=None) -> list[bool]:
        """Orbax's question which of these checkpoints to keep, asked after each save."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self._keep :], self._best_of(steps)}
        return [step in kept for step in steps]

    def steps(self) -> list[int]:
        """The steps with a checkpoint, oldest first, the one being written included."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the smallest validation loss, None if none has one."""
        return self._best_of(self.steps())

    def _best_of(self, steps) -> int | None:
        return _best(steps, self._val_losses)

    def score(self, step: int, val_loss: float) -> bool:
        """Record a step's validation loss; whether it is smaller than that of every other checkpoint.

        One that is not finite counts as none, and so is never the best.
        """
        if not math.isfinite(val_loss):
            return False
        others = [self._val_losses[s] for s in self.steps() if s in self._val_losses and s != step]
        self._val_losses[step] = val_loss
        if jax.process_index() == 0:
            write_text(self._directory.parent / VAL_LOSSES, to_json(self._val_losses) + "\n")
        return all(val_loss < other for other in others)

    def save(self, step: int, state, meta: dict) -> bool:
        """Write a checkpoint in the background; False if the step has one already.

        Returns as soon as the state is copied off the device, so its buffers may be donated. `meta` is anything
        JSON can hold. Raises Passing if this or the previous checkpoint could not be written.
        """
        if step in self.steps():
            return False
        leaves, checksums = leaves_by_path(state), leaf_checksums(state)
        record = {
            "step": step,
            "meta": json.loads(to_json(meta)),
            "leaves": {path: _description(leaf) | {"checksum": checksums[path]} for path, leaf in leaves.items()},
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(nest(leaves)),
            meta=ocp.args.JsonSave(record | {"sha256": _record_digest(record)}),
        )
        return self._writing(lambda: self._manager.save(step, args=items, force=True))

    def restore(self, abstract_state, step: int | None = None) -> tuple[int, Any, dict]:
        """(step, state, meta) of the newest whole checkpoint, or of `step`.

        `abstract_state` gives structure, shapes, dtypes and shardings: `jax.ShapeDtypeStruct`s or arrays. Without
        `step`, a checkpoint that is not whole is passed over for the next older one; `say` is told, and its directory
        is renamed to STEP.broken-N. Raises UserError if there is none, none is whole, or a whole one does not
        have the structure, shapes and dtypes asked for.
        """
        self.wait()
        # As the first process sees them: another's view of a shared file system may be older.
        candidates = from_first(lambda: sorted(self.steps(), reverse=True)) if step is None else [step]
        broken: dict[int, str] = {}
        for candidate in candidates:
            try:
                record = _in_all(functools.partial(_read_record, self._directory, candidate))
                leaves = _read_leaves(self._directory, candidate, record, leaves_by_path(abstract_state))
            except _Broken as reason:
                broken[candidate] = str(reason)
                continue
            self._set_aside(broken, candidate)
            return candidate, jax.tree.unflatten(jax.tree.structure(abstract_state), leaves.values()), record["meta"]
        if not candidates:
            raise UserError(f"{self._directory} holds no checkpoint")
        raise UserError(
            f"{self._directory} has no whole checkpoint" + (f" of step {step}" if step is not None else "") + ":",
            *(f"  step {candidate}: {reason}" for candidate, reason in broken.items()),
        )

    def _set_aside(self, broken: dict[int, str], whole: int) -> None:
        """Rename broken checkpoints, so that their steps can be saved again, once a whole one is found."""
        if not broken:
            return
        notices = []
        for step, reason in broken.items():
            names = (self._directory / f"{step}.broken-{n}" for n in itertools.count(1))
            target = next(name for name in names if not name.exists())
            multihost_utils.sync_global_devices(f"name for broken step {step} chosen")
            if jax.process_index() == 0:
                (self._directory / str(step)).rename(target)
            notices.append(f"the checkpoint of step {step} is not whole ({reason}; kept as {target.name})")
        multihost_utils.sync_global_devices("broken checkpoints renamed")
        self._manager.reload()
        self._say("; ".join(notices) + f"; going back to step {whole}")

    def wait(self) -> None:
        """Return when no checkpoint is being written. Raises Passing if one could not be."""
        self._writing(self._manager.wait_until_finished)

    def close(self) -> None:
        """Finish writing and end Orbax's threads; call it once, at exit."""
        self._writing(self._manager.close)

    def _writing(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            raise Passing(f"a checkpoint could not be written to {self._directory}: {_first_line(error)}") from error


# ---- Reading for sampling and evaluation ---------------------------------------------------------------------------


def restore_params(
    workdir: str | Path, step: int | str = "latest", *, choose: Callable[[dict, dict], dict] | None = None
) -> tuple[int, dict, dict]:
    """(step, params, meta) of one checkpoint: "latest", "best" by validation loss (else the latest), or a step.

    Only the parameters are read, as nested dicts; nothing in the workdir is changed, so that it may be that of a run in
    progress. choose(params, meta), given `jax.ShapeDtypeStruct`s, returns those to be read with their shardings;
    without it all are read onto the first device. Raises UserError if there is no such checkpoint or it is not whole.
    """
    _quieten_orbax()
    directory = _directory(workdir)
    chosen = from_first(lambda: _choose(directory, step))
    try:
        record = _in_all(lambda: _read_record(directory, chosen))
        leaves = {path: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"]) for path, leaf in record["leaves"].items()}
        params = nest(leaves)["params"]
        wanted = leaves_by_path({"params": choose(params, record["meta"]) if choose else params})
        leaves = _read_leaves(directory, chosen, record, wanted, partial=True)
    except _Broken as reason:
        there = _steps_on_disk(directory)
        raise UserError(
            f"the checkpoint of step {chosen} in {directory} is not whole ({reason}); there are {there}"
        ) from None
    return chosen, nest(leaves)["params"], record["meta"]


def _choose(directory: Path, step: int | str) -> int:
    steps = _steps_on_disk(directory)
    if not steps:
        raise UserError(f"{directory} holds no checkpoint")
    if step == "latest":
        return steps[-1]
    if step == "best":  # the newest where none was scored
        best = _best(steps, _val_losses(directory))
        return steps[-1] if best is None else best
    if step not in steps:
        raise UserError(f"{directory} holds no checkpoint of step {step}; there are {steps}")
    return step


# ---- What is on disk -----------------------------------------------------------------------------------------------


def _directory(workdir: str | Path) -> Path:
    return Path(workdir).absolute() / "checkpoints"  # Orbax refuses relative paths


def _steps_on_disk(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit() and path.is_dir())


def _description(leaf) -> dict:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _record_digest(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_record(directory: Path, step: int) -> dict:
    """The JSON record of a checkpoint, verified; raises _Broken."""
    reader = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    try:
        record = reader.restore(directory / str(step) / "meta")
        digest = record.pop("sha256")
    except Exception as error:
        raise _Broken(f"its record cannot be read: {_first_line(error)}") from error
    if digest != _record_digest(record):
        raise _Broken("its record was changed after it was written")
    return record


def _val_losses(directory: Path) -> dict[int, float]:
    try:
        recorded = json.loads((directory.parent / VAL_LOSSES).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {int(step): loss for step, loss in recorded.items()}


def _best(steps, val_losses: dict[int, float]) -> int | None:
    return min((step for step in sorted(steps) if step in val_losses), key=val_losses.__getitem__, default=None)


def _read_leaves(directory: Path, step: int, record: dict, wanted: dict[str, Any], *, partial=False) -> dict[str, Any]:
    """The leaves that are wanted, by path; raises UserError if they are others than the checkpoint's, or _Broken."""
    stored = record["leaves"]
    if problems := _mismatches(stored, wanted, partial=partial):
        raise UserError(f"the checkpoint of step {step} in {directory} is of another model or optimizer:", *problems)
    target = nest({path: _abstract(leaf) for path, leaf in wanted.items()})
    by_path = leaves_by_path(_in_all(lambda: _read_arrays(directory / str(step) / "state", target, partial)))
    leaves = {path: by_path[path] for path in wanted}
    changed = [path for path, checksum in leaf_checksums(leaves).items() if checksum != stored[path]["checksum"]]
    if changed:
        raise _Broken("checksums differ: " + _enumerate(changed))
    return leaves


def _in_all(read: Callable[[], Any]) -> Any:
    """What read() returns; raises _Broken in all processes if it does in one, so that all go back to the same step."""
    failure = result = None
    try:
        result = read()
    except _Broken as error:
        failure = error
    if jax.process_count() > 1 and not np.all(multihost_utils.process_allgather(np.array(failure is None))):
        failure = failure or _Broken("another process cannot read it")
    if failure:
        raise failure
    return result


def _read_arrays(directory: Path, target, partial: bool):
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    try:
        return reader.restore(
            directory,
            args=ocp.args.PyTreeRestore(
                target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=partial,
            ),
        )
    except Exception as error:
        raise _Broken(f"its arrays cannot be read: {_first_line(error)}") from error


def _abstract(leaf) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _mismatches(stored: dict[str, dict], wanted: dict[str, Any], *, partial: bool) -> list[str]:
    missing, surplus = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    problems = [f"  {path}: not in the checkpoint" for path in sorted(missing)]
    if not partial:
        problems += [f"  {path}: only in the checkpoint" for path in sorted(surplus)]
    for path in sorted(wanted.keys() & stored.keys()):
        now, then = _description(wanted[path]), stored[path]
        problems += [
            f"  {path}: {key} is {then[key]} in the checkpoint and {now[key]} in the model"
            for key in ("shape", "dtype")
            if then[key] != now[key]
        ]
    return problems


def _enumerate(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _first_line(error: BaseException, limit: int = 300) -> str:
    """The cause in one line; Orbax wraps TensorStore's errors in pages of specification."""
    error = error.__cause__ or error
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:limit]}"


def _quieten_orbax() -> None:
    """Orbax logs dozens of lines a save through absl; what the user must know, this module says itself."""
    logger = logging.getLogger("absl")
    if _is_not_orbax not in logger.filters:
        logger.addFilter(_is_not_orbax)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname or record.levelno >= logging.ERROR
