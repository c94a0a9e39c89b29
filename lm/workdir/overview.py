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
        return iter_metrics(self.path / "metrics.jsonl")

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
    config = flatten(saved.config)
    name = config.pop("name", "")
    config.pop("notes", None)
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
    if summary.get("steps") != last:  # it was extended: the summary is of its earlier end
        goodput = None
    return Overview(
        path=path,
        name=name,
        config=config,
        data=saved.data,
        parameters=n_parameters,
        status=_status(saved, last, is_locked(path)),
        steps=last,
        best=("", "") if step is None or loss is None else (f"{float(loss):.4f}", f"{step:,}"),
        goodput=None if goodput is None else float(goodput),
    )


def _status(saved: SavedRun, last: int, is_in_use: bool) -> str:
    planned = saved.config["train"]["steps"]
    if is_in_use:
        return "running"
    if saved.finished_at == planned:
        return "finished"
    if saved.data and saved.data["name"].startswith(WEIGHTS_OF):
        return "imported"
    how = "stopped"
    if saved.summary.get("steps", -1) >= last:  # else it was resumed, and killed
        ends = {"stopped": "ended early", "nonfinite": "not finite"}
        how = ends.get(saved.summary["status"], how)
    return f"{how} at {last:,} of {planned:,}"


def differing_keys(configs: Sequence[dict]) -> list[str]:
    """Return the keys whose values differ or that some configs lack, sorted.

    >>> differing_keys([{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3}])
    ['b', 'c']
    """
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({repr(config.get(key, "absent")) for config in configs}) > 1]


def texts(data: Sequence[dict | None]) -> list[str]:
    """Return the name of each run's text, with a fingerprint where several have the name.

    `data` has `Overview.data` of each run. A name ends in "(fallback)" if the text of the config
    could not be read.

    >>> a, b = ({"name": "text:novel.txt", "fingerprint": digit * 64} for digit in "ab")
    >>> texts([a, a, None]), texts([a, b])
    (['text:novel.txt', 'text:novel.txt', 'not known'], ['text:novel.txt aaaaaaaa', 'text:novel.txt bbbbbbbb'])
    """
    of_name: dict[str, set[str]] = {}
    for known in filter(None, data):
        of_name.setdefault(known["name"], set()).add(known["fingerprint"])

    def shown(text: dict | None) -> str:
        if text is None:
            return "not known"
        several = len(of_name[text["name"]]) > 1
        return f"{text['name']} {text['fingerprint'][:8]}" if several else text["name"]

    return list(map(shown, data))


def are_comparable(data: Sequence[dict | None]) -> bool:
    """Return whether the losses of runs are of the same tokens; `data` as for `texts`. Imported
    models have no losses.

    >>> text = {"name": "text:novel.txt", "fingerprint": "a" * 64}
    >>> are_comparable([text, text]), are_comparable([text, text | {"fingerprint": "b" * 64}])
    (True, False)
    """
    trained = [text for text in data if text is None or not text["name"].startswith(WEIGHTS_OF)]
    return len({text and text["fingerprint"] for text in trained}) <= 1
