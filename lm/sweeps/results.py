"""The runs of a sweep: one line each in runs.jsonl, or one row each in a published runs.csv.

A line has the columns of `Run`, with every tuned value in a column named by its config key, and a
checksum. pandas and polars read the file (`pandas.read_json(path, lines=True)`). A damaged line
costs its run alone. This module does not import jax.
"""

import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.config.values import short
from lm.sweeps.tuning import (
    CURVE,
    VERTEX,
    Choice,
    Error,
    Outcome,
    choose_in_cell,
    outcome,
    tuning_errors,
)
from lm.system.errors import UserError
from lm.system.files import (
    COUNT,
    NUMBER,
    SCALAR,
    check_shape,
    name_errors,
    parse_json,
    read_bytes,
    to_json,
    without_links,
    write_text,
)
from lm.system.text_tables import csv_table, csv_text, say

STUCK = 0.95  # a run that ends above this fraction of the unigram baseline's loss is stuck
RUNS = "runs.jsonl"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run."""

    # "tuning", "final", or "again": a final run of a published baseline that an addition repeats
    phase: str
    variant: str  # with its cell
    point: dict[str, Any]  # its value of every tuned config key
    seed: int  # train.seed
    status: str  # "finished" or "diverged"
    diverged_step: int | None = None  # the step of the first update that was not finite
    steps: int = 0  # updates
    tokens: int = 0  # of the whole run; 0 on pages published before they were kept
    val_loss: float | None = None  # over the whole split, in nats per token; None if it diverged
    test_loss: float | None = None
    curve: tuple[tuple[int, float], ...] = ()  # the validation losses during training, (step, loss)
    # those at 25, 50 and 75 % of the steps, see `losses_at_quarters`; earlier pages have none
    val_loss_25: float | None = None
    val_loss_50: float | None = None
    val_loss_75: float | None = None
    # its share of the time of all runs that trained at once, with compilation and evaluation
    seconds: float = 0.0
    # of all these runs, without compilation and evaluation; None: not measured
    tokens_per_second: float | None = None
    at_once: int = 1  # how many trained at once
    processor: str = ""  # where it was trained; "" if not known
    device: str = ""
    commit: str = ""
    # test loss by source, and loss of probe/NAME
    sources: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, tuple, int]:
        """Return what identifies the run in its sweep: phase, variant, tuned values, seed."""
        return self.phase, self.variant, tuple(self.point.values()), self.seed

    def row(self) -> dict[str, Any]:
        """Return its columns, those of the tuned values after the variant."""
        fields = dataclasses.asdict(self)
        point = fields.pop("point")
        return {"phase": fields.pop("phase"), "variant": fields.pop("variant"), **point, **fields}


_FIELDS = [field.name for field in dataclasses.fields(Run) if field.name != "point"]
# The shape of a row; see `lm.system.files.parse_json`. The other columns are tuned values.
_LOSS = (float, None)
_RUN = {
    "phase": ("tuning", "final", "again"), "variant": str, "seed": COUNT, "status": ("finished", "diverged"),
    "diverged_step?": (COUNT, None), "steps?": COUNT, "tokens?": COUNT, "val_loss?": _LOSS, "test_loss?": _LOSS,
    "val_loss_25?": _LOSS, "val_loss_50?": _LOSS, "val_loss_75?": _LOSS,
    "curve?": [[COUNT, NUMBER]], "seconds?": float, "tokens_per_second?": (float, None), "at_once?": COUNT,
    "processor?": str, "device?": str, "commit?": str, "sources?": {str: NUMBER},
}  # fmt: skip
_TEXTS = ("phase", "variant", "status", "processor", "device", "commit")  # never numbers


def _to_lines(runs: Iterable[Run]) -> str:
    rows = [run.row() for run in runs]
    return "".join(to_json(row | {"checksum": _checksum(row)}) + "\n" for row in rows)


def _from_line(line: bytes) -> Run:
    """Return the run of a line; raises ValueError if the line is damaged."""
    row = parse_json(line, {"checksum": str})
    if row.pop("checksum") != _checksum(row):
        raise ValueError("its content differs from its checksum")
    return _from_row(row)


def _checksum(row: dict) -> str:
    return hashlib.sha256(to_json(row).encode()).hexdigest()[:16]


def read_runs(workdir: Path, warn: Callable[[str], None] | None = None) -> list[Run]:
    """Return the finished runs of a sweep's directory, in the order in which they finished.

    Damaged lines are left out; `warn` is called with a message for each, or it is printed to
    standard error. Raises UserError if the file is a link or no file.
    """
    warn = warn or functools.partial(say, file=sys.stderr)
    runs, damaged = _read_lines(workdir / RUNS)
    for number, error in damaged.items():
        warn(
            f"WARNING: {workdir / RUNS}, line {number}: the run is lost ({error}); rerun the "
            "sweep to train it"
        )
    return list({run.key: run for run in runs.values()}.values())


def _read_lines(path: Path) -> tuple[dict[int, Run], dict[int, str]]:
    """Return the runs by line number, and the errors of damaged lines by theirs."""
    if path.is_symlink():
        raise UserError(
            f"{path} is a symbolic link: runs are appended to a file; replace it by what it names"
        )
    runs: dict[int, Run] = {}
    damaged: dict[int, str] = {}
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        content = b""
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}; remove it") from None
    for number, line in enumerate(content.splitlines(), 1):
        try:
            runs[number] = _from_line(line)
        except (KeyError, TypeError, ValueError) as error:
            damaged[number] = str(error)
    return runs, damaged


def append_runs(workdir: Path, runs: Iterable[Run]) -> None:
    """Append finished runs to a sweep's file; the caller holds the lock of the directory."""
    path = workdir / RUNS
    lines = _to_lines(runs)
    with name_errors(path), open(path, "a+b", opener=without_links) as file:
        file.seek(max(0, file.tell() - 1))
        torn = file.read() not in (b"", b"\n")  # by a process that died in the middle of a line
        file.write(b"\n" * torn + lines.encode())
        file.flush()
        os.fsync(file.fileno())


def drop_damaged_lines(workdir: Path) -> None:
    """Move damaged lines from a sweep's file to runs.jsonl.damaged; the caller holds its lock."""
    path = workdir / RUNS
    runs, damaged = _read_lines(path)
    if not damaged:
        return
    lines = read_bytes(path).splitlines(keepends=True)
    with open(workdir / f"{RUNS}.damaged", "ab", opener=without_links) as file:
        file.writelines(lines[number - 1] for number in damaged)
    write_text(path, _to_lines(runs.values()))


def runs_to_csv(runs: Iterable[Run]) -> str:
    """Return runs as the text of runs.csv, without the curves; missing values are empty."""
    rows = [run.row() for run in runs]
    left_out = ("curve",) if any(row["sources"] for row in rows) else ("curve", "sources")
    columns = [key for key in dict.fromkeys(itertools.chain(*rows)) if key not in left_out]
    return csv_table(columns, (row | {"sources": to_json(row["sources"])} for row in rows))


def runs_from_csv(path: Path) -> list[Run]:
    """Read the runs.csv of a published page; columns that earlier pages lack have defaults.

    Raises:
        UserError: the file is not such a table.
    """
    try:
        rows = csv.DictReader(io.StringIO(read_bytes(path).decode(), newline=""))
        return [_from_row(_values(row)) for row in rows]
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(
            f"{path} is not a table of runs: {type(error).__name__}: {short(str(error))}"
        ) from None


def _values(row: dict[str, str]) -> dict[str, Any]:
    """Return the values of a row of a table, in which an empty field has its default."""
    values = {key: csv_text(x) if key in _TEXTS else _value(x) for key, x in row.items()}
    empty = [key for key in _FIELDS if values.get(key, ...) is None]
    for key in empty:  # an empty tuned value is None
        del values[key]
    return values


def _from_row(row: dict[str, Any]) -> Run:
    """Return the run of a row; raises ValueError if a value is of a wrong type."""
    point = {key: value for key, value in row.items() if key not in _FIELDS}
    check_shape(row, _RUN)
    check_shape(point, {str: SCALAR})
    curve = tuple((step, float(loss)) for step, loss in row.get("curve", ()))
    sources = {name: float(loss) for name, loss in row.get("sources", {}).items()}
    fields = {key: row[key] for key in _FIELDS if key in row} | {"curve": curve, "sources": sources}
    return Run(point=point, **fields)


def _value(text: str) -> Any:
    """Return a value of a table: a number, a truth value, text, or None.

    >>> _value("0.008"), _value("True"), _value("muon"), _value("")
    (0.008, True, 'muon', None)
    """
    if text in ("True", "False"):
        return text == "True"
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return csv_text(text) or None


def losses_at_quarters(curve: Sequence[tuple[int, float]], steps: int) -> dict[str, float | None]:
    """Return the validation losses at a quarter, half and three quarters of a run of so many steps.

    They are covariates of the last loss. Sweeps evaluate there. In earlier runs they are interpolated
    between two evaluations; None where there is no evaluation on both sides.

    >>> losses_at_quarters([(2, 5.0), (4, 4.0), (8, 3.0)], 12)
    {'val_loss_25': 4.5, 'val_loss_50': 3.5, 'val_loss_75': None}
    """
    losses: dict[str, float | None] = {}
    at = [step for step, _ in curve]
    for percent in (25, 50, 75):
        step = steps * percent / 100
        loss = None
        if at and at[0] <= step <= at[-1]:
            loss = float(np.interp(step, at, [loss for _, loss in curve]))
        losses[f"val_loss_{percent}"] = loss
    return losses


def stuck_above(about: dict, split: str) -> float:
    """Return the loss on "validation" or "test" above which a run of a variant counts as stuck."""
    return STUCK * about["data"]["unigram"][split]


def outcomes_of(record: dict, runs: Iterable[Run], variant: str) -> dict[tuple, Outcome]:
    """Return the outcome of each point of a variant all of whose tuning runs are finished."""
    about = record["variants"][variant]
    seeds = about["tuning_seeds"]
    losses: dict[tuple, dict[int, float | None]] = {}
    for run in runs:
        if run.phase == "tuning" and run.variant == variant and run.seed in seeds:
            losses.setdefault(point_of(about, run), {})[run.seed] = run.val_loss
    limit = stuck_above(about, "validation")
    return {
        point: outcome([by_seed[seed] for seed in seeds], limit)
        for point, by_seed in losses.items()
        if len(by_seed) == len(seeds)
    }


def rule_of(record: dict) -> str:
    """Return how the values of a sweep are tuned: see `lm.sweeps.tuning`."""
    return record.get("design", VERTEX)


def choices_of(record: dict, runs: Iterable[Run], failed: Iterable[str] = ()) -> dict[str, Choice]:
    """Return by variant which values its tuning runs chose, or which points they lack.

    A variant that failed before its tuning was finished has no part in the shape of its cell.
    """
    by_variant: dict[str, list[Run]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, []).append(run)
    choices: dict[str, Choice] = {}
    for cell in record["cells"]:
        lists = {n: v["tune"] for n, v in record["variants"].items() if v["cell"] == cell}
        outcomes = {name: outcomes_of(record, by_variant.get(name, ()), name) for name in lists}
        shape = record.get("shapes", {}).get(cell)
        chosen = choose_in_cell(lists, outcomes, rule_of(record), shape)
        lost = {name: chosen[name] for name in failed if name in chosen and chosen[name].missing}
        if lost:
            lists = {name: of_variant for name, of_variant in lists.items() if name not in lost}
            chosen = choose_in_cell(lists, outcomes, rule_of(record), shape) | lost
        choices |= chosen
    return {name: choices[name] for name in record["variants"]}


def shapes_of(record: dict, runs: Iterable[Run]) -> dict[str, float]:
    """Return by cell the shape of the curves at whose vertices a finished sweep trained."""
    if rule_of(record) != CURVE:
        return {}
    choices = choices_of(record, runs)
    return {
        record["variants"][name]["cell"]: choice.shape
        for name, choice in choices.items()
        if choice.lines
    }


def errors_of(record: dict, choices: Mapping[str, Choice]) -> dict[str, Error]:
    """Return by variant the error of tuning in its mean loss."""
    errors: dict[str, Error] = {}
    for cell in record["cells"]:
        lines = {
            name: choice.lines
            for name, choice in choices.items()
            if record["variants"][name]["cell"] == cell
        }
        shapes = [choices[name].shape for name in lines if lines[name]]
        errors |= tuning_errors(lines, shapes[0] if shapes else 0.0, rule_of(record))
    return errors


def final_runs(
    record: dict, runs: Iterable[Run], variant: str, chosen: tuple | None
) -> dict[int, Run]:
    """Return a variant's finished runs at the chosen values by fresh seed, in their order."""
    about = record["variants"][variant]
    own = [run for run in runs if (run.phase, run.variant) == ("final", variant)]
    by_seed = {run.seed: run for run in own if point_of(about, run) == chosen}
    return {seed: by_seed[seed] for seed in about["seeds"] if seed in by_seed}


def point_of(about: dict, run: Run) -> tuple:
    """Return a run's tuned values in the order of its variant's lists."""
    return tuple(run.point[key] for key in about["tune"])
