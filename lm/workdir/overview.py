"""What tables of runs show: the config of a run, its status, and its losses."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.config import flatten
from lm.errors import UserError
from lm.files import files_below, read_json
from lm.workdir.metrics import best_step, read_metrics, validation_losses
from lm.workdir.saved_run import read_run


@dataclasses.dataclass(frozen=True)
class Overview:
    """A run.

    Attributes:
        path: its directory.
        config: its config by dotted name, without name and notes.
        status: that of its summary, or "not finished".
        goodput: the share of its wall time in steps; None: no summary says it.
        metrics: the lines of metrics.jsonl.
        size: bytes of all its files.
    """

    path: Path
    config: dict[str, Any]
    status: str
    goodput: float | None
    metrics: list[dict]
    size: int

    @property
    def steps(self) -> int:
        """Return the last step of the metrics."""
        return max((line["step"] for line in self.metrics), default=0)

    @property
    def best(self) -> tuple[str, str]:
        """Return the best validation loss and its step as text; empty if there is none."""
        losses = validation_losses(self.metrics)
        step = best_step(losses, losses)
        return ("", "") if step is None else (f"{losses[step]:.4f}", f"{step:,}")


def read_overview(path: Path) -> Overview:
    """Read a run.

    Raises:
        UserError: the directory holds no run, or a file in it is damaged.
        OSError: a file cannot be read.
    """
    config = {key: value for key, value in flatten(read_run(path).config).items() if key not in ("name", "notes")}
    metrics, status, goodput = path / "metrics.jsonl", "not finished", None
    with contextlib.suppress(OSError, UserError):
        status = read_json(path / "summary.json", {"status": str})["status"]
        goodput = read_json(path / "summary.json", {"goodput": {"steps": float}})["goodput"]["steps"]
    size = sum(file.stat().st_size for file in files_below(path) if file.exists())
    return Overview(path, config, status, goodput, read_metrics(metrics) if metrics.exists() else [], size)


def differing_keys(configs: Sequence[dict]) -> list[str]:
    """Return the keys whose values differ or that some configs lack, sorted.

    >>> differing_keys([{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3}])
    ['b', 'c']
    """
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({repr(config.get(key, "absent")) for config in configs}) > 1]
