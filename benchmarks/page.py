"""A page of docs/results that one command makes: its table, its picture, and what repeats it."""

import time
from pathlib import Path

from benchmarks.compare import markdown
from lm.files import write_text
from lm.sweeps.tables import code
from lm.training.workdir import describe_start


def publish(directory: Path, name: str, about: str, commands: list[str], table: list[list[str]], figure) -> None:
    """Write NAME.md and NAME.png; `about` is what the page says above the table, `commands` are in their order."""
    directory.mkdir(parents=True, exist_ok=True)
    here = describe_start()
    parts = [
        f"# {name}",
        about,
        markdown(table[0], table[1:]),
        f"![{name}]({name}.png)",
        "To repeat it:",
        "```",
        *commands,
        *code(here),
        f"{here['processor']}, {time.strftime('%Y-%m-%d')}",
        "```",
    ]
    text = "\n\n".join(parts[:5]) + "\n\n" + "\n".join(parts[5:]) + "\n"
    write_text(directory / f"{name}.md", text)
    figure.savefig(directory / f"{name}.png", dpi=110, bbox_inches="tight")
    print(directory / f"{name}.md")
