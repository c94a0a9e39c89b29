"""List every published claim, with p-values corrected over all pages: docs/results/claims.csv and the index.

    python3 -m benchmarks.claims

Each page corrects for its own claims. A reader of all pages sees more of them, so the index prints p-values after
Holm's correction over all: differences, interactions with the text, and compute multipliers. They are read from the
claims.csv of each page, which `python3 -m lm.report --publish` writes. Placebos are listed too. They are not corrected
and not counted: how many are significant is the rate of false positives of the whole procedure.
"""

import argparse
import csv
import math
import sys
from pathlib import Path

from lm.errors import UserError, with_exit_code
from lm.files import write_text
from lm.sweeps.analysis.answers import difference
from lm.sweeps.analysis.claims import INTERACTION, MULTIPLIER
from lm.sweeps.design.placebo import PLACEBO
from lm.sweeps.report.tables import to_csv
from lm.sweeps.statistics import inference
from lm.text_tables import markdown_table

BEGIN, END = "<!-- written by python3 -m benchmarks.claims -->", "<!-- end -->"


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.claims", description=__doc__.split("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs/results"), help="(docs/results)")
    return write(parser.parse_args(argv).directory)


def write(directory: Path) -> int:
    """Write claims.csv and the part of README.md between BEGIN and END."""
    rows, index = claims(directory), directory / "README.md"
    text = index.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or END not in text.partition(BEGIN)[2]:
        raise UserError(f"{index} has no lines {BEGIN} and {END}; add them where the table should be")
    before, _, rest = text.partition(BEGIN)
    write_text(directory / "claims.csv", to_csv(rows))
    write_text(index, f"{before}{BEGIN}\n\n{summary(rows)}\n\n{END}{rest.partition(END)[2]}")
    print("\n".join(str(directory / name) for name in ("claims.csv", "README.md")))
    return 0


def claims(directory: Path) -> list[dict]:
    """Return the claims of all pages, and after them the placebos.

    Raises:
        UserError: a page has runs and no claims.csv.

    Returns:
        Rows as in `lm.sweeps.analysis.claims`, with two more columns: page, and p_all_pages, the p-value after Holm's
        correction for all claims. significant is "all pages" if the claim is significant with that correction too,
        "page" if only with that of its page, else "no".
    """
    rows = []
    for page in sorted(path.parent for path in directory.glob("*/runs.csv")):
        if not (page / "claims.csv").is_file():
            raise UserError(f"{page} has no claims.csv; publish it again")
        with open(page / "claims.csv", newline="", encoding="utf-8") as file:
            rows += [{"page": page.name, **row} for row in csv.DictReader(file)]
    compared = [row for row in rows if row["kind"] != PLACEBO]
    at_best, at_optimum = (inference.holm([float(row[p] or "nan") for row in compared]) for p in ("p", "p_at_optimum"))
    level = 1 - inference.LEVEL
    for row, p, p_at_optimum in zip(compared, at_best, at_optimum, strict=True):
        row["p_all_pages"] = "" if math.isnan(p) else f"{p:.6g}"
        everywhere = p < level and (p_at_optimum < level or not row["at_optimum"])
        if row["significant"] == "yes":
            row["significant"] = "all pages" if everywhere else "page"
    placebos = [row | {"p_all_pages": ""} for row in rows if row["kind"] == PLACEBO]
    return compared + placebos


def summary(rows: list[dict]) -> str:
    """Return the part of the index that counts the claims and lists those that are significant on their page."""
    compared = [row for row in rows if row["kind"] != PLACEBO]
    placebos = [row for row in rows if row["kind"] == PLACEBO]
    listed = sorted((row for row in compared if row["significant"] != "no"), key=lambda row: float(row["p_all_pages"]))
    n_all = sum(row["significant"] == "all pages" for row in listed)
    n_wrong = sum(row["significant"] != "no" for row in placebos)
    about = (
        f"{len(compared)} claims on {len({row['page'] for row in compared})} pages: {len(listed)} are significant "
        f"after the correction of their page, {n_all} of them also after Holm's correction over all pages. "
        "[claims.csv](claims.csv) lists all claims."
    )
    checks = "No page has a placebo so far."
    if placebos:
        checks = f"False positives: {n_wrong} of {len(placebos)} placebos are significant; at most 1 in 20 is expected."
    header = ["claim", "difference [95 % CI]", "p on its page", "p over all pages", "page"]
    return "\n\n".join([about, checks, markdown_table(header, [_cells(row) for row in listed])])


def _cells(row: dict) -> list[str]:
    numbers = (float(row[name]) for name in ("estimate", "low", "high"))
    names = f"{row['variant']} − {row['against']}"
    if row["kind"] == MULTIPLIER:
        names = f"{row['variant']} over {row['against']}"
        middle, low, high = (f"{math.exp(x):.2f}" for x in numbers)
        middle = f"compute multiplier {middle}"
    else:
        middle, low, high = map(difference, numbers)
    if row["kind"] == INTERACTION:
        names = f"({names}) on {row['on']}"
    p_values = [f"{float(row[name]):.3g}" for name in ("p_page", "p_all_pages")]
    return [names, f"{middle} [{low}, {high}]", *p_values, f"[{row['page']}]({row['page']}.md)"]


if __name__ == "__main__":
    sys.exit(main())
