"""The logs of records, the test of their mean loss, and the reasons why a result is not a record."""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.speedrun.tracks import CORES, MIN_RUNS, TRACKS, P
from lm.files import write_text

RECORDS = Path(__file__).parent / "records"


def read_attempts(path: Path) -> list[dict]:
    """Return the attempts that a log lists, the oldest first; none if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def append_attempt(path: Path, attempt: dict) -> None:
    """Append an attempt to a log: a JSON list with one line for each attempt."""
    lines = ",\n".join(json.dumps(found, ensure_ascii=False) for found in [*read_attempts(path), attempt])
    write_text(path, f"[\n{lines}\n]\n")


def p_value(losses: list[float], target: float) -> float:
    """Return the p-value of a one-sided t test: the chance of a mean loss this low if the true mean is the target.

    It is nan for a single loss, and for equal losses, which have no error.

    >>> round(p_value([1.86, 1.87, 1.85], 1.88), 4)
    0.0371
    """
    if len(losses) < 2 or np.ptp(losses) == 0:
        return math.nan
    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def column(attempt: dict, key: str) -> list[float]:
    """Return a value of each run, such as "loss", "cpu" or "wall"."""
    return [run[key] for run in attempt["runs"]]


def seconds(attempt: dict) -> float:
    """Return the mean seconds of the runs on the clock of the track."""
    return statistics.mean(column(attempt, TRACKS[attempt["track"]].clock))


def problems(attempt: dict, tuning: list[dict]) -> Iterator[str]:
    """Yield the reasons why an attempt on the scored text is not a record.

    Args:
        attempt: as benchmarks/speedrun/__main__.py writes it.
        tuning: the attempts on the tuning text.
    """
    track, machine = TRACKS[attempt["track"]], attempt["machine"]
    if not (p := p_value(column(attempt, "loss"), track.target)) < P:
        yield f"p = {p:.2g}, not below {P}"
    if (n := len(attempt["runs"])) < MIN_RUNS:
        yield f"{n} runs, fewer than {MIN_RUNS}"
    if column(attempt, "seed") != list(range(n)):
        yield "seeds are not 0, 1, 2, ..."
    if track.wall_limit and (longest := max(column(attempt, "wall"))) > track.wall_limit:
        yield f"a run took {longest:.0f} s, more than {track.wall_limit:.0f}"
    if machine["cores_used"] != CORES:
        yield f"{machine['cores_used']} cores, not {CORES}"
    if attempt["overrides"]:
        yield "values of the config were overridden"
    if not machine["git"] or machine["git"]["dirty"]:
        yield "not of a commit"
    if attempt["caveat"]:
        yield attempt["caveat"]
    if not any(but_length(attempt["config"]) == but_length(other["config"]) for other in tuning):
        yield "not tuned on the tuning text"


def but_length(config: dict) -> dict:
    """Return a config without the number of steps, the only value that the scored text may decide."""
    return {name: value for name, value in config.items() if name != "train.steps"}
