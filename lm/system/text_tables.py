"""Tables in plain text, Markdown and CSV, HTML pages, and text that a terminal shows."""

import base64
import csv
import hashlib
import html
import io
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

# Controls but tab and newline; what changes the direction of the text after it; line ends of other
# systems.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# what makes a cell a formula, and what is escaped so
_FORMULA = re.compile("'*[=+@\t\r\n\uff1d\uff0b\uff0d\uff20-]")


def for_terminal(text: str) -> str:
    """Return a text in which characters that could change a terminal or its text are U+FFFD.

    A carriage return, as at the ends of Windows lines, is left out.

    >>> for_terminal("a" + chr(27) + "[2J b")
    'a\ufffd[2J b'
    >>> for_terminal("two" + chr(13) + chr(10) + "lines").splitlines()
    ['two', 'lines']
    """
    return _UNSAFE.sub("\ufffd", text.replace("\r", ""))


# In a URL: the user and password, also one with a slash; and what follows "?", such as a token or a
# signature.
_USER = re.compile(
    r"""([a-z][a-z0-9+.-]*://)(?:[^/\s"'<>]*|[^/\s"'<>:@]*:(?!\d{1,5}/)[^\s"'<>]*)@""",
    re.IGNORECASE,
)
_QUERY = re.compile(
    r"""([a-z][a-z0-9+.-]*://[^\s"'<>?#]*)(\?|#(?=[^\s"'<>]*=))[^\s"'<>]*?(?=[,;:.)\]]*(?:[\s"'<>]|$))""",
    re.IGNORECASE,
)
SECRET = "***"


def without_secrets(value: Any) -> Any:
    """Return a text, or the texts in lists and dicts, without what may be a secret in URLs.

    >>> without_secrets("https://host/a#token=1f2e and https://host/a#section")
    'https://host/a#*** and https://host/a#section'
    >>> without_secrets(["s3://key:secret@bucket/a.txt", "https://host/a?sig=1f2e: no answer", "who? me@home"])
    ['s3://***@bucket/a.txt', 'https://host/a?***: no answer', 'who? me@home']
    """
    if isinstance(value, str) and "://" in value:
        return _QUERY.sub(rf"\1\2{SECRET}", _USER.sub(rf"\1{SECRET}@", value))
    if isinstance(value, dict):
        return {key: without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_secrets, value))
    return value


def message(text: str) -> str:
    """Return text for the user as it is shown (`for_terminal`), without secrets in URLs."""
    return for_terminal(without_secrets(text))


def say(text: str, file: TextIO | None = None) -> None:
    """Print lines for the user, which may have names that somebody else has chosen."""
    print(message(text), file=file, flush=True)


def write(text: str) -> None:
    """Write a result to standard output as it is, or to a terminal as `for_terminal` returns it."""
    print(for_terminal(text) if sys.stdout.isatty() else text, end="", flush=True)


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Align the columns of a table, whose first row is the header; those of `right` (numbers) on
    the right.

    >>> print(table([("name", "size"), ("embedding", "8"), ("head", "1,024")], right=[1]))
    name        size
    embedding      8
    head       1,024
    """
    rows = [[message(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def aligned(row) -> str:
        cells = zip(row, widths, range(len(widths)), strict=True)
        return "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width) for cell, width, i in cells
        ).rstrip()

    return "\n".join(map(aligned, rows))


def shortened(text: str, width: int) -> str:
    """Return a text without its middle if it is wider; the end tells names apart, and has more of
    the width.

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
    return ", ".join(names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )


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


def csv_table(
    columns: Sequence[str], rows: Iterable[dict[str, Any]], digits: int | None = None
) -> str:
    """Return CSV in which no text is a formula of a spreadsheet: "'" precedes what could begin one,
    see `csv_text`.

    Floats have so many significant digits; None: all.

    >>> print(csv_table(["name", "loss"], [{"name": "=1+1", "loss": -0.5, "seed": 1}]).strip())
    name,loss
    '=1+1,-0.5
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
    writer.writerow({key: _cell(key, digits) for key in columns})
    writer.writerows({key: _cell(value, digits) for key, value in row.items()} for row in rows)
    return file.getvalue()


def _cell(value: Any, digits: int | None) -> Any:
    if isinstance(value, float) and digits:
        return f"{value:.{digits}g}"
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def csv_text(cell: str) -> str:
    """Return the text of a cell of `csv_table`.

    >>> csv_text("'=1+1"), csv_text("'tis")
    ('=1+1', "'tis")
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def html_page(title: str, style: str, body: str, script: str = "") -> str:
    """Return a page that needs no other file, and whose policy lets a browser load none and run
    only this script.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    policy = (
        f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data:; base-uri "
        "'none'; form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(for_terminal(title))}</title><style>{style}</style></head><body>\n{body}\n"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )
