"""Metrics: the lines of metrics.jsonl, TensorBoard and W&B.

A line is a dict. Training lines have step, loss, learning_rate, grad_norm, tokens, tokens_per_second, mfu;
evaluation lines have step, split, windows (how many were evaluated, the first ones of the split), loss and the other
metrics of that split; lines of scores have step and scores, by name. In the file each line ends with its own checksum,
"crc32", which is verified when it is read.

The best step follows from these lines, and from nothing else: see `validation_losses`.
"""

import math
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from lm.errors import UserError
from lm.files import (
    COUNT,
    check_in_place,
    name_errors,
    parse_json,
    read_bytes,
    to_json,
    with_checksum,
    without_checksum,
    without_links,
    write_text,
)
from lm.workdir.tensorboard import EventFile

# What differs between two otherwise bit-identical runs.
TIMING_FIELDS = frozenset({"tokens_per_second", "flops_per_second", "mfu", "mfu_full_square"})

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _numbers(value):
    """Turn the strings that files.to_json writes for non-finite numbers into floats, also within lists and dicts."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def read_metrics(path: str | Path, *, timing: bool = True) -> list[dict]:
    """Return the lines of a metrics.jsonl, without an incomplete last line.

    Args:
        timing: whether to keep the fields of TIMING_FIELDS; all others are equal whenever the same run is repeated.

    Raises:
        UserError: if a complete line is not JSON, or has another checksum.
    """
    return [
        {key: _numbers(value) for key, value in line.items() if timing or key not in TIMING_FIELDS}
        for _, line in _whole_lines(Path(path))
    ]


def cut_back(path: Path, step: int, target: Path | None = None) -> None:
    """Drop the lines of steps after `step`, and an incomplete last line; `target`, else the file, is replaced."""
    kept = [text for text, line in _whole_lines(path) if line["step"] <= step] if path.exists() else []
    if os.path.lexists(path):  # a link, which may lead nowhere, is replaced
        write_text(target or path, "".join(f"{text}\n" for text in kept))


def _whole_lines(path: Path) -> list[tuple[str, dict]]:
    """Return (text, parsed) of each complete line, which ends with a newline."""
    try:
        *texts, _incomplete = read_bytes(path, at_most=2**32).decode(errors="replace").split("\n")
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}; remove it") from None
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = without_checksum(parse_json(text, {"step": COUNT}))
        except ValueError as error:
            raise UserError(f"{path} is corrupted: line {number}: {error}; correct or remove that line") from None
        lines.append((text, line))
    return lines


def to_line(line: dict) -> str:
    """Return a line of metrics.jsonl, with its checksum and without the newline."""
    return to_json(with_checksum(line))


def validation_losses(lines: Iterable[dict]) -> dict[int, float]:
    """Return the finite validation losses by step, of all steps evaluated on the same windows as the newest one.

    The last step of a run has two: the first one is over as many windows as at the steps before it.

    >>> line = {"split": "validation", "windows": 8}
    >>> validation_losses([line | {"step": 2, "loss": 3.0, "windows": 4}, line | {"step": 4, "loss": 2.5}])
    {4: 2.5}
    """
    found = [line for line in lines if line.get("split") == "validation"]
    newest = max((line["step"] for line in found), default=None)
    windows = next((line.get("windows") for line in found if line["step"] == newest), None)
    same = [line for line in found if line.get("windows") == windows]
    return {line["step"]: line["loss"] for line in same if math.isfinite(line["loss"])}


def best_step(steps: Iterable[int], losses: dict[int, float]) -> int | None:
    """Return the step with the smallest validation loss, the first of equal ones; None if no step was evaluated.

    >>> best_step([100, 200, 300], {100: 2.5, 200: 2.25, 300: 2.25})
    200
    """
    return min((step for step in sorted(steps) if step in losses), key=losses.__getitem__, default=None)


def missing_lines(path: Path, lines: list[dict], step: int, meta: dict) -> str | None:
    """Return a warning if the last lines before the checkpoint of `step` are missing, by its record `meta`.

    The record's "log_every" is one more than the steps from its last line to the checkpoint; in earlier code, the
    largest log.every of the run.
    """
    last = max((line["step"] for line in lines), default=0)
    if last + meta.get("log_every", meta["config"]["log"]["every"]) > step:
        return None
    return (
        f"WARNING: {path} is corrupted: lines of steps {last + 1} to {step} are missing, and are not written again; "
        "the best step among them is not known"
    )


class MetricsWriter:
    """Writes each line to workdir/metrics.jsonl, and to TensorBoard and W&B if configured.

    Args:
        resume_step: the restored step, after which lines are dropped so that no step appears twice; None: new files.
        tensorboard: whether to write TensorBoard events.
        wandb: the arguments of `wandb.init` (project, name, config, ...); None: no W&B.
        writes: whether this process writes; the others of a run know the same lines.
    """

    def __init__(self, workdir: Path, *, resume_step: int | None = None, tensorboard=True, wandb=None, writes=True):
        self.workdir, self._path = workdir, workdir / "metrics.jsonl"
        last_kept = -1 if resume_step is None else resume_step
        lines = read_metrics(self._path) if self._path.exists() else []
        lines = [line for line in lines if line["step"] <= last_kept]
        self._steps = [line["step"] for line in lines]
        self._last_step = [line for line in lines if line["step"] == self._steps[-1]]
        self._evaluations = [line for line in lines if "split" in line]
        self._file = self._wandb = None
        self._tensorboard: EventFile | None = None
        if not writes:
            return
        self._wandb = None if wandb is None else _start_wandb(self.workdir, wandb)
        cut_back(self._path, last_kept)
        self._file = open(self._path, "a", encoding="utf-8", opener=without_links)  # noqa: SIM115 - closed by close()
        # Opened by the first line, so that the first step does not wait for an import of half a second.
        self._open_tensorboard = (lambda: EventFile(self.workdir, last_kept + 1)) if tensorboard else None

    def write(self, line: dict) -> None:
        """Append one line, which must have a "step"; it is flushed to the operating system on return."""
        self._steps.append(line["step"])
        self._last_step = [*self.lines_of(line["step"]), line]
        if "split" in line:
            self._evaluations.append(line)
        if self._file is None:
            return
        with name_errors(self._path):
            self._file.write(f"{to_line(line)}\n")
            self._file.flush()
        scalars = dict(_scalars(line))
        if self._open_tensorboard:
            with name_errors(self.workdir / "tensorboard"):
                self._tensorboard = self._tensorboard or self._open_tensorboard()
                self._tensorboard.write(scalars, line["step"])
        if self._wandb:
            self._wandb.log(scalars, step=line["step"])

    def lines_of(self, step: int) -> list[dict]:
        """Return the lines of this step if it is the last one that was written, now or before a resume."""
        return [line for line in self._last_step if line["step"] == step]

    def last_step(self, limit: int) -> int:
        """Return the last step up to `limit` that has a line; 0: none has."""
        return max((step for step in self._steps if step <= limit), default=0)

    def missing_lines(self, step: int, meta: dict) -> str | None:
        """Return a warning if the last lines before a restored step are missing; see the function of this name."""
        return missing_lines(self._path, self._last_step, step, meta)

    def validation_losses(self) -> dict[int, float]:
        """Return the comparable validation losses by step; see the function of this name."""
        return validation_losses(self._evaluations)

    def fsync(self) -> None:
        """Wait until every line is on disk. Call it before a checkpoint of the same step is saved.

        Raises:
            TemporaryError: if the file is no longer in the run's directory.
        """
        if self._file:
            check_in_place(self._file.fileno(), self._path)
            with name_errors(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file:
            with name_errors(self._path):
                self._file.close()
        if self._tensorboard:
            with name_errors(self.workdir / "tensorboard"):
                self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def _scalars(line: dict):
    """Yield (tag, value) of the numbers of a line: train/KEY, eval/SPLIT/KEY if it has a split, or KIND/PATH."""
    prefix = f"eval/{line['split']}" if "split" in line else "train"
    for key, value in line.items():
        if key == "detail":
            from lm.workdir.checksums import leaves_by_path  # imports jax

            yield from leaves_by_path(value).items()
        elif key == "scores":
            yield from value.items()
        elif key == "losses":  # by source of a mixture
            yield from ((f"{prefix}/loss/{name}", loss) for name, loss in value.items())
        elif key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{key}", value


def _start_wandb(workdir: Path, arguments: dict):
    import wandb  # lm/config/checks.py has looked for it

    # One run per workdir. On resume W&B itself ignores steps it has already seen; their values are the same.
    return wandb.init(dir=str(workdir), id=_wandb_id(workdir / "wandb_id.txt"), resume="allow", **arguments)


def _wandb_id(path: Path) -> str:
    """Return the id of the W&B run in this file; the first start of a run creates it."""
    if not path.exists():
        write_text(path, secrets.token_hex(4))
    try:
        found = read_bytes(path, at_most=2**10).decode(errors="replace")
        if not re.fullmatch("[0-9a-f]{8}", found):
            raise ValueError(f"{found[:60]!r} is not the id of a W&B run")
    except ValueError as error:
        raise UserError(f"{path} is corrupted: {error}; delete it to start a new one") from None
    return found
