"""Rebuild the published pages from their runs, and list their claims in docs/results.

    python3 -m benchmarks.claims

Every page is written again from its runs.csv and sweep.json (as python3 -m lm.report does for one
page). A reader of all pages sees more claims than one page corrects for, so the index has p-values
after Holm's correction over all of them. Placebos are listed and neither corrected nor counted: how
many are significant is the rate of false positives of the whole procedure. The index also has the
difference of SwiGLU and SiLU by replication, how longer training changes the differences of a study,
and the answer of the study. repeats.md has what was trained again (repeats.csv), and the numbers of
papers (configs/replications).
"""

import argparse
import collections
import math
import sys
from pathlib import Path

import numpy as np

from benchmarks.page import fill, rows_of
from lm.sweeps import statistics
from lm.sweeps.analysis import (
    CELL,
    CLAIM,
    FIRST_TO_LAST,
    MEAN,
    OVER_CELLS,
    PLACEBO,
    Analysis,
    Claim,
    analyze,
)
from lm.sweeps.figures import nats
from lm.sweeps.record import read_page_record
from lm.sweeps.repetition import Repeat, published_pairs, read_repeats
from lm.sweeps.replication import cells_of, replicate
from lm.sweeps.report import (
    format_p,
    format_ratio,
    read_page,
    to_csv,
    trend,
    uneven_texts,
    write_page,
)
from lm.sweeps.results import runs_from_csv
from lm.system.errors import with_exit_code
from lm.system.files import write_text
from lm.system.text_tables import markdown_table

RESULTS = Path("docs/results")
SIZES = "scale_swiglu"
STUDY = "changes_2026"
LONGER = "changes_2026_longer"
SURVIVAL = "changes_2026_survival"
CELL_OF_BOTH = "Tiny Shakespeare, 0.05 M"
REPEATS = "repeats.csv"
REPLICATIONS_OF_PAPERS = Path("configs/replications")
ABOUT_REPEATS = """\
# Claims that were tested again

For anyone who doubts a claim. Written by `python3 -m benchmarks.claims`.

## With fresh seeds

```
python3 -m lm.sweep --study changes_2026 --repeat "token shift"
```

trains a change and its control again in the smallest cell, ten pairs with fresh seeds, in at most 15 minutes of two
cores. `--cell`, `--pairs` and `--seed` choose others. It prints its interval beside the published one, and
`repeat.csv` in its directory has one line, which can be added to [repeats.csv](repeats.csv) by a pull request. Lines
of the same claim and cell are pooled here: all their pairs are one sample.

Both sides train at the published values, without placebos. The column "published pairs" is therefore that change minus
the baseline alone, as the study's first runs have it; the page of the study subtracts the mean of the baseline and its
placebos, so its numbers are others. The error of tuning is the same in both and in neither interval, so these intervals
are narrower than those of the page. The last two columns are Welch's t test; p is not corrected for the number of
rows."""
BELOW_REPEATS = """\
## Against papers

`lm.sweep --replicate FILE.toml` compares a sweep with the numbers of a paper. Replicated: the interval at Holm's
level for the arms of the file is wholly on the source's side of 0. Contradicted: it is wholly on the other side, or
within the margin. If the source reports no difference (one within the margin, and within two of its standard errors),
then within the margin is replicated, and beyond it contradicted. Power: the probability of "replicated" if the true
difference here is that of the source. Size: whether the two differences may be equal. Models, texts and training
differ, so a contradiction is about the direction here, and does not say that the source is wrong."""
TEXTS = ("page", "kind", "variant", "against", "cell", "verdict", "missing")  # of claims.csv
REPLICATIONS = ["swiglu_vs_silu", "swiglu_texts", SIZES]  # the sweeps that compare SwiGLU and SiLU


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.claims", description=__doc__.split("\n")[0]
    )
    parser.add_argument("directory", nargs="?", type=Path, default=RESULTS, help="(docs/results)")
    directory = parser.parse_args(argv).directory
    for page in pages(directory):
        write_page(read_page(page), directory)
    rows = claims(directory)
    index = directory / "README.md"
    write_text(directory / "claims.csv", to_csv([with_numbers(row) for row in rows]))
    parts = filter(
        None, [summary(rows), replication(directory), slopes(directory), longer(directory)]
    )
    fill(index, "written by python3 -m benchmarks.claims", "\n" + "\n\n".join(parts) + "\n")
    for name, answer_of in {STUDY: study_answer, SURVIVAL: lengths_answer}.items():
        if (directory / name).exists():
            answer = answer_of(read_page(directory / name))
            write_text(index, with_answer(index.read_text(encoding="utf-8"), name, answer))
    if (directory / REPEATS).is_file():
        write_text(directory / "repeats.md", repeats(directory))
    print("\n".join(str(directory / name) for name in ("claims.csv", "README.md")))
    return 0


def pages(directory: Path) -> list[Path]:
    """Return the folders of the published sweeps."""
    return sorted(path.parent for path in directory.glob("*/sweep.json"))


def claims(directory: Path) -> list[dict]:
    """Return the claims of all pages, and after them the placebos.

    Returns:
        Rows of claims.csv with two more columns: page, and p_all_pages, the p-value after Holm's
        correction for all.
    """
    rows = []
    for page in pages(directory):
        for row in rows_of(page / "claims.csv"):
            rows.append({"page": page.name, **row, "p_all_pages": ""})
    compared = [row for row in rows if row["kind"] == CLAIM]
    corrected = statistics.holm([float(row["p"] or "nan") for row in compared])
    for row, p in zip(compared, corrected, strict=True):
        row["p_all_pages"] = f"{p:.10g}" if row["p"] else ""
    # An addition has the placebo of its study.
    return compared + [row for row in rows if row["kind"] == PLACEBO and "+" not in row["page"]]


def with_numbers(row: dict[str, str]) -> dict[str, str | float]:
    """Return a row of claims.csv with its numbers as floats.

    A table has an apostrophe before a text that begins with a minus sign.

    >>> with_numbers({"page": "1e5", "kind": "claim", "mean": "-0.5", "ratio": ""})
    {'page': '1e5', 'kind': 'claim', 'mean': -0.5, 'ratio': ''}
    """
    return {key: float(x) if x and key not in TEXTS else x for key, x in row.items()}


def summary(rows: list[dict]) -> str:
    """Return the part of the index that counts the claims and lists the significant ones."""
    bound = 1 - statistics.LEVEL
    compared = [row for row in rows if row["kind"] == CLAIM]
    # a placebo is counted by cell
    placebos = [row for row in rows if row["kind"] == PLACEBO and row["cell"] not in OVER_CELLS]
    listed = [row for row in compared if row["p_holm"] and float(row["p_holm"]) < bound]
    n_all = sum(float(row["p_all_pages"]) < bound for row in listed)
    n_wrong = sum(float(row["p"]) < bound for row in placebos if row["p"])
    about = (
        f"{len(compared)} claims on {len({row['page'] for row in compared})} pages: {len(listed)} "
        f"are significant after Holm's correction on their page, {n_all} of them also after the "
        f"correction over all pages. Significant placebos: {n_wrong} of the {len(placebos)} on the "
        "pages. [claims.csv](claims.csv) lists all."
    )
    header = ["claim", "difference [95 % interval]", "p on its page", "p over all pages", "page"]
    listed.sort(key=lambda row: float(row["p_all_pages"]))
    return f"{about}\n\n{markdown_table(header, [_cells(row) for row in listed])}"


def _cells(row: dict) -> list[str]:
    difference = _nats(*(float(row[key]) for key in ("mean", "low", "high")))
    place = {MEAN: " (mean of its cells)", FIRST_TO_LAST: " (first length to last)"}
    name = f"{row['variant']} − {row['against']}{place.get(row['cell'], '')}"
    p_values = [format_p(float(row[key])) for key in ("p_holm", "p_all_pages")]
    return [name, difference, *p_values, f"[{row['page']}]({row['page']}.md)"]


def _nats(mean: float, low: float, high: float) -> str:
    return f"{nats(mean)} [{nats(low)}, {nats(high)}]"


def replication(directory: Path) -> str:
    """Return SwiGLU − SiLU over the comparisons of several sweeps."""
    pages = [directory / name for name in REPLICATIONS]
    if not all(page.exists() for page in pages):
        return ""
    claims = [claim for page in pages for claim in read_page(page).claims if claim.cell != MEAN]
    comparisons = [c.difference for c in claims if (c.variant, c.against) == ("SwiGLU", "SiLU")]
    over = statistics.estimate([difference.mean for difference in comparisons])
    low, high = statistics.mean_over_cells(comparisons).prediction
    return (
        f"SwiGLU − SiLU by replication: {_shown(over)} over {over.n} comparisons "
        f"({', '.join(f'{difference.mean:.3f}' for difference in comparisons)}: one sweep, two texts "
        f"with the same seeds, four sizes). A further one of this kind would find {low:.3f} to "
        f"{high:.3f} (95 % prediction interval)."
    )


def slopes(directory: Path) -> str:
    """Return the compute SwiGLU saves by four slopes of the loss, and the difference's trend."""
    page = directory / SIZES
    if not page.exists():
        return ""
    a = read_page(page)
    cells = a.of_kind(CELL)
    pairs = [[a.variants[f"{arm}, {c.cell}"] for arm in (c.variant, c.against)] for c in cells]

    def compute(v) -> float:
        return v.about["flops_per_token"] * v.about["tokens"]

    x = np.log([np.mean(list(map(compute, pair))) for pair in pairs])
    loss = np.array([np.mean([v.loss.mean for v in pair]) for pair in pairs])
    difference = np.array([c.difference.mean for c in cells])
    se = np.array([c.difference.se for c in cells])
    slopes_of = {
        "line": -np.polyfit(x, loss, 1)[0],
        "power law": -np.polyfit(x, np.log(loss), 1)[0] * loss,
        "parabola": -np.polyval(np.polyder(np.polyfit(x, loss, 2)), x),
    }
    saved = {}
    for name, slope in slopes_of.items():
        saved[name] = statistics.compute_saved(float(np.mean(-difference / slope)))
    over_cells = next(c for c in a.claims if c.cell == MEAN)
    saved["secants"] = statistics.compute_saved(over_cells.log_multiplier.mean)
    by_share = sorted(saved.items(), key=lambda item: item[1])
    shares = [f"{100 * share:.0f} % ({name})" for name, share in by_share]
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    parts = weights**2 * se**2  # variances of the summands of the trend
    df = parts.sum() ** 2 / (parts**2 / [c.difference.df for c in cells]).sum()
    trend = statistics.Estimate(
        float(weights @ difference), float(np.sqrt(parts.sum())), float(df), len(cells)
    )
    return (
        "Training compute that SwiGLU saves, mean of four sizes, by how the slope of the loss is "
        f"computed: {', '.join(shares)}. A growth with the size is not shown: the trend of the "
        f"difference has p = {format_p(trend.p)}."
    )


def longer(directory: Path) -> str:
    """Return the differences of a study in one cell, beside those with longer training."""
    if not all((directory / name).exists() for name in (STUDY, LONGER)):
        return ""
    # Both against one control: the longer runs have no placebos but the first.
    record = read_page_record(directory / STUDY) | {"control": "baseline"}
    a = analyze(record, runs_from_csv(directory / STUDY / "runs.csv"))
    short = {c.variant: c.difference for c in a.claims if c.cell == CELL_OF_BOTH}
    rows = []
    for claim in read_page(directory / LONGER).claims:
        before = short[claim.variant]
        after = claim.difference
        change = statistics.difference(after, before)
        shown = [_nats(e.mean, *e.interval()) for e in (before, after, change)]
        r, low, high = statistics.ratio(after, before)
        of_ratio = f"{r:.2f} [{low:.2f}, {high:.2f}]" if math.isfinite(low) else "–"
        rows.append([claim.variant, *shown, of_ratio])
    header = [
        "change",
        f"in {STUDY}",
        "with 3 times the steps",
        "the second minus the first",
        "ratio",
    ]
    return (
        f"Changes of [{STUDY}]({STUDY}.md) in the cell {CELL_OF_BOTH}, and with 3 times the steps "
        f"([{LONGER}]({LONGER}.md)), both against a single control. The seeds differ, so the fourth "
        f"column is Welch's t test; 95 % intervals, uncorrected.\n\n{markdown_table(header, rows)}"
    )


def study_answer(a: Analysis) -> str:
    """Return the answer of a study with many claims for the index, in the groups of its page."""
    claims = sorted(a.of_kind(CLAIM), key=lambda c: c.mean)
    times = collections.Counter(c.variant for c in claims)

    def name_of(c: Claim) -> str:
        return c.variant if times[c.variant] == 1 else f"{c.variant} against {c.against}"

    def named(verdict: str, of_sign: int) -> str:
        """Name the claims of a verdict and a sign, with their means by text if these differ much."""
        names = []
        for c in claims:
            if c.verdict == verdict and c.mean * of_sign > 0:
                texts = ", ".join(f"{text} {nats(mean)}" for text, mean in uneven_texts(a, c))
                names.append(f"{name_of(c)} ({texts})" if texts else name_of(c))
        return ", ".join(names) or "none"

    margin = f"{a.record['margin']:g}"
    no_result = [name_of(c) for c in claims if not c.difference]
    not_shown = sum(c.verdict == statistics.NOT_SHOWN for c in claims)
    general = ", ".join(name_of(c) for c in claims if c.is_general) or "none"
    return (
        f"in the mean of {len(a.record['cells'])} cells (two sizes on two texts), lower by more than "
        f"{margin}: {named(statistics.BETTER, -1)}; lower by possibly less: "
        f"{named(statistics.DIFFERENT, -1)}. Higher by more than {margin}: "
        f"{named(statistics.WORSE, 1)}; by possibly less: {named(statistics.DIFFERENT, 1)}. Means by "
        "text are given if cells differ in sign, or if that of one text is below a third of the "
        "other's. Unstable, without a mean: "
        f"{', '.join(no_result) or 'none'}. For {not_shown} neither a difference nor equality is shown. "
        f"In general, so with the same sign in a further cell of this kind: {general}"
    )


def lengths_answer(a: Analysis) -> str:
    """Return the answer of a sweep with lengths for the index: the ratio of each change, and in words
    what its test says.
    """
    first, *_, last = a.record["cells"]
    answers = []
    for c in a.of_kind(CLAIM):
        if not c.difference:
            answers.append(f"{c.variant}: {c.missing}")
        elif math.isfinite(c.ratio[1]):
            answers.append(f"{c.variant} {format_ratio(c.ratio)} ({trend(a, c)})")
        else:
            answers.append(f"{c.variant} none, as its lead at {first} may be 0")
    return f"the ratio of the lead at {last} to that at {first} is, by change: {'; '.join(answers)}"


def with_answer(index: str, name: str, answer: str) -> str:
    """Return the index with another answer in the row of a page."""
    link = f"[{name}]({name}.md)"
    lines = index.split("\n")
    rows = [
        i for i, line in enumerate(lines) if line.startswith("| ") and line.endswith(f"{link} |")
    ]
    question = lines[rows[0]].split(" | ")[0]
    lines[rows[0]] = f"{question} | {answer} | {link} |"
    return "\n".join(lines)


def repeats(directory: Path) -> str:
    """Return the page of claims that were tested again, by fresh seeds and by papers."""
    lines = [ABOUT_REPEATS]
    rows = []
    by_claim: dict[tuple, list[Repeat]] = {}
    for repeat in read_repeats(directory / REPEATS):
        by_claim.setdefault(repeat[:4], []).append(repeat)
    for (study, *_), again in by_claim.items():
        runs = runs_from_csv(directory / study / "runs.csv")
        published = published_pairs(read_page_record(directory / study), runs, again[0])
        pooled = statistics.estimate([x for repeat in again for x in repeat.differences])
        change = statistics.difference(pooled, published)
        name = f"{again[0].variant} − {again[0].against}, {again[0].cell}"
        shown = [_nats(e.mean, *e.interval()) for e in (published, pooled, change)]
        n = f"{published.n} / {pooled.n}"
        rows.append([name, f"[{study}]({study}.md)", n, *shown, format_p(change.p)])
    header = ["claim", "study", "pairs", "published pairs", "again", "again − published", "p"]
    lines.append(markdown_table(header, rows))
    lines.append(BELOW_REPEATS)
    for path in sorted(REPLICATIONS_OF_PAPERS.glob("*.toml")):
        content, comparisons = replicate(path)
        page = Path(content["sweep"]).name
        header = ["claim", "source", "here", "95 % interval", "verdict", "size", "power", "note"]
        cells = [
            [*cells_of(c), f"[source]({c.url})" + f", {c.note}" * bool(c.note)] for c in comparisons
        ]
        lines.append(f"### {content['source']}\n\nAgainst [{page}]({page}.md).")
        lines.append(f"```\npython3 -m lm.sweep --replicate {path}\n```")
        lines.append(markdown_table(header, cells))
    return "\n\n".join(lines) + "\n"


def _shown(e: statistics.Estimate) -> str:
    low, high = e.interval()
    return f"{e.mean:.3f} [{low:.3f}, {high:.3f}], p = {format_p(e.p)}".replace("= <", "<")


if __name__ == "__main__":
    sys.exit(main())
