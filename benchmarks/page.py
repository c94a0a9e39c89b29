"""Pages of docs/results that a single command writes: a table, a picture, and the commands that reproduce them."""

import time
from pathlib import Path

from lm.files import write_text
from lm.sweeps.report import code_lines
from lm.text_tables import markdown_table
from lm.workdir.provenance import describe_start


def publish(directory: Path, name: str, about: str, commands: list[str], table: list[list[str]], figure) -> None:
    """Write NAME.md and NAME.png into a directory.

    Args:
        directory: created if missing.
        name: of both files, and title of the page.
        about: text above the table.
        commands: that reproduce the page, in order.
        table: header and rows.
        figure: Matplotlib figure.
    """
    directory.mkdir(parents=True, exist_ok=True)
    here = describe_start()
    parts = [
        f"# {name}",
        about,
        markdown_table(table[0], table[1:]),
        f"![{name}]({name}.png)",
        "To reproduce it:",
        "```",
        *commands,
        *code_lines(here),
        f"{here['processor']}, {time.strftime('%Y-%m-%d')}",
        "```",
    ]
    text = "\n\n".join(parts[:5]) + "\n\n" + "\n".join(parts[5:]) + "\n"
    write_text(directory / f"{name}.md", text)
    figure.savefig(directory / f"{name}.png", dpi=110, bbox_inches="tight")
    print(directory / f"{name}.md")
