"""The validation losses by step, which decide the best checkpoint: workdir/val_losses.json.

They may be known before or after a checkpoint is saved.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from lm.errors import UserError
from lm.files import COUNT, read_json, to_json, write_text
from lm.workdir.metrics import read_metrics

FILE = "val_losses.json"


def read_val_losses(workdir: Path, say: Callable[[str], None]) -> tuple[dict[int, float], bool]:
    """Return the validation losses by step, and whether they are complete.

    If the file is damaged or missing, the losses are those in the run's metrics. These are incomplete if the metrics
    are damaged or missing too, or if evaluations have `batches`: the one of the last step is not in the metrics then.
    """
    path, damaged, stored = workdir / FILE, False, {}
    try:
        stored = {int(step): float(loss) for step, loss in read_json(path, {str: float}).items()}
    except FileNotFoundError:
        pass
    except (UserError, ValueError):
        damaged = True
    try:
        lines = read_metrics(workdir / "metrics.jsonl")
    except (FileNotFoundError, UserError):
        lines = []
    evaluations = [line for line in lines if line.get("split") == "validation" and isinstance(line.get("loss"), float)]
    measure = next((line["batches"] for line in reversed(evaluations) if "batches" in line), _max_batches(workdir))
    losses = {line["step"]: line["loss"] for line in evaluations if line.get("batches", 0) == measure}
    losses = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    # A changed digit leaves valid JSON: compare with the metrics.
    not_evaluated = {line["step"] for line in lines} - {line["step"] for line in evaluations}
    changed = any(stored.get(step, loss) != loss for step, loss in losses.items()) or stored.keys() & not_evaluated
    if stored and not changed:
        return losses | stored, True
    if damaged or changed:
        say(f"WARNING: {path} is corrupted; {len(losses)} validation losses were read from metrics.jsonl instead")
    return losses, bool(lines) and not measure and not (damaged and not losses)


def _max_batches(workdir: Path) -> int:
    """Return the number of batches per evaluation in the config of a run; 0 if the config cannot be read."""
    with contextlib.suppress(FileNotFoundError, UserError):
        return read_json(workdir / "config.json", {"eval": {"max_batches": COUNT}})["eval"]["max_batches"]
    return 0


def write_val_losses(workdir: Path, val_losses: dict[int, float]) -> None:
    """Replace val_losses.json."""
    write_text(workdir / FILE, to_json(val_losses) + "\n")


def best_step(steps: Iterable[int], val_losses: dict[int, float]) -> int | None:
    """Return the step with the smallest validation loss, the first of equal ones; None if no step was evaluated.

    >>> best_step([100, 200, 300], {100: 2.5, 200: 2.25, 300: 2.25})
    200
    """
    return min((step for step in sorted(steps) if step in val_losses), key=val_losses.__getitem__, default=None)
