"""What tables of runs show: the config of a run, its status, and its losses."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.config import flatten
from lm.files import files_below
from lm.workdir.metrics import best_step, read_metrics, validation_losses
from lm.workdir.saved_run import WEIGHTS_OF, read_run


@dataclasses.dataclass(frozen=True)
class Overview:
    """A run."""

    path: Path
    config: dict[str, Any]  # by dotted name, without name and notes
    status: str  # that of its summary, or "not finished"
    steps: int  # the last one in the metrics
    best: tuple[str, str]  # the best validation loss and its step as text; empty if there is none
    goodput: float | None  # the share of its wall time in steps; None: no summary says it
    metrics: list[dict]  # the lines of metrics.jsonl
    size: int  # bytes of all its files, without what links lead to
    data: dict[str, str] | None  # {"name", "fingerprint"} of the text that it was really trained on; None: not known


def read_overview(path: Path) -> Overview:
    """Read a run.

    Raises:
        UserError: the directory holds no run, or a file in it is damaged.
        OSError: a file cannot be read.
    """
    saved = read_run(path)
    config = {key: value for key, value in flatten(saved.config).items() if key not in ("name", "notes")}
    lines = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    losses = validation_losses(lines)
    step = best_step(losses, losses)
    best = ("", "") if step is None else (f"{losses[step]:.4f}", f"{step:,}")
    # The summary of a run that is being extended is of its earlier end.
    summary = saved.summary if saved.finished_at in (None, config["train.steps"]) else {}
    status, goodput = summary.get("status", "not finished"), summary.get("goodput", {}).get("steps")
    size = sum(file.stat().st_size for file in files_below(path, follow=False))
    last = max((x["step"] for x in lines), default=0)
    return Overview(path, config, status, last, best, goodput, lines, size, saved.data)


def differing_keys(configs: Sequence[dict]) -> list[str]:
    """Return the keys whose values differ or that some configs lack, sorted.

    >>> differing_keys([{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3}])
    ['b', 'c']
    """
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({repr(config.get(key, "absent")) for config in configs}) > 1]


def texts(data: Sequence[dict | None]) -> list[str]:
    """Return the name of each run's text; of different texts with one name, with the start of the fingerprint.

    `data` has `Overview.data` of each run. A name ends in "(fallback)" if the text of the config could not be read.

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
    """Return whether the losses of runs are of the same tokens; `data` as for `texts`. Imported models have no losses.

    >>> text = {"name": "text:novel.txt", "fingerprint": "a" * 64}
    >>> are_comparable([text, text]), are_comparable([text, text | {"fingerprint": "b" * 64}])
    (True, False)
    """
    trained = [text for text in data if text is None or not text["name"].startswith(WEIGHTS_OF)]
    return len({text and text["fingerprint"] for text in trained}) <= 1
