"""Write the report of a sweep as Markdown, as one self-contained HTML page, and as CSV files.

The HTML is written by hand: a template engine would be one more dependency for one page.
"""

import base64
import html
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from lm.config import flatten
from lm.errors import UserError
from lm.files import write_text
from lm.sweeps.analysis.claims import claim_rows
from lm.sweeps.analysis.outcomes import Analysis
from lm.sweeps.report import cost_tables, rate_tables, search_tables, tables
from lm.sweeps.report.exponents_table import exponents_table
from lm.sweeps.report.interaction_table import interaction_table
from lm.sweeps.report.savings_table import savings_table
from lm.sweeps.report.tables import Table
from lm.text_tables import markdown_table

CAPTIONS = {
    "differences": "Difference in test loss of each comparison, paired by seed. Dots: means; thick bars: 95 % "
    "intervals, each for its comparison alone; thin bars: simultaneous 95 % intervals, which all hold at once "
    "(Bonferroni); gray ticks: single seeds. Shaded: the margin. Left of 0 the first variant is better. An arrow marks "
    "an interval that leaves the axis; the numbers of the thick bar are above it.",
    "curves": "Validation loss during training at the best learning rate, mean over seeds. Bands: 95 % intervals over "
    "seeds, in panels of at most 5 variants; with two seeds, thin lines: the single runs. Dotted: the unigram "
    "baseline, if within the axis.",
    "learning_rates": "Validation loss at the end of training for each learning rate. Lines: mean of the tuning seeds "
    "(of the fresh seeds where a size has no tuning runs); dots: runs on fresh seeds.",
}
SAVINGS_CAPTION = (
    "Test loss over training compute, and the compute multiplier m at each size: for the same loss the second variant "
    "needs m times the FLOPs of the first. Points: mean over the seeds at the estimated optimum of the learning rate, "
    "else at the best rate; lines: fits of loss = E + A C^-a with common E and a, for this figure only. "
    "Bars: 95 % intervals, with a triangle where they leave the axis; band: the mean over sizes."
)
BEST_OF_K_CAPTION = (
    "Expected best validation loss after so many random trials, for the mean over the tuning seeds. Lines that cross: "
    "which variant is better depends on how much it is tuned."
)
EXPONENTS_CAPTION = (
    "Test loss above the fitted irreducible loss E over the parameters and over the training FLOPs, with and without "
    "embeddings, on logarithmic axes. Points: means over seeds, with their 95 % intervals; lines: the fits, which are "
    "straight here. Each fit has its own E."
)
WRITTEN = ("report.html", "report.md", "variants.csv", "runs.csv", "claims.csv")
NO_CLAIM = "No conclusions: budget {}, which only checks that the sweep runs."


def check_publishable(a: Analysis) -> None:
    """Raise UserError unless the sweep is complete and its budget supports conclusions."""
    if not a.is_full:
        raise UserError(
            f"--publish: the budget was {a.record['budget']}, which supports no conclusions; run --budget full"
        )
    if a.failed:
        raise UserError(f"--publish: runs of {', '.join(a.failed)} failed; finish the sweep first")


def write_report(a: Analysis, workdir: Path) -> None:
    """Write figures/ and the files of WRITTEN, and print the answers."""
    from lm.sweeps.report.best_of_k_figure import best_of_k_figure
    from lm.sweeps.report.exponents_figure import exponents_figure
    from lm.sweeps.report.figures import figures, to_bytes  # imports matplotlib
    from lm.sweeps.report.savings_figure import savings_figure

    of_designs = {"savings": savings_figure, "exponents": exponents_figure, "best_of_k": best_of_k_figure}
    drawn = figures(a) | {name: draw(a) for name, draw in of_designs.items() if name in captions(a)}
    (workdir / "figures").mkdir(exist_ok=True)
    for name, figure in drawn.items():
        (workdir / "figures" / f"{name}.png").write_bytes(to_bytes(figure, "png"))
    write_text(workdir / "variants.csv", tables.to_csv(tables.variant_rows(a)))
    write_text(workdir / "runs.csv", tables.to_csv(tables.run_rows(a)))
    write_text(workdir / "claims.csv", tables.to_csv(claim_rows(a)))
    write_text(workdir / "report.md", to_markdown(a, "figures/"))
    write_text(workdir / "report.html", to_html(a, {name: to_bytes(figure, "svg") for name, figure in drawn.items()}))
    print("\n".join(a.answers))
    print("\n".join(str(workdir / name) for name in WRITTEN))


def publish(a: Analysis, workdir: Path, directory: Path) -> None:
    """Copy a written report to directory/NAME.md and directory/NAME/.

    Args:
        a: the analysis, with a full budget; see `check_publishable`.
        workdir: the sweep's directory, after `write_report`.
        directory: where the pages are: docs/results.
    """
    name = a.record["name"]
    (directory / name).mkdir(parents=True, exist_ok=True)
    write_text(directory / f"{name}.md", to_markdown(a, f"{name}/"))
    for table in ("runs.csv", "claims.csv"):
        shutil.copyfile(workdir / table, directory / name / table)
    for figure in captions(a):
        shutil.copyfile(workdir / "figures" / f"{figure}.png", directory / name / f"{figure}.png")
    print(directory / f"{name}.md")


def captions(a: Analysis) -> dict[str, str]:
    """Return the captions of the figures by name."""
    drawn = {name: caption for name, caption in CAPTIONS.items() if a.comparisons or name != "differences"}
    if _has_multipliers(a):
        drawn["savings"] = SAVINGS_CAPTION
    if any(f.is_drawable for f in a.falls):
        drawn["exponents"] = EXPONENTS_CAPTION
    if a.record["search"]:
        del drawn["learning_rates"]
        drawn["curves"] = drawn["curves"].replace("at the best learning rate", "in the best trial")
        drawn["best_of_k"] = BEST_OF_K_CAPTION
    return drawn


def _has_multipliers(a: Analysis) -> bool:
    return not all(s.missing for s in a.savings)


def _results(a: Analysis, table: Callable[[Table], str], figure: Callable[[str], str]) -> list[str]:
    """Return the tables and figures of a report in order, formatted by `table` and `figure`."""
    return [
        *([table(savings_table(a))] if a.savings else []),
        *([figure("savings")] if _has_multipliers(a) else []),
        *([table(exponents_table(a))] if a.falls else []),
        *([figure("exponents")] if "exponents" in captions(a) else []),
        *([table(tables.comparisons(a)), figure("differences")] if a.comparisons else []),
        *([table(interaction_table(a))] if a.interactions else []),
        table(tables.losses(a)),
        figure("curves"),
        *([] if a.record.get("sizes") else [table(tables.curves(a))]),  # sizes have no steps in common
        *_tuning(a, table, figure),
        table(cost_tables.costs(a)),
    ]


def _tuning(a: Analysis, table: Callable[[Table], str], figure: Callable[[str], str]) -> list[str]:
    if a.record["search"]:
        return [table(search_tables.best_trials(a)), table(search_tables.best_of_k(a)), figure("best_of_k")]
    about_rates = [found for found in (rate_tables.rates(a), rate_tables.differences(a)) if found]
    return [figure("learning_rates"), *map(table, about_rates)]


# ---- Markdown --------------------------------------------------------------------------------------------------


def to_markdown(a: Analysis, figures: str) -> str:
    """Return the report as Markdown; `figures` is the path prefix of the figures."""
    r = a.record

    def figure(name: str) -> str:
        return f"![{name}]({figures}{name}.png)\n\n{captions(a)[name]}"

    parts = [
        f"# {r['name']}",
        *([] if a.is_full else [f"**{NO_CLAIM.format(r['budget'])}**"]),
        f"**Question.** {r['question']}",
        f"**Answer.** {a.answers[0]}",
        *(f"* {answer}" for answer in a.answers[1:]),
        *(f"* Warning: {warning}" for warning in a.warnings),
        *_results(a, _markdown, figure),
        f"## Background\n\nFrom the sweep file:\n\n{tables.background(r)}",
        f"{_markdown(tables.changes(r))}\n\nBase config: {tables.base(r)}",
        "## Reproduction\n\n```\n" + "\n".join(tables.reproduction(a)) + "\n```",
        _markdown(cost_tables.speeds(a)),
        "```\n" + "\n".join(cost_tables.dates(a)) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


MAX_UNWRAPPED = 7  # columns of an HTML table; the cells of wider ones are wrapped to fit on the page
DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
SUPERSCRIPTS = [*DIGITS, *("¹" + digit for digit in DIGITS)]  # of the numbers below 20


def _markdown(table: Table) -> str:
    numbers = _footnotes(table)
    header = [f"{column} {SUPERSCRIPTS[numbers[column]]}" if column in numbers else column for column in table.header]
    notes = [f"{SUPERSCRIPTS[number]} {column}: {table.notes[column]}" for column, number in numbers.items()]
    return "\n\n".join([f"## {table.title}", markdown_table(header, table.rows), *notes])


def _footnotes(table: Table) -> dict[str, int]:
    """Return the numbers of a table's footnotes by column."""
    return {column: i for i, column in enumerate(table.notes, start=1)}


# ---- HTML ------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { overflow-wrap: anywhere; } h2 { margin: 2.5rem 0 0.5rem; font-size: 1.25rem; }
p, li { max-width: 46rem; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: 0.35rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th { vertical-align: bottom; } sup { font-size: 0.7em; line-height: 0; }
td:not(:first-child) { white-space: nowrap; }
.text td:not(:first-child), .wide td:not(:first-child) { white-space: normal; }
th:first-child, td:first-child, .text td, .text th { text-align: left; }
.notes { font-size: 0.85rem; color: #444; margin: 0.2rem 0; }
figure { margin: 1rem 0 1.5rem; max-width: 36rem; } figcaption { font-size: 0.85rem; color: #444; }
figure img { width: 100%; }
.answer { font-size: 1.2rem; } .warning { background: #fff3cd; padding: 0.5rem 1rem; }
pre { background: #f5f5f5; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.8rem; }
.docstring { white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 60rem) {
  thead { display: none; }
  table { font-size: 0.85rem; }
  table, tbody, tr, td { display: block; }
  tr { border-bottom: 2px solid #bbb; padding: 0.4rem 0; }
  td, td:first-child { border: 0; padding: 0.1rem 0; display: flex; justify-content: space-between; gap: 1rem; }
  td:first-child { font-weight: 600; }
  td:not(:first-child)::before { content: attr(data-column); color: #555; text-align: left; }
  .text td { display: block; } .text td::before { display: none; }
}
"""


def to_html(a: Analysis, svgs: dict[str, bytes]) -> str:
    """Return the report as one page that needs no other file."""
    r = a.record

    def figure(name: str) -> str:
        source = "data:image/svg+xml;base64," + base64.b64encode(svgs[name]).decode()
        return (
            f'<figure><img src="{source}" alt="{name}"><figcaption>{html.escape(captions(a)[name])}</figcaption>'
            "</figure>"
        )

    others = "".join(f"<li>{html.escape(answer)}</li>" for answer in a.answers[1:])
    others += "".join(f"<li>Warning: {html.escape(warning)}</li>" for warning in a.warnings)
    body = [
        f"<h1>{html.escape(r['name'])}</h1>",
        "" if a.is_full else f"<p class=warning>{NO_CLAIM.format(r['budget'])}</p>",
        f"<p><b>{html.escape(r['question'])}</b></p>",
        f"<p class=answer>{html.escape(a.answers[0])}</p><ul>{others}</ul>",
        *_results(a, _html, figure),
        f"<h2>Background</h2><div class=docstring>{html.escape(tables.background(r))}</div>",
        f"{_html(tables.changes(r))}<p>Base config: {html.escape(tables.base(r))}</p>",
        "<h2>Reproduction</h2><pre>" + html.escape("\n".join(tables.reproduction(a))) + "</pre>",
        "<h2>Full configs</h2>",
        *(_config(name, v["config"]) for name, v in r["variants"].items()),
        _html(cost_tables.speeds(a)),
        "<pre>" + html.escape("\n".join(cost_tables.dates(a))) + "</pre>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(r['name'])}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _html(table: Table) -> str:
    """Return a table as HTML; on narrow screens each row becomes a block in which every cell names its column."""
    numbers = _footnotes(table)
    header = "".join(
        f"<th>{_cell(column)}{f'<sup>{numbers[column]}</sup>' if column in numbers else ''}</th>"
        for column in table.header
    )
    rows = []
    for row in table.rows:
        cells = zip(table.header, row, strict=True)
        cells = (f'<td data-column="{html.escape(column)}"><span>{_cell(cell)}</span></td>' for column, cell in cells)
        rows.append(f"<tr>{''.join(cells)}</tr>")
    kind = "text" if table.is_text else "wide" if len(table.header) > MAX_UNWRAPPED else ""
    notes = "".join(
        f"<p class=notes><sup>{number}</sup> {html.escape(column)}: {html.escape(table.notes[column])}</p>"
        for column, number in numbers.items()
    )
    return (
        f"<h2>{html.escape(table.title)}</h2><table class='{kind}'><thead><tr>{header}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{notes}"
    )


def _cell(text: str) -> str:
    """Return the text of a cell as HTML, in which an interval stays on one line.

    >>> _cell("-0.02 [-0.05, +0.01], 0.12")
    '-0.02 [-0.05,&nbsp;+0.01], 0.12'
    """
    return re.sub(r"\[[^\]]*\]", lambda interval: interval[0].replace(" ", "&nbsp;"), html.escape(text))


def _config(name: str, config: dict) -> str:
    lines = "\n".join(f"config.{key} = {value!r}" for key, value in flatten(config).items())
    return f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(lines)}</pre></details>"
