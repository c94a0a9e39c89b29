"""A page of docs/results that one command makes: its table, its picture, and what repeats it."""

import time
from pathlib import Path

from lm.files import write_text
from lm.runs import git_state, processor, versions


def publish(directory: Path, name: str, about: str, commands: list[str], table: list[list[str]], figure) -> None:
    """Write NAME.md and NAME.png; `about` is what the page says above the table, `commands` are in their order."""
    directory.mkdir(parents=True, exist_ok=True)
    git = git_state() or {"commit": "unknown", "dirty": False}
    made = ", ".join(f"{package} {version}" for package, version in versions().items() if version)
    parts = [
        f"# {name}",
        about,
        markdown(table),
        f"![{name}]({name}.png)",
        "To repeat it:",
        "```",
        *commands,
        f"commit {git['commit']}{' with uncommitted changes' if git['dirty'] else ''}",
        f"versions {made}",
        f"{processor()}, {time.strftime('%Y-%m-%d')}",
        "```",
    ]
    text = "\n\n".join(parts[:5]) + "\n\n" + "\n".join(parts[5:]) + "\n"
    write_text(directory / f"{name}.md", text)
    figure.savefig(directory / f"{name}.png", dpi=110, bbox_inches="tight")
    print(directory / f"{name}.md")


def markdown(rows: list[list[str]]) -> str:
    """A table of which the first row is the heading."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
