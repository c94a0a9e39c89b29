"""Metrics: the lines of metrics.jsonl, TensorBoard and W&B.

A line is a dict. Training lines have step, loss, learning_rate, grad_norm, tokens,
tokens_per_second, mfu; evaluation lines have step, split, windows (how many were evaluated, the
first ones of the split), loss and the other metrics of that split; lines of scores have step and
scores, by name. In the file each line ends with its own checksum, "crc32", which is verified when
it is read.

The best step follows from these lines, and from nothing else: see `validation_losses`.
"""

import array
import itertools
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from lm.system.errors import UserError
from lm.system.files import (
    COUNT,
    LARGEST,
    NUMBER,
    check_in_place,
    check_shape,
    name_errors,
    open_regular,
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

# The shape of a line; see `lm.system.files.parse_json`.
_VALUE = (*NUMBER, [NUMBER])
LINE = {
    "step": COUNT, "loss?": NUMBER, "split?": str, "windows?": COUNT, "ema_loss?": NUMBER, "best_loss?": NUMBER,
    "tokens?": COUNT, "grad_norm?": NUMBER, "learning_rate?": NUMBER, "bits_per_byte?": (*NUMBER, None),
    "losses?": {str: NUMBER}, "scores?": {str: NUMBER}, "detail?": {str: {str: _VALUE}},
}  # fmt: skip

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _numbers(value):
    """Turn the strings that files.to_json writes for non-finite numbers into floats."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def read_metrics(path: str | Path, *, timing: bool = True) -> list[dict]:
    """Return the lines of a metrics.jsonl, see `iter_metrics`. A line takes 1.6 kB of memory."""
    return list(iter_metrics(path, timing=timing))


def iter_metrics(path: str | Path, *, timing: bool = True) -> Iterator[dict]:
    """Yield the lines of a metrics.jsonl, without an incomplete last one; only one is in memory.

    Args:
        timing: whether to keep the fields of TIMING_FIELDS; all others are equal whenever the same
            run is repeated.

    Raises:
        UserError: if a complete line is not JSON, has another checksum, or values of wrong types.
    """
    left_out = frozenset() if timing else TIMING_FIELDS
    for _, line in _whole_lines(Path(path)):
        yield {key: _numbers(value) for key, value in line.items() if key not in left_out}


def read_evaluations(path: Path) -> tuple[list[dict], int]:
    """Return the lines of evaluations, and the last step of any line; [] and 0 without a file.

    Lines of training, which may be millions, are neither parsed nor checked, except the last one.
    """
    evaluations = []
    number = 0
    for number, text in _whole_texts(path):
        if '"split"' in text:
            line = _numbers(_parsed(path, number, text))
            if "split" in line:
                evaluations.append(line)
    last = _parsed(path, number, text)["step"] if number else 0
    return evaluations, last


def last_step(path: Path) -> int:
    """Return the last step that has a line; 0: none has, or there is no file."""
    return max((line["step"] for _, line in _whole_lines(path)), default=0)


def cut_back(path: Path, step: int, target: Path | None = None) -> None:
    """Drop the lines after `step`, and an incomplete last one, from the file or, if given, target."""
    kept = [text for text, line in _whole_lines(path) if line["step"] <= step]
    if os.path.lexists(path):  # a link, which may lead nowhere, is replaced
        write_text(target or path, "".join(f"{text}\n" for text in kept))


def _whole_lines(path: Path) -> Iterator[tuple[str, dict]]:
    """Yield (text, parsed) of each complete line."""
    for number, text in _whole_texts(path):
        yield text, _parsed(path, number, text)


def _whole_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each complete line, which ends with a newline."""
    if not path.exists():
        return
    try:
        file = open_regular(path)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}; remove it") from None
    with file:
        for number in itertools.count(1):
            content = file.readline(LARGEST)
            if not content.endswith(b"\n"):
                if len(content) == LARGEST:
                    raise UserError(
                        f"{path} is corrupted: line {number} has no end; correct or remove that "
                        "line"
                    )
                return
            yield number, content[:-1].decode(errors="replace")


def _parsed(path: Path, number: int, text: str) -> dict:
    try:
        line = without_checksum(parse_json(text, LINE))
        check_shape(line, {"loss": NUMBER} if "split" in line else {})
        return line
    except ValueError as error:
        raise UserError(
            f"{path} is corrupted: line {number}: {error}; correct or remove that line"
        ) from None


def to_line(line: dict) -> str:
    """Return a line of metrics.jsonl, with its checksum and without the newline."""
    return to_json(with_checksum(line))


def validation_losses(lines: Iterable[dict]) -> dict[int, float]:
    """Return the finite validation losses by step, over the same windows as the newest one.

    The last step of a run has two: the first one is over as many windows as at the steps before it.

    >>> line = {"split": "validation", "windows": 8}
    >>> validation_losses([line | {"step": 2, "loss": 3.0, "windows": 4}, line | {"step": 4, "loss": 2.5}])
    {4: 2.5}
    """
    evaluations = [line for line in lines if line.get("split") == "validation"]
    newest = max(evaluations, key=lambda line: line["step"], default={})  # the first of its step
    same = [line for line in evaluations if line.get("windows") == newest.get("windows")]
    return {line["step"]: line["loss"] for line in same if math.isfinite(line["loss"])}


def best_step(steps: Iterable[int], losses: dict[int, float]) -> int | None:
    """Return the first step with the smallest validation loss; None if no step was evaluated.

    >>> best_step([100, 200, 300], {100: 2.5, 200: 2.25, 300: 2.25})
    200
    """
    evaluated = [step for step in sorted(steps) if step in losses]
    return min(evaluated, key=losses.__getitem__, default=None)


def missing_lines(path: Path, last: int, step: int, meta: dict) -> str | None:
    """Return a warning if the last lines before the checkpoint of `step` are missing.

    `last` is the last step that has a line, and `meta` the checkpoint's record. Its "log_every" is one
    more than the steps from its last line to the checkpoint; in earlier code, the largest
    log.every of the run.
    """
    if last + meta.get("log_every", meta["config"]["log"]["every"]) > step:
        return None
    return (
        f"WARNING: {path} is corrupted: lines of steps {last + 1} to {step} are missing, and are "
        "not written again; the best step among them is not known"
    )


class MetricsWriter:
    """Writes each line to workdir/metrics.jsonl, and to TensorBoard and W&B if configured.

    Args:
        resume_step: the restored step, after which lines are dropped so that no step appears twice;
            None: new files.
        tensorboard: whether to write TensorBoard events.
        wandb: the arguments of `wandb.init` (project, name, config, ...); None: no W&B.
        writes: whether this process writes; the others of a run know the same lines.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        resume_step: int | None = None,
        tensorboard=True,
        wandb=None,
        writes=True,
    ):
        self.workdir = workdir
        self._path = workdir / "metrics.jsonl"
        last_kept = -1 if resume_step is None else resume_step
        self._steps = array.array("q")
        self._last_step: list[dict] = []
        self._evaluations: list[dict] = []
        for line in iter_metrics(self._path):
            if line["step"] <= last_kept:
                self._remember(line)
        self._file = self._wandb = None
        self._tensorboard: EventFile | None = None
        if not writes:
            return
        self._wandb = None if wandb is None else _start_wandb(self.workdir, wandb)
        cut_back(self._path, last_kept)
        self._file = open(self._path, "a", encoding="utf-8", opener=without_links)  # noqa: SIM115 - closed by close()
        # Opened by the first line: the first step need not wait for an import of half a second.
        self._writes_tensorboard = tensorboard
        self._first_step = last_kept + 1

    def write(self, line: dict) -> None:
        """Append one line, which must have a "step", and flush it to the operating system."""
        self._remember(line)
        if self._file is None:
            return
        with name_errors(self._path):
            self._file.write(f"{to_line(line)}\n")
            self._file.flush()
        scalars = dict(_scalars(line))
        if self._writes_tensorboard:
            with name_errors(self.workdir / "tensorboard"):
                if self._tensorboard is None:
                    self._tensorboard = EventFile(self.workdir, self._first_step)
                self._tensorboard.write(scalars, line["step"])
        if self._wandb:
            self._wandb.log(scalars, step=line["step"])

    def _remember(self, line: dict) -> None:
        self._steps.append(line["step"])
        self._last_step = [*self.lines_of(line["step"]), line]
        if "split" in line:
            self._evaluations.append(line)

    def lines_of(self, step: int) -> list[dict]:
        """Return the lines of this step if it is the last that was written, maybe before a resume."""
        return [line for line in self._last_step if line["step"] == step]

    def last_step(self, limit: int) -> int:
        """Return the last step up to `limit` that has a line; 0: none has."""
        return max((step for step in self._steps if step <= limit), default=0)

    def missing_lines(self, step: int, meta: dict) -> str | None:
        """Return a warning if lines before a restored step are missing (function `missing_lines`)."""
        return missing_lines(self._path, self.last_step(step), step, meta)

    def validation_losses(self) -> dict[int, float]:
        """Return the comparable validation losses by step (function `validation_losses`)."""
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
    """Yield (tag, value) of the numbers of a line: train/KEY, eval/SPLIT/KEY, or KIND/PATH."""
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

    # One run per workdir. On resume W&B ignores the steps it has seen; their values are the same.
    run_id = _wandb_id(workdir / "wandb_id.txt")
    return wandb.init(dir=str(workdir), id=run_id, resume="allow", **arguments)


def _wandb_id(path: Path) -> str:
    """Return the id of the W&B run in this file; the first start of a run creates it."""
    if not path.exists():
        write_text(path, secrets.token_hex(4))
    try:
        run_id = read_bytes(path, at_most=2**10).decode(errors="replace")
        if not re.fullmatch("[0-9a-f]{8}", run_id):
            raise ValueError(f"{run_id[:60]!r} is not the id of a W&B run")
    except ValueError as error:
        raise UserError(f"{path} is corrupted: {error}; delete it to start a new one") from None
    return run_id
