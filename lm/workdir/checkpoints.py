"""Save, restore and verify the training state. No other module imports Orbax.

On disk: workdir/checkpoints/STEP/state holds the arrays as nested dicts named by their paths, and
workdir/checkpoints/STEP/meta a JSON record of the caller's `meta` and each leaf's shape, dtype and
checksum. Orbax restores a flipped byte silently and casts silently to the requested dtype; the
record makes both visible. The validation losses that decide the best checkpoint are lines of
metrics.jsonl: see lm/workdir/metrics.py.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # the only type of path that ocp.path.step.Metadata accepts

from lm.parallel.processes import from_first, gather
from lm.parameters import flat, nest
from lm.system.errors import TemporaryError, UserError, first_line
from lm.system.files import (
    COUNT,
    appears,
    check_files,
    parse_json,
    read_bytes,
    read_json,
    remove_while_written,
    to_json,
)
from lm.system.text_tables import say, some
from lm.update_rules.schedule_free import average
from lm.workdir.checksums import leaf_checksums, leaves_by_path
from lm.workdir.metrics import best_step, missing_lines, read_evaluations, validation_losses
from lm.workdir.orbax_errors import Corrupted, disk_failure, quieten_orbax, unreadable
from lm.workdir.saved_run import checkpoint_steps, require_run

# The shape of a record; see `lm.system.files.parse_json`. `lm.workdir.saved_run.check_meta` checks
# the caller's meta.
_RECORD = {
    "step": COUNT, "sha256": str, "meta": {"config?": {"optimizer?": {"name?": str}, "log?": {"every": COUNT}}},
    "leaves": {str: {"shape": [COUNT], "dtype": str, "checksum": str}},
}  # fmt: skip
MIN_IN_FLIGHT = 2**28  # bytes of a state that are read or written at once, if no leaf is larger


# ---- Saving and resuming a run -------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of the run in a workdir.

    Args:
        keep: how many of the newest checkpoints to keep, beside the best by validation loss.
        say: called with each line for the user.
        in_flight: bytes of a state that are written at once, to save memory (see
            `bytes_in_flight`); None: all.
    """

    def __init__(
        self, workdir: str | Path, *, keep: int = 2, say=print, in_flight: int | None = None
    ):
        quieten_orbax()
        self._directory = _directory(workdir)
        self._keep = keep
        self._say = say
        # Comparable validation losses by step, which the caller keeps current. Not in Orbax's
        # metrics: they may be known after a checkpoint is saved, and a corrupted file of them would
        # make opening the manager fail.
        self.val_losses: dict[int, float] = {}
        self.protected: set[int] = set()  # steps that are kept, because their losses are not known
        self._held: list[int] = []
        if self._directory.is_dir():
            check_files(self._directory, "d")  # Orbax would wait for a pipe
        from_first(lambda: _set_aside_unread_times(self._directory, say))
        limit = {} if in_flight is None else {"save_concurrent_gb": in_flight / 1e9}
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(**limit),
                "meta": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self,
                cleanup_tmp_directories=True,
                # With creation in the background, Orbax waits five minutes for a directory that
                # cannot be created.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )

    def should_preserve(self, checkpoints, *, context=None) -> list[bool]:
        """Return which checkpoints to keep; Orbax calls this after each save."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        # by the owner of the workdir
        linked = {step for step in steps if (self._directory / str(step)).is_symlink()}
        kept = {*sorted(steps)[-self._keep :], best_step(steps, self.val_losses)}
        kept |= {*self.protected, *self._held, *linked}
        return [step in kept for step in steps]

    def hold(self, steps: list[int]) -> None:
        """Keep the checkpoints of these steps, which another thread reads, until the next call."""
        self._held = steps

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, oldest first, including one that is being written."""
        return sorted(self._manager.all_steps())

    def is_best(self, step: int) -> bool:
        """Return whether the validation loss of a step is smaller than those of all checkpoints."""
        return best_step({*self.steps(), step}, self.val_losses) == step

    def save(self, step: int, state, meta: dict) -> bool:
        """Write a checkpoint in the background; `meta` is anything that JSON can represent.

        The state has been copied off the device on return, so its buffers may be donated. Returns
        False if the step already has a checkpoint, which is kept.

        Raises:
            TemporaryError: if this or the previous checkpoint could not be written.
        """
        if step in self.steps():
            return False
        leaves = leaves_by_path(state)
        described = {path: _description(leaf) for path, leaf in leaves.items()}
        for path, checksum in leaf_checksums(state).items():
            described[path]["checksum"] = checksum
        record = {"step": step, "meta": json.loads(to_json(meta)), "leaves": described}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(nest(leaves)),
            meta=ocp.args.JsonSave(record | {"sha256": _record_digest(record)}),
        )
        return self._writing(lambda: self._manager.save(step, args=items, force=True))

    def restore(
        self, abstract_state, adapt=lambda state, meta: state
    ) -> tuple[int, Any, dict] | None:
        """Restore the newest intact checkpoint; newer ones are renamed to STEP.corrupted-N.

        Args:
            abstract_state: structure, shapes, dtypes and shardings, as `jax.ShapeDtypeStruct`s or
                arrays.
            adapt: (abstract_state, meta) -> the abstract state of the checkpoint with this meta.

        Returns:
            (step, state, meta), or None if there is no checkpoint.

        Raises:
            UserError: if all checkpoints are corrupted, or if structure, shapes or dtypes differ.
            TemporaryError: if the system fails to read one; it is not renamed, as it may be intact.
        """
        self.wait()
        # As process 0 lists them: another process may see an older state of a shared file system.
        candidates = from_first(lambda: sorted(self.steps(), reverse=True))
        corrupted: dict[int, str] = {}
        for candidate in candidates:
            if jax.process_index() > 0:
                appears(self._directory / str(candidate))  # within a minute
            try:
                record = _in_all(functools.partial(_read_record, self._directory, candidate))
                saved = adapt(abstract_state, record["meta"])
                leaves = _read_leaves(self._directory, candidate, record, leaves_by_path(saved))
            except Corrupted as reason:
                corrupted[candidate] = str(reason)
                continue
            if corrupted:  # and newer: renamed, so that their steps can be saved again
                warnings = from_first(
                    lambda: [self._set_aside(*item) for item in corrupted.items()]
                )
                self._manager.reload()
                self._say("; ".join(warnings) + f"; falling back to step {candidate}")
            state = jax.tree.unflatten(jax.tree.structure(saved), leaves.values())
            return candidate, state, record["meta"]
        if not candidates:
            return None
        raise UserError(
            f"{self._directory} has no intact checkpoint:",
            *(f"  step {candidate}: {reason}" for candidate, reason in corrupted.items()),
        )

    def _set_aside(self, step: int, reason: str) -> str:
        """Rename a corrupted checkpoint, and return a warning."""
        names = (self._directory / f"{step}.corrupted-{n}" for n in itertools.count(1))
        target = next(name for name in names if not name.exists())
        (self._directory / str(step)).rename(target)
        return f"WARNING: corrupted checkpoint of step {step} ({reason}), renamed to {target.name}"

    def wait(self) -> None:
        """Wait until no checkpoint is being written; raises TemporaryError if that failed."""
        self._writing(self._manager.wait_until_finished)

    def close(self) -> None:
        """Finish writing and end Orbax's threads; call it once, at exit."""
        self._writing(self._manager.close)

    def _writing(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            if jax.process_index() == 0:
                for unfinished in self._directory.glob("*.orbax-checkpoint-tmp"):
                    remove_while_written(unfinished)
            cause = disk_failure(error) or first_line(error)
            raise TemporaryError(
                f"a checkpoint could not be written to {self._directory}: {cause}"
            ) from error


# ---- Reading for sampling and evaluation ---------------------------------------------------------


def restore_params(
    workdir: str | Path,
    step: int | str = "latest",
    *,
    choose: Callable[[dict, dict], dict] | None = None,
) -> tuple[int | str, dict, dict]:
    """Restore the parameters that a run evaluates, and change nothing: it may be in progress.

    Args:
        step: a step, "latest", or "best" by validation loss (the latest if none was evaluated);
            "ema": the average of config.train.ema at the latest step; "mean:N": the mean of the
            newest N checkpoints.
        choose: (params, meta) -> the parameters to read, with their shardings; `params` are nested
            dicts of `jax.ShapeDtypeStruct`. None: read all onto the first device.

    Returns:
        (step, params, meta); the step is a text if these are not the parameters of one step; params
        are nested dicts.

    Raises:
        UserError: if there is no such checkpoint, or it is corrupted.
    """
    directory = _directory(workdir)
    kind, _, n = str(step).partition(":")
    if kind == "mean":
        steps = from_first(lambda: _newest(directory, int(n)))
        sums: dict[str, Any] = {}
        for member in steps:
            params, meta = _evaluated(directory, member, choose)
            for path, x in params.items():
                sums[path] = sums.get(path, 0) + x.astype(jax.numpy.float32)
        params = {path: (sums[path] / len(steps)).astype(x.dtype) for path, x in params.items()}
        return f"mean_{'_'.join(map(str, steps))}", nest(params), meta
    chosen = from_first(lambda: _choose(directory, "latest" if kind == "ema" else step))
    params, meta = _evaluated(directory, chosen, choose, ema=kind == "ema")
    return f"ema_{chosen}" if kind == "ema" else chosen, nest(params), meta


def _newest(directory: Path, n: int) -> list[int]:
    steps = checkpoint_steps(directory.parent)
    if not 0 < n <= len(steps):
        raise UserError(
            f"--step mean:{n}: {directory} holds {len(steps)} checkpoints; use at most as many (a "
            "run keeps config.checkpoint.keep of them)"
        )
    return steps[-n:]


def _evaluated(
    directory: Path, step: int, choose, ema: bool = False
) -> tuple[dict[str, Any], dict]:
    """Return the parameters by path that a run evaluates, or its EMA, and the checkpoint's `meta`."""
    chosen = {}
    trees = ["ema" if ema else "params"]

    def wanted(record: dict, leaves: dict) -> dict:
        params = nest(leaves)["params"]
        chosen.update(flat(choose(params, record["meta"]) if choose else params))
        if ema and not any(path.startswith("ema/") for path in leaves):
            raise UserError(f"--step ema: the run of {directory} trained without config.train.ema")
        if not ema and _optimizer(record).get("name") == "schedule_free":
            # It trains at y and evaluates an average of y and z, which its state has.
            first = next(iter(chosen))
            (z,) = (path for path in leaves if path.endswith(f"/z/{first}"))
            trees.append(z.removesuffix(f"/{first}"))
        places = {f"{tree}/{path}": x.sharding for tree in trees for path, x in chosen.items()}
        return {path: leaves[path].update(sharding=sharding) for path, sharding in places.items()}

    record, leaves = _read(directory, step, wanted)
    params = {path: leaves[f"{trees[0]}/{path}"] for path in chosen}
    if len(trees) > 1:
        b1 = _optimizer(record)["b1"]
        params = {path: average(y, leaves[f"{trees[1]}/{path}"], b1) for path, y in params.items()}
    return {path: x.astype(chosen[path].dtype) for path, x in params.items()}, record["meta"]


def _optimizer(record: dict) -> dict:
    return record["meta"].get("config", {}).get("optimizer", {})


def verify(workdir: str | Path, step: int) -> None:
    """Read every array of a checkpoint; raises UserError if it is corrupted."""
    _read(_directory(workdir), step, lambda record, leaves: leaves)


def _read(
    directory: Path, step: int, wanted: Callable[[dict, dict], dict]
) -> tuple[dict, dict[str, Any]]:
    """Return the record of a checkpoint, and the arrays that `wanted` (record, all) chooses."""
    quieten_orbax()
    check_files(directory / str(step), "d")
    try:
        record = _in_all(lambda: _read_record(directory, step))
        leaves = _abstract_leaves(record)
        return record, _read_leaves(directory, step, record, wanted(record, leaves), partial=True)
    except Corrupted as reason:
        others = [other for other in checkpoint_steps(directory.parent) if other != step]
        advice = f"choose another step: {others}" if others else "there is no other checkpoint"
        raise UserError(
            f"the checkpoint of step {step} in {directory} is corrupted ({reason}); {advice}"
        ) from None


def read_metas(workdir: str | Path) -> dict[int, dict]:
    """Return the `meta` of each checkpoint by its step, without the corrupted ones."""
    directory = _directory(workdir)
    metas = {}
    for step in checkpoint_steps(directory.parent):
        with contextlib.suppress(Corrupted):
            metas[step] = _read_record(directory, step)["meta"]
    return metas


def _choose(directory: Path, step: int | str) -> int:
    steps = checkpoint_steps(directory.parent)
    if not steps:
        require_run(directory.parent)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # a damaged one says more: it may be that of a downloaded model
            read_json(directory.parent / "config.json")
        raise UserError(f"{directory} holds no checkpoint")
    if step == "latest":
        return steps[-1]
    if step == "best":  # the newest if none was evaluated
        best = best_step(steps, _recorded_losses(directory, steps[-1]))
        return steps[-1] if best is None else best
    if step not in steps:
        raise UserError(f"{directory} holds no checkpoint of step {step}; there are {steps}")
    return step


def _recorded_losses(directory: Path, newest: int) -> dict[int, float]:
    """Return the comparable validation losses in the metrics of a run; warn if lines are missing."""
    path = directory.parent / "metrics.jsonl"
    evaluations, last = read_evaluations(path)
    # An import has no metrics, and its step is 0.
    with contextlib.suppress(Corrupted, KeyError, TypeError):
        if warning := missing_lines(path, last, newest, _read_record(directory, newest)["meta"]):
            say(warning, sys.stderr)  # standard output may hold what the model generates
    return validation_losses(evaluations)


# ---- What is on disk -----------------------------------------------------------------------------


def _directory(workdir: str | Path) -> Path:
    return Path(workdir).absolute() / "checkpoints"  # Orbax refuses relative paths


def _set_aside_unread_times(directory: Path, say: Callable[[str], None]) -> None:
    """Rename Orbax's records of times that it cannot read: damaged, or of a newer Orbax.

    One such file would prevent opening any checkpoint. Without the file Orbax uses the time of the
    directory.
    """
    for step in checkpoint_steps(directory.parent):
        metadata = ocp.path.step.Metadata(step=step, path=epath.Path(directory / str(step)))
        try:
            _ = metadata.commit_timestamp
        except OSError:
            continue
        except Exception as error:
            path = directory / str(step) / "_CHECKPOINT_METADATA"
            path.rename(path.with_name(f"{path.name}.unread"))
            say(
                f"WARNING: {path} is corrupted ({first_line(error)}); renamed, as it only holds "
                "times"
            )


def _description(leaf) -> dict:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _record_digest(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_record(directory: Path, step: int) -> dict:
    """Read and verify the JSON record of a checkpoint; raises Corrupted.

    It does not use Orbax, whose reader would wait for all processes of a run.
    """
    try:
        record = parse_json(read_bytes(directory / str(step) / "meta" / "metadata"), _RECORD)
        digest = record.pop("sha256")
    except Exception as error:
        raise unreadable(directory, step, "record", error) from error
    if digest != _record_digest(record):
        raise Corrupted("its record was changed after it was written")
    return record


def _abstract_leaves(record: dict) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a record by path; raises Corrupted if no model can have them."""
    leaves = {}
    for path, about in record["leaves"].items():
        try:
            leaves[path] = jax.ShapeDtypeStruct(tuple(about["shape"]), about["dtype"])
        except (TypeError, ValueError) as error:
            raise Corrupted(
                f"its record has no array at leaves.{path[:80]}: {first_line(error)}"
            ) from None
        if math.prod(about["shape"]) >= 2**48:
            raise Corrupted(
                f"its record has an array of the shape {about['shape']} at leaves.{path[:80]}"
            )
    try:
        assert nest(leaves)["params"]
    except (AssertionError, KeyError, TypeError):  # also of a leaf that others are below
        raise Corrupted("its record has no tree of parameters at leaves") from None
    return leaves


def _read_leaves(
    directory: Path, step: int, record: dict, wanted: dict[str, Any], *, partial=False
) -> dict[str, Any]:
    """Read and verify leaves by path; raises UserError if others are stored, or Corrupted."""
    stored = record["leaves"]
    if problems := _mismatches(stored, wanted, partial=partial):
        raise UserError(
            f"the checkpoint of step {step} in {directory} is of another model or optimizer, or "
            "of another version of them in this code:",
            *problems,
            "use the commit that run.json names, or train on from its weights: "
            f"--config.init_from={directory.parent}",
        )
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = {}
    for path, x in wanted.items():
        place = getattr(x, "sharding", None) or first
        target[path] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    by_path = leaves_by_path(_in_all(lambda: _read_arrays(directory, step, nest(target), partial)))
    leaves = {path: by_path[path] for path in wanted}
    checksums = leaf_checksums(leaves)
    changed = [path for path in leaves if checksums[path] != stored[path]["checksum"]]
    if changed:
        raise Corrupted("checksums differ: " + some(changed))
    return leaves


def _in_all(read: Callable[[], Any]) -> Any:
    """Return read(); if it raises Corrupted or TemporaryError in one process, raise so in all.

    So all processes fall back to the same step, or none does.
    """
    failure: Corrupted | TemporaryError | None = None
    try:
        result = read()
    except (Corrupted, TemporaryError) as error:
        failure = error
    kinds = gather("none" if failure is None else type(failure).__name__)
    for kind in (TemporaryError, Corrupted):  # the first one counts more
        if kind.__name__ in kinds:
            if not isinstance(failure, kind):
                failure = kind("another process cannot read the checkpoint")
            raise failure
    return result


def _read_arrays(directory: Path, step: int, target, partial: bool):
    limit = bytes_in_flight(target) / 1e9
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit))
    try:
        return reader.restore(
            directory / str(step) / "state",
            args=ocp.args.PyTreeRestore(
                target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=partial,
            ),
        )
    except Exception as error:
        raise unreadable(directory, step, "arrays", error) from error


def bytes_in_flight(state) -> int:
    """Return how many bytes of a state to handle at once: few, but more than the largest array."""
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)]
    return max(MIN_IN_FLIGHT, *(size + 1 for size in sizes))


def _mismatches(stored: dict[str, dict], wanted: dict[str, Any], *, partial: bool) -> list[str]:
    lacking = sorted(wanted.keys() - stored.keys())
    more = [] if partial else sorted(stored.keys() - wanted.keys())
    problems = [f"  {path}: not in the checkpoint" for path in lacking]
    problems += [f"  {path}: only in the checkpoint" for path in more]
    for path in sorted(wanted.keys() & stored.keys()):
        for key, now in _description(wanted[path]).items():
            then = stored[path][key]
            if then != now:
                problems.append(
                    f"  {path}: {key} is {then} in the checkpoint and {now} in the model"
                )
    return problems
