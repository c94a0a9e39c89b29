"""Metrics: the lines of metrics.jsonl, TensorBoard and W&B.

A line is a dict. Training lines have step, loss, learning_rate, grad_norm, tokens, tokens_per_second, mfu;
evaluation lines have step, split, loss and the other metrics of that split, and `batches` if not all were evaluated.
"""

import math
import os
import re
import secrets
import zlib
from pathlib import Path

from lm.errors import UserError
from lm.files import (
    COUNT,
    NUMBER,
    check_in_place,
    check_shape,
    name_errors,
    parse_json,
    to_json,
    without_links,
    write_text,
)
from lm.workdir.tensorboard import EventFile

# What differs between two otherwise bit-identical runs.
TIMING_FIELDS = frozenset({"tokens_per_second", "flops_per_second", "mfu", "mfu_full_square"})

# Shapes of lines: training, evaluation and details of one run, and evaluation of the stacked runs of a sweep. A line of
# training has one loss, or a list of losses for stacked runs.
_TRAINING, _EVALUATION, _DETAILS = {"loss": (*NUMBER, [NUMBER])}, {"loss": NUMBER}, {"detail": dict}
_STACKED_EVALUATION = {"sums": [[NUMBER]], "counts": [COUNT]}
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
        UserError: if a line other than the last is not JSON or lacks required values.
    """
    return [
        {key: _numbers(value) for key, value in line.items() if timing or key not in TIMING_FIELDS}
        for _, line in _whole_lines(Path(path))
    ]


def cut_back(path: str | Path, step: int) -> None:
    """Drop the lines of steps after `step`, and an incomplete last line; the file is replaced atomically."""
    path = Path(path)
    if path.exists():
        kept = [text for text, line in _whole_lines(path) if line["step"] <= step]
        write_text(path, "".join(f"{text}\n" for text in kept))


def _whole_lines(path: Path) -> list[tuple[str, dict]]:
    """Return (text, parsed) of each complete line, which ends with a newline."""
    *texts, _incomplete = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = parse_json(text, {"step": COUNT})
            check_shape(line, _shape_of(line))
        except ValueError as error:
            raise UserError(f"{path} is corrupted: line {number}: {error}; correct or remove that line") from None
        lines.append((text, line))
    return lines


def _shape_of(line: dict) -> dict:
    if "split" in line:
        return {"split": str} | (_STACKED_EVALUATION if "sums" in line else _EVALUATION)
    return _DETAILS if "detail" in line else _TRAINING


class MetricsWriter:
    """Writes each line to workdir/metrics.jsonl, and to TensorBoard and W&B if configured.

    Args:
        workdir: the run's directory.
        resume_step: the restored step, after which lines are dropped so that no step appears twice; None: new files.
        tensorboard: whether to write TensorBoard events.
        wandb: the arguments of `wandb.init` (project, name, config, ...); None: no W&B.
        writes: whether this process writes; the others of a run know the same lines.

    Raises:
        UserError: if W&B is configured and not installed.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        resume_step: int | None = None,
        tensorboard: bool = True,
        wandb: dict | None = None,
        writes: bool = True,
    ):
        self.workdir = workdir = Path(workdir)
        last_kept = -1 if resume_step is None else resume_step
        self._path = path = workdir / "metrics.jsonl"
        lines = read_metrics(path) if path.exists() else []
        self._last, self._file = [line for line in lines if line["step"] <= last_kept], None
        self._n_lines = len(self._last)
        self._checksums = {last_kept: 0}  # of all lines up to a step, for the last two steps
        self._tensorboard = self._open_tensorboard = self._wandb = None
        if not writes:
            return
        self._wandb = None if wandb is None else _start_wandb(workdir, wandb)
        cut_back(path, last_kept)
        if path.exists():
            self._checksums = {last_kept: zlib.crc32(path.read_bytes())}
        self._file = open(path, "a", encoding="utf-8", opener=without_links)  # noqa: SIM115 - closed by close()
        # Opened by the first line, so that the first step does not wait for an import of half a second.
        self._open_tensorboard = (lambda: EventFile(workdir, last_kept + 1)) if tensorboard else None

    def write(self, line: dict) -> None:
        """Append one line, which must have a "step"; it is flushed to the operating system on return."""
        self._last = [*self.lines_of(line["step"]), line]
        self._n_lines += 1
        if self._file is None:
            return
        text, last = to_json(line) + "\n", max(self._checksums)
        kept = {step: self._checksums[step] for step in (last,) if step != line["step"]}
        self._checksums = kept | {line["step"]: zlib.crc32(text.encode(), self._checksums[last])}
        with name_errors(self._path):
            self._file.write(text)
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
        return [line for line in self._last if line["step"] == step]

    def n_lines(self, step: int) -> int:
        """Return the number of lines up to this step, which must be at least the last one but one."""
        return self._n_lines - sum(line["step"] > step for line in self._last)

    def checksum(self, step: int) -> int | None:
        """Return the CRC-32 of all lines up to this step, which is one of the last two; None if unknown."""
        return self._checksums.get(max((known for known in self._checksums if known <= step), default=None))

    def gap(self, step: int, n_lines: int, checksum: int | None = None) -> str | None:
        """Return how the lines up to `step` differ from those at the time of its checkpoint; None if they do not.

        Call it after a resume, before the first line is written.

        Args:
            step: the restored step.
            n_lines: number of lines at that time.
            checksum: what `checksum` returned then; None if it is not known.
        """
        if self._n_lines >= n_lines and (checksum is None or not self._file or checksum == self.checksum(step)):
            return None
        if self._n_lines >= n_lines:
            return f"{self._path} is corrupted: its lines up to step {step} are not those that were written"
        last = max((line["step"] for line in self._last), default=0)
        steps = f"steps {last + 1} to {step}" if last < step else f"steps before {step}"
        return (
            f"{self._path} is corrupted: it has {self._n_lines} of the {n_lines} lines up to step "
            f"{step}; lines of {steps} are missing, and are not written again"
        )

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
            yield from _detail_scalars(value)
        elif key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{key}", value


def _detail_scalars(detail: dict):
    for kind, by_path in detail.items():
        for path, value in by_path.items():
            per_layer = enumerate(value) if isinstance(value, list) else [(None, value)]  # a stack of layers is a list
            for layer, number in per_layer:
                yield f"{kind}/{path if layer is None else f'{path}/{layer}'}", number


def _start_wandb(workdir: Path, arguments: dict):
    try:
        import wandb
    except ImportError:
        raise UserError(
            "config.log.wandb is set and the package wandb is not installed: "
            "pip install -e '.[wandb]', or set config.log.wandb = False"
        ) from None
    # One run per workdir. On resume W&B itself ignores steps it has already seen; their values are the same.
    return wandb.init(dir=str(workdir), id=_wandb_id(workdir / "wandb_id.txt"), resume="allow", **arguments)


def _wandb_id(path: Path) -> str:
    """Return the id of the W&B run in this file; the first start of a run creates it."""
    if not path.exists():
        write_text(path, secrets.token_hex(4))
    found = path.read_text(encoding="utf-8", errors="replace")
    if not re.fullmatch("[0-9a-f]{8}", found):
        raise UserError(f"{path} is corrupted: {found[:60]!r} is not the id of a W&B run; delete it to start a new one")
    return found
