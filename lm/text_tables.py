"""Tables in plain text and Markdown, numbers with their noun, and text that a terminal shows as it is."""

import re
from collections.abc import Sequence


def for_terminal(text: str) -> str:
    """Return a text in which control characters, which could change the terminal, are U+FFFD.

    A carriage return, as at the ends of Windows lines, is left out.

    >>> for_terminal("a" + chr(27) + "[2J b")
    'a\ufffd[2J b'
    >>> for_terminal("two" + chr(13) + chr(10) + "lines").splitlines()
    ['two', 'lines']
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text.replace("\r", ""))


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Align the columns of a table, whose first row is the header; those of `right` (numbers) on the right.

    >>> print(table([("name", "size"), ("embedding", "8"), ("head", "1,024")], right=[1]))
    name        size
    embedding      8
    head       1,024
    """
    rows = [[for_terminal(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def aligned(row) -> str:
        cells = zip(row, widths, range(len(widths)), strict=True)
        return "  ".join(cell.rjust(width) if i in right else cell.ljust(width) for cell, width, i in cells).rstrip()

    return "\n".join(map(aligned, rows))


def shortened(text: str, width: int) -> str:
    """Return a text without its middle if it is wider; the end tells names apart, and has more of the width.

    >>> shortened("shakespeare-20261128-043012", 16)
    'shake…128-043012'
    """
    head = (width - 1) // 3
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def plural(n: int, noun: str) -> str:
    """Return a number and its noun.

    >>> plural(1, "run"), plural(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{n:,} {noun}{'s' * (n != 1)}"


def some(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names, and how many there are beside them.

    >>> some(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; a "|" in a cell is escaped.

    >>> print(markdown_table(["variant", "loss"], [["a|b", "1.88"]]))
    | variant | loss |
    | --- | --- |
    | a\\|b | 1.88 |
    """
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
