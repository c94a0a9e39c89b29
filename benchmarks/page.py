"""Pages that a command writes: all of one, or the part of it between two marks."""

import csv
import time
from pathlib import Path

from lm.system.errors import UserError
from lm.system.files import write_text
from lm.system.text_tables import markdown_table
from lm.workdir.provenance import describe_start


def marked(page: Path, mark: str) -> tuple[str, str, str]:
    """Split a page at the lines <!-- MARK --> and <!-- end --> into three parts."""
    begin = f"<!-- {mark} -->\n"
    end = "<!-- end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    inside, found, after = rest.partition(end)
    if not found:
        raise UserError(
            f"{page} has no lines {begin.strip()} and {end}; add them where the table should be"
        )
    return before + begin, inside, end + after


def rows_of(path: Path) -> list[dict]:
    """Return the rows of a CSV file, whose values are text."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def fill(page: Path, mark: str, text: str) -> None:
    """Replace what a page has between two marks; raises UserError if it has no such lines."""
    before, _, after = marked(page, mark)
    write_text(page, f"{before}{text}\n{after}")


def publish(
    directory: str | None,
    name: str,
    about: str,
    commands: list[str],
    table: list[list[str]],
    figure,
) -> None:
    """Print a table, header first, and write a page and figure if a directory is given.

    The page has a text about the table, the commands that reproduce it, and the Matplotlib figure
    of figure().
    """
    from lm.sweeps.report import code_lines

    text = markdown_table(table[0], table[1:])
    print(text)
    if directory is None:
        return
    target = Path(directory)
    here = describe_start()
    target.mkdir(parents=True, exist_ok=True)
    made = "\n".join(
        [*commands, *code_lines(here), f"{here['processor']}, {time.strftime('%Y-%m-%d')}"]
    )
    parts = [
        f"# {name}",
        about,
        text,
        f"![{name}]({name}.png)",
        "To reproduce it:",
        f"```\n{made}\n```",
    ]
    write_text(target / f"{name}.md", "\n\n".join(parts) + "\n")
    figure().savefig(target / f"{name}.png", dpi=110, bbox_inches="tight")
    print(target / f"{name}.md")
