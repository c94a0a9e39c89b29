"""Write the tables of README.md from the logs of the records: python3 -m benchmarks.speedrun.table"""

import ast
import statistics
import sys
from pathlib import Path

from benchmarks.page import fill
from benchmarks.speedrun.records import RECORDS, column, p_value, problems, read_attempts, seconds
from benchmarks.speedrun.tracks import TRACKS
from lm.text_tables import markdown_table

PAGE = Path(__file__).with_name("README.md")
HEADER = [
    "config", "what", "CPU s", "wall s", "load", "mean loss (range)", "runs", "p", "steps", "attempts", "date",
    "processor", "a record",
]  # fmt: skip


def update() -> None:
    """Rewrite the table of each track in README.md."""
    for name in TRACKS:
        fill(PAGE, name, track_table(name))


def track_table(track: str, directory: Path = RECORDS) -> str:
    """Return the table of a track: the last attempt of each record, the fastest first."""
    found = []
    for log in directory.glob("*/log.json"):
        attempts = read_attempts(log)
        if attempts[-1]["track"] == track:
            found.append((seconds(attempts[-1]), log.parent, attempts))
    rows = [row(folder, attempts) for _, folder, attempts in sorted(found)]
    return markdown_table(HEADER, rows) if rows else "None yet."


def row(folder: Path, attempts: list[dict]) -> list[str]:
    """Return the cells of a record's row, in the order of HEADER.

    Args:
        folder: the directory of the record, with config.py and tuning.json.
        attempts: its log; the row shows the last attempt.
    """
    attempt = attempts[-1]
    losses, tuning = column(attempt, "loss"), read_attempts(folder / "tuning.json")
    reasons = "; ".join(problems(attempt, tuning))
    return [
        f"[{folder.name}](records/{folder.name}/config.py)",
        ast.get_docstring(ast.parse((folder / "config.py").read_text(encoding="utf-8"))).split("\n")[0].rstrip("."),
        *(f"{statistics.mean(column(attempt, key)):.1f}" for key in ("cpu", "wall", "load")),
        f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})",
        str(len(losses)),
        f"{p_value(losses, TRACKS[attempt['track']].target):.2g}",
        f"{attempt['config']['train.steps']:,}",
        str(len(attempts)),
        attempt["machine"]["date"],
        attempt["machine"]["cpu"].split(" (")[0],
        f"no: {reasons}" if reasons else "yes",
    ]


if __name__ == "__main__":
    sys.exit(update())
