"""Metrics: lines in metrics.jsonl, TensorBoard and W&B.

A line is a dict. Training lines have step, loss, learning_rate, grad_norm, tokens, tokens_per_second, mfu;
evaluation lines have step, split, loss and whatever else was measured on that split.
"""

import json
import math
import os
import secrets
import sys
from pathlib import Path

from lm.errors import UserError
from lm.files import to_json, write_text

# What differs between two otherwise bit-identical runs.
TIMING_FIELDS = frozenset({"tokens_per_second", "flops_per_second", "mfu", "mfu_full_square"})

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _numbers(value):
    """What files.to_json wrote for non-finite numbers as floats again, also within lists."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def read_metrics(path: str | Path, *, timing: bool = True) -> list[dict]:
    """The lines of a metrics.jsonl, non-finite numbers as floats again; a torn last line is left out.

    With timing=False the fields of TIMING_FIELDS are left out: what remains is the same in every repetition of a run.
    Raises UserError if a line that is not the last is not JSON.
    """
    return [
        {key: _numbers(value) for key, value in line.items() if timing or key not in TIMING_FIELDS}
        for _, line in _whole_lines(Path(path))
    ]


def cut_back(path: str | Path, step: int) -> None:
    """Drop every line of a step later than `step` and a torn last line, in one atomic replacement of the file."""
    path = Path(path)
    if path.exists():
        kept = [text for text, line in _whole_lines(path) if line["step"] <= step]
        write_text(path, "".join(f"{text}\n" for text in kept))


def _whole_lines(path: Path) -> list[tuple[str, dict]]:
    """(text, parsed) of each line that was written to its end, which a newline marks."""
    *texts, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append((text, json.loads(text)))
        except ValueError:
            raise UserError(f"{path}, line {number} is not JSON: {text[:60]!r}; mend or remove that line") from None
    return lines


class MetricsWriter:
    """Writes each line to workdir/metrics.jsonl and, where asked, to TensorBoard and W&B.

    `resume_step` is the step that was restored: later lines are dropped, so that none appears twice. None starts
    the files afresh. `wandb` holds the arguments of `wandb.init` (project, name, config ...), None for no W&B. Of
    several processes one alone `writes`; all know the same lines.
    Raises UserError if W&B is asked for and not installed.
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
        path = workdir / "metrics.jsonl"
        lines = read_metrics(path) if path.exists() else []
        self._last, self._file = [line for line in lines if line["step"] <= last_kept], None
        self._tensorboard = self._open_tensorboard = self._wandb = None
        if not writes:
            return
        self._wandb = None if wandb is None else _start_wandb(workdir, wandb)
        cut_back(path, last_kept)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        # Opened by the first line: the first step need not wait for an import of half a second.
        self._open_tensorboard = (lambda: _start_tensorboard(workdir, last_kept)) if tensorboard else None

    def write(self, line: dict) -> None:
        """Append one line, which must have a "step"; it is in the operating system's hands when this returns."""
        self._last = [*self.lines_of(line["step"]), line]
        if self._file is None:
            return
        self._file.write(to_json(line) + "\n")
        self._file.flush()
        scalars = dict(_scalars(line))
        if self._open_tensorboard and not self._tensorboard:
            self._tensorboard = self._open_tensorboard()
        if self._tensorboard:
            for tag, value in scalars.items():
                self._tensorboard.add_scalar(tag, value, line["step"])
        if self._wandb:
            self._wandb.log(scalars, step=line["step"])

    def lines_of(self, step: int) -> list[dict]:
        """The lines of this step, if it is the last that was written, in this process or before it was resumed."""
        return [line for line in self._last if line["step"] == step]

    def fsync(self) -> None:
        """Wait until every line is on the disk. Call it before a checkpoint of the same step is saved."""
        if self._file:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def _scalars(line: dict):
    """(tag, value) of the numbers of a line: train/KEY, eval/SPLIT/KEY where it has a split, detail/KIND/PATH."""
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
                yield f"detail/{kind}/{path if layer is None else f'{path}/{layer}'}", number


def _start_tensorboard(workdir: Path, last_kept: int):
    # tensorboardX imports torch where there is one, for seconds and for nothing that is used here.
    hidden = {"torch": None} if "torch" not in sys.modules else {}
    sys.modules.update(hidden)
    try:
        from tensorboardX import SummaryWriter
    finally:
        for name in hidden:
            del sys.modules[name]

    folder = workdir / "tensorboard"
    # A purge tells the readers to forget what earlier event files hold from that step on.
    purge = last_kept + 1 if folder.exists() else None
    # tensorboardX names files by the second: a start within the same one would overwrite the file before it.
    return SummaryWriter(str(folder), purge_step=purge, flush_secs=30, filename_suffix=f".from-{last_kept + 1:09}")


def _start_wandb(workdir: Path, arguments: dict):
    try:
        import wandb
    except ImportError:
        raise UserError(
            "config.log.wandb is set and the package wandb is not installed: "
            "pip install -e '.[wandb]', or set config.log.wandb = False"
        ) from None
    # One run per workdir. On resume W&B itself ignores steps it has already seen; their values are the same.
    id_file = workdir / "wandb_id.txt"
    if not id_file.exists():
        write_text(id_file, secrets.token_hex(4))
    return wandb.init(dir=str(workdir), id=id_file.read_text(encoding="utf-8"), resume="allow", **arguments)
