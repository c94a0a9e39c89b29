"""What tables of runs show: the config of a run, its status, and its losses."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm.config import flatten
from lm.system.errors import UserError
from lm.system.files import files_below
from lm.system.locks import is_locked
from lm.workdir.metrics import best_step, iter_metrics, read_evaluations, validation_losses
from lm.workdir.saved_run import WEIGHTS_OF, SavedRun, count_parameters, read_run


@dataclasses.dataclass(frozen=True)
class Overview:
    """A run."""

    path: Path
    name: str  # of its config
    config: dict[str, Any]  # by dotted name, without name and notes
    # {"name", "fingerprint"} of the text that it was really trained on; None: not known
    data: dict[str, str] | None
    parameters: int | None  # None: not known
    status: str  # "running", "finished", "imported", or where and how it stopped
    steps: int  # the last one in the metrics
    best: tuple[str, str]  # the best validation loss and its step as text; empty if there is none
    goodput: float | None  # the share of its wall time in steps; None: no summary says it

    @property
    def metrics(self) -> Iterator[dict]:
        """Return the lines of metrics.jsonl, one at a time, from the first on."""
        path = self.path / "metrics.jsonl"
        return iter_metrics(path) if path.exists() else iter(())

    @property
    def size(self) -> int:
        """Return the bytes of all its files, without what links lead to."""
        return sum(file.stat().st_size for file in files_below(self.path, follow=False))


def read_overview(path: Path) -> Overview:
    """Read a run: of one that is finished the summary, of others also the evaluations in its
    metrics.

    Raises:
        UserError: the directory holds no run, or a file in it is damaged.
        OSError: a file cannot be read.
    """
    saved = read_run(path)
    if saved.damage:
        raise UserError(saved.damage)
    config = {
        key: value for key, value in flatten(saved.config).items() if key not in ("name", "notes")
    }
    planned = config["train.steps"]
    summary = saved.summary
    if saved.finished_at == planned and "best_step" in summary:
        last = planned
        step = summary["best_step"]
        loss = summary.get("best_val_loss")
    else:
        lines, last = read_evaluations(path / "metrics.jsonl")
        losses = validation_losses(lines)
        step = best_step(losses, losses)
        loss = None if step is None else losses[step]
    n_parameters = summary.get("n_params")
    if n_parameters is None and saved.newest_checkpoint is not None:
        n_parameters = count_parameters(path, saved.newest_checkpoint)
    goodput = summary.get("goodput", {}).get("steps")
    return Overview(
        path,
        saved.config.get("name", ""),
        config,
        saved.data,
        n_parameters,
        _status(saved, last, is_locked(path)),
        last,
        ("", "") if step is None or loss is None else (f"{float(loss):.4f}", f"{step:,}"),
        # The summary of a run that was extended is of its earlier end.
        float(goodput) if goodput is not None and summary.get("steps") == last else None,
    )


def _status(saved: SavedRun, last: int, is_in_use: bool) -> str:
    planned = saved.config["train"]["steps"]
    if is_in_use:
        return "running"
    if saved.finished_at == planned:
        return "finished"
    if saved.data and saved.data["name"].startswith(WEIGHTS_OF):
        return "imported"
    is_its_end = saved.summary.get("steps", -1) >= last  # else it was resumed, and killed
    how = {"stopped": "ended early", "nonfinite": "not finite"}.get(
        saved.summary.get("status", "") * is_its_end
    )
    return f"{how or 'stopped'} at {last:,} of {planned:,}"


def differing_keys(configs: Sequence[dict]) -> list[str]:
    """Return the keys whose values differ or that some configs lack, sorted.

    >>> differing_keys([{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3}])
    ['b', 'c']
    """
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({repr(config.get(key, "absent")) for config in configs}) > 1]


def texts(data: Sequence[dict | None]) -> list[str]:
    """Return the name of each run's text; of different texts with one name, with the start of the
    fingerprint.

    `data` has `Overview.data` of each run. A name ends in "(fallback)" if the text of the config
    could not be read.

    >>> a, b = ({"name": "text:novel.txt", "fingerprint": digit * 64} for digit in "ab")
    >>> texts([a, a, None]), texts([a, b])
    (['text:novel.txt', 'text:novel.txt', 'not known'], ['text:novel.txt aaaaaaaa', 'text:novel.txt bbbbbbbb'])
    """
    of_name: dict[str, set[str]] = {}
    for known in filter(None, data):
        of_name.setdefault(known["name"], set()).add(known["fingerprint"])
    found = []
    for text in data:
        name = text["name"] if text else "not known"
        several = text is not None and len(of_name[name]) > 1
        found.append(f"{name} {text['fingerprint'][:8]}" if text and several else name)
    return found


def are_comparable(data: Sequence[dict | None]) -> bool:
    """Return whether the losses of runs are of the same tokens; `data` as for `texts`. Imported
    models have no losses.

    >>> text = {"name": "text:novel.txt", "fingerprint": "a" * 64}
    >>> are_comparable([text, text]), are_comparable([text, text | {"fingerprint": "b" * 64}])
    (True, False)
    """
    trained = [text for text in data if text is None or not text["name"].startswith(WEIGHTS_OF)]
    return len({text and text["fingerprint"] for text in trained}) <= 1
