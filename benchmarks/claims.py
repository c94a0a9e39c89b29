"""List every published comparison, with p-values corrected over all pages: docs/results/claims.csv and the index.

    python3 -m benchmarks.claims

Each page corrects for its own comparisons. A reader of all pages sees more of them, so the index has p-values after
Holm's correction over all. Everything is computed again from the runs of each page (docs/results/PAGE/runs.csv). The
page itself (PAGE.md) gives the declared pairs, the margin, the unigram baseline, the looks, and whether the variances
were moderated, which they were not on older pages. Placebos are listed too. They are neither corrected nor counted as
comparisons: the fraction that is significant estimates the rate of false positives of the whole procedure.

Pages of sweeps with sizes are left out with a warning: their claims are compute multipliers or exponents, which need
the FLOPs of each run, and runs.csv does not hold them. So are pages of several texts, because runs.csv does not name
the text.
"""

import argparse
import csv
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

from lm.errors import UserError, with_exit_code
from lm.files import write_text
from lm.sweeps import statistics
from lm.sweeps.answers import difference
from lm.sweeps.exponents_table import TITLE
from lm.sweeps.interaction_report import INTERACTIONS
from lm.sweeps.looks import PairTest, is_significant, pair_tests, placebo_test
from lm.sweeps.seeds import PLACEBO
from lm.sweeps.spec import MARGIN
from lm.sweeps.tables import AT_EACH_SIZE, to_csv
from lm.text import markdown_table

# The reasons why a page is left out, by the title of one of its tables.
LEFT_OUT = {
    AT_EACH_SIZE: "its claims are compute multipliers",
    TITLE: "its claims are exponents",
    INTERACTIONS: "it compares on several texts",
}
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
    """Return a row for each declared comparison and each placebo of all pages."""
    compared, placebos = [], []
    for runs_csv in sorted(directory.glob("*/runs.csv")):
        page = runs_csv.parent.name
        text = (directory / f"{page}.md").read_text(encoding="utf-8")
        if found := [reason for title, reason in LEFT_OUT.items() if f"## {title}\n" in text]:
            print(f"WARNING: {page} is left out: {found[0]}", file=sys.stderr)
            continue
        record, results = read_page(directory / f"{page}.md", runs_csv)
        moderated = record["moderated"]
        tests = zip(record["comparisons"], pair_tests(record, results, moderated=moderated), strict=True)
        compared += [(page, *pair, test) for pair, test in tests]
        if record["placebo"]:
            test = placebo_test(record, results, moderated=moderated)
            placebos.append((page, record["placebo"], record["baseline"], test))
    corrected = (
        statistics.holm([math.nan if d is None else d.p for d in ds])
        for ds in ([test.difference for *_, test in compared], [test.at_optimum for *_, test in compared])
    )
    rows = [_row(*claim, *p_values) for claim, *p_values in zip(compared, *corrected, strict=True)]
    return rows + [_row(*claim) for claim in placebos]


def _row(page: str, variant: str, against: str, test: PairTest, p_all=math.nan, p_all_at_optimum=math.nan) -> dict:
    d, o = test.difference, test.at_optimum
    if test.verdict not in ("beyond the margin", "different"):  # a difference within the margin is no finding
        significant = "no"
    else:
        significant = "all pages" if is_significant(d, p_all, o, p_all_at_optimum) else "page"
    return {
        "page": page,
        "variant": variant,
        "against": against,
        "seeds": test.n_seeds,
        "difference": _number(d and d.mean),
        "low": _number(d and d.low),
        "high": _number(d and d.high),
        "p": _number(d and d.p),
        "p_page": "" if variant == PLACEBO else _number(test.p_adjusted),
        "p_all_pages": _number(p_all),
        "at_optimum": _number(o and o.mean),
        "p_at_optimum": _number(o and o.p),
        "significant": significant,
        "answer": test.verdict,
    }


def _number(x: float | None) -> str:
    """Format a number with six digits, so that another version of SciPy gives the same text; "" for None and nan."""
    return "" if x is None or math.isnan(x) else f"{x:.6g}"


def read_page(page: Path, runs_csv: Path) -> tuple[dict, SimpleNamespace]:
    """Return those parts of the record and the results of a published sweep that the tests of its comparisons need."""
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"^\| (.+? − .+?) \|", text, re.MULTILINE)  # the table of differences at each rate repeats them
    pairs = list(dict.fromkeys(map(_pair, names)))
    unigram = re.search(r"([\d.]+) on validation, ([\d.]+) on test", text)
    if not (pairs and unigram):
        raise UserError(f"{page} has no table of comparisons or no unigram baseline; publish it again")
    runs, rates = {}, {}
    with open(runs_csv, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["phase"], row["variant"], float(row["learning_rate"]), int(row["seed"])
            runs[key] = {name: float(row[name]) if row[name] else None for name in ("val_loss", "test_loss")}
            rates.setdefault(key[1], {}).setdefault(key[0], set()).add(key[2])
    grids = {name: sorted(by_phase.get("tuning", by_phase["final"])) for name, by_phase in rates.items()}
    data = {"unigram": dict(zip(("validation", "test"), map(float, unigram.groups()), strict=True)), "fingerprint": ""}
    seeds = {phase: sorted({key[3] for key in runs if key[0] == phase}) for phase in ("tuning", "final")}
    looks = re.search(r"looks \[([\d, ]+)\]", text)
    margin = re.search(r"([\d.e-]+) nats per token, the margin of this sweep", text)
    placebo = [against for variant, against in pairs if variant == PLACEBO]
    record = {
        "comparisons": [pair for pair in pairs if pair[0] != PLACEBO],
        "placebo": PLACEBO if placebo else None,
        "baseline": placebo[0] if placebo else None,
        "margin": float(margin[1]) if margin else MARGIN,
        "moderated": "The variance is moderated" in text,
        "tuning_seeds": seeds["tuning"],
        "seeds": seeds["final"],
        "looks": [int(n) for n in looks[1].split(",")] if looks else [len(seeds["final"])],
        "search": "## Best of k trials" in text,
        "variants": {name: {"grid": grid, "data": data} for name, grid in grids.items()},
    }
    return record, SimpleNamespace(runs=runs)


def _pair(cell: str) -> tuple[str, str]:
    variant, _, against = cell.removesuffix(" (different numbers of tokens)").replace("\\|", "|").partition(" − ")
    return variant, against


def summary(rows: list[dict]) -> str:
    """Return the part of the index that counts the comparisons and lists those that are significant on their page."""
    compared = [row for row in rows if row["variant"] != PLACEBO]
    placebos = [row for row in rows if row["variant"] == PLACEBO]
    listed = sorted((row for row in compared if row["significant"] != "no"), key=lambda row: float(row["p_all_pages"]))
    n_all = sum(row["significant"] == "all pages" for row in listed)
    n_wrong = sum(row["significant"] != "no" for row in placebos)
    about = (
        f"{len(compared)} comparisons on {len({row['page'] for row in compared})} pages: {len(listed)} are significant "
        f"after the correction of their page, {n_all} of them also after Holm's correction over all pages. "
        "[claims.csv](claims.csv) lists all comparisons."
    )
    checks = "No page has a placebo so far."
    if placebos:
        checks = (
            f"False positives: {n_wrong} of {len(placebos)} placebos are significant; 1 in 20 is expected by chance."
        )
    header = ["comparison", "difference [95 % CI]", "p on its page", "p over all pages", "page"]
    return "\n\n".join([about, checks, markdown_table(header, [_cells(row) for row in listed])])


def _cells(row: dict) -> list[str]:
    middle, low, high = (difference(float(row[name])) for name in ("difference", "low", "high"))
    p_values = [f"{float(row[name]):.3g}" for name in ("p_page", "p_all_pages")]
    names = f"{row['variant']} − {row['against']}"
    return [names, f"{middle} [{low}, {high}]", *p_values, f"[{row['page']}]({row['page']}.md)"]


if __name__ == "__main__":
    sys.exit(main())
