"""Tables of docs/performance.md from the lines of results.jsonl."""

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare import where_and_when
from lm.cost.units import si
from lm.system.text_tables import markdown_table


def tables(path: Path) -> str:
    """Return a Markdown table of each item that has results, and where they were measured."""
    rows: dict[str, list[dict]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.setdefault(row["item"], []).append(row)
    parts = [make(rows[item]) for item, make in TABLES.items() if item in rows]
    parts.append(where_and_when(rows["machine"][-1]))
    return "\n\n".join(parts)


def speed(rows: list[dict]) -> str:
    header = [
        "variant",
        "ms a step",
        "range",
        "tokens/s",
        "MFU",
        "MFU, full square",
        "memory",
        "MHz",
    ]
    cells = []
    for row in rows:
        if "error" in row:
            cells.append([row["name"], last_line(row["error"]), *[""] * 6])
            continue
        rounds = row["rounds"]
        cells.append([
            row["name"],
            f"{row['ms']:.2f}",
            f"{min(rounds):.2f} to {max(rounds):.2f}",
            f"{row['tokens_per_second']:,.0f}",
            percent(row["mfu"]),
            percent(row["mfu_full_square"]),
            si(row["peak_bytes"], "B"),
            f"{row['clock_mhz']:.0f}" if "clock_mhz" in row else "",
        ])  # fmt: skip
    return markdown_table(header, cells)


def profile(rows: list[dict]) -> str:
    last = rows[-1]
    return "\n".join(
        [f"Profile of {last['name']}:", "", *(f"    {line}" for line in last["lines"])]
    )


def tests(rows: list[dict]) -> str:
    last = rows[-1]
    text = (
        f"Tests: {last['passed']} passed, {last['skipped']} were skipped, {last['failed']} failed, "
        f"{last['running']} did not end; {'all ran' if last['finished'] else 'the time was up'}."
    )
    names = [*last["names"], *(f"{name} did not end" for name in last["unfinished"])]
    return "\n".join([text, *([""] if names else []), *(f"    {name}" for name in names)])


def exact(rows: list[dict]) -> str:
    header = ["check", "result"]
    cells = []
    for row in rows:
        result = "; ".join(row.get("differences", [])) or "equal bits"
        if "largest_difference" in row:
            result = f"largest difference from the CPU {row['largest_difference']:.1e}"
        cells.append([row["name"], result])
    return markdown_table(header, cells)


def stacked(rows: list[dict]) -> str:
    header = ["in one program", "parameters", "tokens/s", "largest difference of a loss"]
    cells = [
        [
            row["name"],
            f"{row['parameters']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['largest_difference']:.1e}" if "largest_difference" in row else "",
        ]
        for row in rows
    ]
    return markdown_table(header, cells)


def decoding(rows: list[dict]) -> str:
    cells = [
        [row["name"], last_line(row["error"]) if "error" in row else f"{row['tokens_per_second']:,.0f}"]
        for row in rows
    ]  # fmt: skip
    return markdown_table(["side", "tokens/s"], cells)


def memory(rows: list[dict]) -> str:
    header = ["shape", "memory: plan", "compiler", "peak", "tokens/s"]
    cells = []
    for row in rows:
        if "error" in row:
            cells.append([row["name"], last_line(row["error"]), "", "", ""])
            continue
        sizes = [si(row[f"{name}_bytes"], "B") for name in ("planned", "program", "peak")]
        cells.append([row["name"], *sizes, f"{row['tokens_per_second']:,.0f}"])
    return markdown_table(header, cells)


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:80]


TABLES: dict[str, Callable[[list[dict]], str]] = {
    "speed": speed,
    "profile": profile,
    "tests": tests,
    "exact": exact,
    "stacked": stacked,
    "decoding": decoding,
    "memory": memory,
}
