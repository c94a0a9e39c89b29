"""Write the report of a sweep: Markdown from one template, HTML from it, tables and JSON.

A sweep's directory may come from somebody else. Every value is escaped before it reaches the
Markdown, and no file is written through a link.
"""

import base64
import collections
import html
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markdown
import numpy as np
from markupsafe import Markup

from lm.config.convert import flatten
from lm.config.schema import schema
from lm.data import shards
from lm.sweeps import ledger, speed, statistics
from lm.sweeps.analysis import (
    BESIDE,
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
from lm.sweeps.declare import in_cell
from lm.sweeps.figures import figures, nats, to_bytes, words
from lm.sweeps.others import MIN_ROWS, Finding, rank_agreement, read_others
from lm.sweeps.record import read_page_record, text_of
from lm.sweeps.results import STUCK, choices_of, runs_from_csv, runs_to_csv
from lm.sweeps.speed import Speeds
from lm.sweeps.statistics import (
    BETTER,
    DIFFERENT,
    NOT_SHOWN,
    SAME,
    VERDICTS,
    WORSE,
    Estimate,
)
from lm.system.errors import UserError
from lm.system.files import (
    is_file_name,
    make_folder,
    read_bytes,
    to_json,
    write_bytes,
    write_text,
)
from lm.system.text_tables import csv_table, for_terminal, html_page
from lm.workdir.provenance import format_command

NOTES = "notes.txt"  # Markdown, beside the runs of a published page: what its reader should know
# By figure, its name and its caption.
CAPTIONS = {
    "differences": (
        "differences in test loss",
        "Ticks: single seeds, or cells for a mean (diamond), in a color per text. Thick bars: 95 % "
        "intervals. Thin bars: intervals at Holm's level, from which the verdict is read. Dotted: "
        "prediction interval. Shaded: the margin, and darker the spread of several placebos. Gray: "
        "placebo and secondary rows. Left of 0 the first variant is better; from the first length to the "
        "last, it becomes better.",
    ),
    "learning_rates": (
        "validation loss over the learning rate",
        "Mean validation loss of the tuning runs minus the baseline's lowest one, a line per "
        "cell. High losses leave the panels.",
    ),
    "curves": (
        "validation loss during training",
        "Mean difference in validation loss of the final runs, a line per cell. Of sweeps before "
        "December 2026 with few comparisons: mean losses, with 95 % intervals.",
    ),
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { overflow-wrap: anywhere; } h2 { margin: 2.5rem 0 0.5rem; font-size: 1.25rem; }
p, li { max-width: 46rem; overflow-wrap: anywhere; } img { width: 100%; max-width: 36rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; margin: 1rem 0; }
th, td { padding: 0.35rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th { vertical-align: bottom; } td { white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, td:last-child { text-align: left; }
td:first-child, td:last-child { white-space: normal; min-width: 9rem; }
pre { background: #f5f5f5; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.8rem; }
"""


def escape(value: Any) -> Markup:
    r"""Return a value as text of one line that is neither Markdown nor HTML.

    >>> print(escape("a|b <img src=x> [x](y)\n# c"))
    a\|b &lt;img src=x&gt; \[x\](y) # c
    """
    if isinstance(value, Markup):
        return value
    text = html.escape(for_terminal(re.sub(r"\s+", " ", str(value))), quote=False)
    return Markup(re.sub(r"([\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text))


def block(text: str) -> Markup:
    """Return lines of text as a Markdown code block by indentation, which no line can end."""
    lines = re.split(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", text)
    return Markup("\n".join(f"    {for_terminal(line)}" for line in lines))


def format_p(p: float) -> Markup:
    """Format a p-value; none below 1e-4 is printed, because the simulations go no further.

    >>> print(format_p(0.0312), format_p(1e-9), format_p(math.nan))
    0.031 < 1e-4 –
    """
    if math.isnan(p):
        return Markup("–")
    return Markup("< 1e-4" if p < 1e-4 else f"{p:.2g}")


def _equals_p(p: float) -> Markup:
    return format_p(p) if p < 1e-4 else Markup(f"= {format_p(p)}")


def _ends(interval: tuple[float, float]) -> Markup:
    return Markup("[{}, {}]".format(*map(nats, interval)))


def _losses(interval: tuple[float, float]) -> Markup:
    return Markup("[{:.4f}, {:.4f}]".format(*interval))


def _saved(log_m: Estimate | None) -> Markup:
    """Format the training compute that a multiplier saves, with its interval."""
    if log_m is None:
        return Markup("–")
    return _percent(statistics.compute_saved(x) for x in (log_m.mean, *log_m.interval()))


def _needed(log_m: Estimate) -> Markup:
    """Format the additional training compute that a multiplier below 1 means, with its interval."""
    return _percent(math.expm1(min(-x, 700.0)) for x in (log_m.mean, *log_m.interval()[::-1]))


def _percent(shares: Iterable[float]) -> Markup:
    """Format a share and its interval in percent; a flat loss gives very large ones.

    >>> print(_percent([0.28, -1e9, 0.31]))
    28 % [-1e+11, 31]
    """
    shown = [f"{100 * x:.0f}" if abs(x) < 100 else f"{100 * x:.0e}" for x in shares]
    return Markup("{} % [{}, {}]".format(*shown))


def format_ratio(ratio: tuple[float, float, float] | None) -> Markup:
    """Format a ratio with its interval; without one if the difference at the first length may be 0.

    >>> print(format_ratio((0.5, 0.25, 1.0)), format_ratio((0.5, -math.inf, math.inf)))
    0.50 [0.25, 1.00] –
    """
    if ratio is None or not all(map(math.isfinite, ratio)):
        return Markup("–")
    return Markup("{:.2f} [{:.2f}, {:.2f}]".format(*ratio))


def trend(a: Analysis, claim: Claim) -> str:
    """Return in words how a difference changes from the first length to the last."""
    first = a.in_cells(claim)[0]
    better = claim.mean < 0  # with longer training
    if not first.is_significant:
        name = "difference"
        moves = "falls" if better else "rises"
    elif first.mean < 0:
        name = "lead"
        moves = "grows" if better else "shrinks"
    else:
        name = "deficit"
        moves = "shrinks" if better else "grows"
    margin = f"{a.record['margin']:g}"
    return {
        BETTER: f"the {name} {moves} by more than {margin}",
        WORSE: f"the {name} {moves} by more than {margin}",
        DIFFERENT: f"the {name} {moves}, by possibly less than {margin}",
        SAME: f"the {name} is the same within {margin}",
        NOT_SHOWN: f"that the {name} changes is not shown",
    }.get(claim.verdict, claim.verdict)


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _changes(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in changes.items()) or "nothing"


def _decimals(x: float) -> str:
    return "–" if math.isnan(x) else f"{x:.4f}"


def _ratio(about: Mapping[str, Any]) -> float:
    return about["tokens"] / max(about["n_params"], 1)


def _significant(x: float) -> str:
    """Format with two significant digits, or as an integer.

    >>> _significant(3.69), _significant(0.235), _significant(123.4)
    ('3.7', '0.23', '123')
    """
    return f"{x:,.0f}" if x >= 100 else f"{x:.2g}"


def uneven_texts(a: Analysis, claim: Claim) -> list[tuple[str, float]]:
    """Return the mean of a claim over the cells of each text, if its mean over all hides much.

    That is, if its sign is not that of all cells, or if the mean of one text is less than a third of
    another's. Otherwise return nothing.
    """
    of_texts: dict[str, list[float]] = {}
    for c in a.in_cells(claim):
        of_texts.setdefault(text_of(a.record, c.cell), []).append(c.mean)
    if len(of_texts) < 2:
        return []
    texts = [(text, float(np.mean(means))) for text, means in of_texts.items()]
    sizes = [abs(mean) for _, mean in texts]
    is_even = claim.has_one_sign and 3 * min(sizes) >= max(sizes)
    return [] if is_even else texts


def to_markdown(
    a: Analysis,
    drawn: Mapping[str, str],
    findings: Sequence[Finding] = (),
    of_ledger: str = "",
    notes: str = "",
    speeds: Speeds | None = None,
) -> str:
    """Return the report as Markdown.

    Args:
        drawn: the paths of its figures by name.
        findings: what others found.
        of_ledger: the ledger's verdict on a change that was added to a study.
        notes: Markdown of a published page, not escaped.
        speeds: what `lm.sweep --speed` measured.
    """

    def both(claim: Claim, field: str) -> str:
        """Return a number of both variants of a claim, once if equal; of a mean, their ratio."""

        def number(arm: str, cell: str) -> float:
            v = a.variants.get(in_cell(arm, cell))
            return math.nan if v is None else getattr(v, field, None) or v.about[field]

        cells = a.record["cells"]
        if claim.cell == FIRST_TO_LAST:
            cells = cells[-1:]
        elif claim.cell != MEAN:
            cells = [claim.cell]
        pairs = [(number(claim.variant, cell), number(claim.against, cell)) for cell in cells]
        if claim.cell == MEAN:  # the geometric mean
            ratio = math.exp(np.mean([math.log(x / y) for x, y in pairs]))
            return "–" if math.isnan(ratio) else f"× {ratio:.2f}"
        return " / ".join(dict.fromkeys("–" if math.isnan(x) else f"{x:,.0f}" for x in pairs[0]))

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lm.sweeps", "."),
        autoescape=True,
        finalize=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "nats": nats,
        "ends": _ends,
        "p": format_p,
        "equals_p": _equals_p,
        "saved": _saved,
        "needed": _needed,
        "ratio": format_ratio,
        "both": both,
        "uneven_texts": lambda claim: uneven_texts(a, claim),
        "words": words,
        "value": _value,
        "changes": _changes,
        "losses": _losses,
        "decimals": _decimals,
        "tokens_per_parameter": lambda about: _significant(_ratio(about)),
        "block": block,
    }
    margin = f"{a.record['margin']:g}"
    claims = a.of_kind(CLAIM)
    text = environment.get_template("report.md.jinja").render(
        r={"design": "", **a.record},
        claims=claims,
        rows=a.shown(),
        a=a,
        sources=list(dict.fromkeys(finding.source for finding in findings)),
        others={(finding.change, finding.source): finding for finding in findings},
        agreement=rank_agreement(claims, findings),
        means=any(claim.cell == MEAN for claim in a.claims),
        by_verdict={verdict: [c for c in claims if c.verdict == verdict] for verdict in VERDICTS},
        cells=a.of_kind(CELL),
        placebos=a.of_kind(PLACEBO),
        by_source=a.by_source(),
        speeds=speed.rows(a, speeds) if speeds else [],
        of_ledger=of_ledger,
        notes=Markup(notes),
        ALPHA=ledger.ALPHA,
        n_tests=sum(not math.isnan(claim.p) for claim in claims),
        figures={name: Markup(path) for name, path in drawn.items()},
        captions=CAPTIONS,
        scope=_scope(a),
        tuned=_tuned(a),
        # Commands are in "Reproduction"; a result in the sweep's file is that of an earlier page.
        background=re.sub(
            r"(?m)^    python.*\n*|^Result \((?:.+\n?)+", "", a.record["background"]
        ).rstrip(),
        reproduction=_reproduction(a),
        stuck=STUCK,
        trend=lambda claim: trend(a, claim),
        verdicts={
            BETTER: f"better by more than {margin}",
            WORSE: f"worse by more than {margin}",
            SAME: f"the same within {margin}",
        },
        SHORTER=speed.SHORTER,
        MIN_ROWS=MIN_ROWS,
        FIRST_TO_LAST=FIRST_TO_LAST,
        OVER_CELLS=OVER_CELLS,
        MEAN=MEAN,
        BESIDE=BESIDE,
        BETTER=BETTER,
        WORSE=WORSE,
        DIFFERENT=DIFFERENT,
        SAME=SAME,
    )
    text = re.sub(r"(?m)^(\* .*)\n\n+(?=\* )", r"\1\n", text)  # a list has no empty lines
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _tuned(a: Analysis) -> list[str]:
    """Return the keys of which some variant had several values."""
    tunes = [v.about["tune"] for v in a.variants.values()]
    return [key for key in a.record["tune"] if any(len(tune[key]) > 1 for tune in tunes)]


def _scope(a: Analysis) -> str:
    """Return the sentence that limits the answers: size, training tokens, text and tuning."""
    abouts = [v.about for v in a.variants.values()]
    texts = dict.fromkeys(about["data"]["name"] for about in abouts)
    tuned = _tuned(a)

    def range_of(numbers: list[float], show: Callable[[float], str]) -> str:
        return " to ".join(dict.fromkeys([show(min(numbers)), show(max(numbers))]))

    n_pairs = range_of([len(about["seeds"]) for about in abouts], str)
    cells = a.record["cells"]
    each = "at each" if a.record["axis"] in ("size", "length") else "in each"
    where = f" {each} of {len(cells)} {a.record['axis']}s" if len(cells) > 1 else ""
    n_tokens = range_of([about["tokens"] for about in abouts], "{:,}".format)
    return (
        f"Each difference is over {n_pairs} pairs of runs{where}, of {n_tokens} training tokens a "
        f"run. This holds at {range_of([about['n_params'] for about in abouts], '{:,}'.format)} "
        f"parameters and {range_of([_ratio(about) for about in abouts], _significant)} training "
        f"tokens per parameter, on {' and '.join(texts)}. "
        + (f"Tuned: {', '.join(tuned)}; all else is fixed." if tuned else "Nothing was tuned.")
    )


def code_lines(start: Mapping[str, Any]) -> tuple[str, str]:
    """Return the commit and the versions of one start (`lm.workdir.provenance.describe_start`)."""
    commit = "commit unknown"
    for note in start.get("notes", ()):  # it may say why
        if note.startswith(commit):
            commit = note
    if git := start["git"]:
        commit = f"commit {git['commit']}{' with uncommitted changes' * git['dirty']}"
    return commit, "versions " + ", ".join(f"{k} {v}" for k, v in start["versions"].items() if v)


def _starts(a: Analysis) -> list[dict]:
    """Return the starts of a sweep without the host's name and this machine's directories."""
    shown = ("time", "platform", "processor", "device", "versions", "git")
    return [
        {key: start[key] for key in shown} | {"argv": shlex.split(_command(start))[2:]}
        for start in a.record["starts"]
    ]


def _command(start: Mapping[str, Any]) -> str:
    return format_command("lm.sweep", start["argv"][1:])


def _reproduction(a: Analysis) -> str:
    """Return what is needed to repeat the sweep, a line each: every commit and machine once."""
    starts = a.record["starts"]
    variants = a.record["variants"].values()
    lengths = collections.Counter(a.record["variants"][run.variant]["tokens"] for run in a.runs)
    data = sorted({(v["data"]["name"], v["data"]["fingerprint"][:12]) for v in variants})
    seeds = {v["cell"]: f"seeds {v['seeds']}, tuning seeds {v['tuning_seeds']}" for v in variants}
    minutes = a.record.get("minutes") or math.fsum(run.seconds for run in a.runs) / 60
    speeds = [(run.tokens, run.tokens_per_second) for run in a.runs]
    in_steps = math.fsum(tokens / speed for tokens, speed in speeds if speed) / 60
    last = f"last started {starts[-1]['time']}; {minutes:,.0f} minutes of training"
    if in_steps:
        last += (
            f", {in_steps / minutes:.0%} of them in steps, the rest in compilation and evaluation"
        )
    lines = [
        _command(starts[-1]),
        *(line for start in starts for line in code_lines(start)),
        *(f"device {s['device']}, {s['processor']}, {s['platform']}" for s in starts),
        "data " + ", ".join(f"{name} (fingerprint {digest})" for name, digest in data),
        *(line for v in variants for line in shards.describe(v["data"].get("prepared"))),
        *(f"{n} runs of {tokens:,} tokens" for tokens, n in lengths.items()),
        *(f"{cell}: {text}" if cell else text for cell, text in seeds.items()),
        last,
    ]
    return "\n".join(dict.fromkeys(lines))


def to_html(text: str, title: str, svgs: Mapping[str, bytes]) -> str:
    """Return a report in Markdown as one page that needs no other file; svgs: by their paths."""
    body = markdown.markdown(text, extensions=["tables"])
    body = body.replace("<table>", '<div class="scroll"><table>')
    body = body.replace("</table>", "</table></div>")
    for path, svg in svgs.items():
        content = base64.b64encode(svg).decode()
        body = body.replace(f'src="{path}"', f'src="data:image/svg+xml;base64,{content}"')
    return html_page(title, STYLE, body)


def claim_rows(a: Analysis) -> list[dict]:
    """Return the comparisons as rows of claims.csv, in 10 significant digits; None where there is no
    number.
    """
    none = Estimate(math.nan, math.nan, 0, 0)
    rows = []
    for c in a.claims:
        d = c.difference or none
        m = c.log_multiplier or none
        low, high = d.interval()
        v = c.validation or none
        m_low, m_high = m.interval()
        ratio, ratio_low, ratio_high = c.ratio or (math.nan, math.nan, math.nan)
        v_low, v_high = v.interval()
        row = {
            "kind": c.kind,
            "variant": c.variant,
            "against": c.against,
            "cell": c.cell,
            "n": d.n,
            "mean": d.mean,
            "low": low,
            "high": high,
            "se": d.se,
            "df": d.df,
            "p": c.p,
            "p_holm": c.p_holm,
            "holm_low": c.holm_low,
            "holm_high": c.holm_high,
            "verdict": c.verdict,
            "missing": c.missing,
            "tau": c.tau,
            "prediction_low": c.prediction[0],
            "prediction_high": c.prediction[1],
            "tuning_variance": c.tuning.variance,
            "detectable": c.detectable,
            "validation_mean": v.mean,
            "validation_low": v_low,
            "validation_high": v_high,
            "ratio": ratio,
            "ratio_low": ratio_low,
            "ratio_high": ratio_high,
            "log_multiplier": m.mean,
            "log_multiplier_low": m_low,
            "log_multiplier_high": m_high,
        }
        rows.append({k: _rounded(x) if isinstance(x, float) else x for k, x in row.items()})
    return rows


def _rounded(x: float) -> float | None:
    """Return a computed number with 10 significant digits, or None if it is not finite.

    The last digits depend on the processor and on the versions of NumPy and SciPy. With them, no
    other machine could write the same page from the same runs.
    """
    return float(f"{x:.10g}") if math.isfinite(x) else None


def variant_rows(a: Analysis) -> list[dict]:
    """Return the variants of report.json, with the unrounded losses of their runs."""
    fields = ("arm", "cell", "changes", "n_params", "flops_per_token", "tokens")
    return [
        {
            "name": v.name,
            **{key: v.about[key] for key in fields},
            "tuned": v.point,
            "at_edge": v.choice.at_edge,
            "test_losses": {str(seed): loss for seed, loss in v.losses.items()},
            "bits_per_byte": _rounded(v.bits_per_byte),
            "n_diverged": v.n_diverged,
            "n_stuck": v.n_stuck,
            "tokens_per_second": v.tokens_per_second,
        }
        for v in a.variants.values()
    ]


def to_csv(rows: list[dict]) -> str:
    """Return rows as CSV, with the columns of the first row; floats have 10 significant digits."""
    return csv_table(list(rows[0]) if rows else [], rows, digits=10)


def to_report_json(a: Analysis) -> str:
    """Return the numbers of the report as strict JSON."""
    shown = ("name", "budget", "question", "margin", "axis", "cells", "tune")
    content = {key: a.record[key] for key in shown} | {
        "starts": _starts(a),
        "claims": claim_rows(a),
        "variants": variant_rows(a),
        "warnings": a.warnings,
        "failed": a.failed,
    }
    return to_json(content, indent=1) + "\n"


def write_report(a: Analysis, directory: Path) -> list[Path]:
    """Write report.html, report.md with figures/, the tables and report.json; return the paths."""
    drawn = figures(a)
    _write_figures(drawn, directory / "figures")
    paths = {name: f"figures/{name}.png" for name in drawn}
    of_ledger = ""
    study, plus, _ = a.record["name"].partition("+")
    if plus and a.of_kind(CLAIM):
        path = ledger.path_beside(directory, study)
        of_ledger = ledger.describe(path, a.of_kind(CLAIM)[0].variant)
    text = to_markdown(a, paths, of_ledger=of_ledger, speeds=speed.read_speeds(directory))
    svgs = {paths[name]: to_bytes(figure, "svg") for name, figure in drawn.items()}
    contents = {
        "report.html": to_html(text, a.record["name"], svgs),
        "report.md": text,
        "claims.csv": to_csv(claim_rows(a)),
        "runs.csv": runs_to_csv(a.runs),
        "report.json": to_report_json(a),
    }
    for name, content in contents.items():
        write_text(directory / name, content)
    return [directory / name for name in contents]


def publish(a: Analysis, directory: Path, speeds: Speeds | None = None) -> Path:
    """Write a finished sweep, and its speeds, as a page into a directory such as docs/results; return
    the path of the page.

    Raises:
        UserError: the sweep is not complete, its budget supports no conclusions, its name is not
            that of a file, or a link is in the way.
    """
    name = a.record["name"]
    page = directory / a.record["name"]
    if a.record["budget"] != "full":
        raise UserError(
            f"--publish: the budget {a.record['budget']} supports no conclusions; run --budget full"
        )
    if a.failed:
        raise UserError(f"--publish: runs of {', '.join(a.failed)} failed; finish the sweep first")
    if not is_file_name(name):
        raise UserError(
            f"--publish: the sweep's name {name!r} is not a plain file name; correct sweep.json"
        )
    make_folder(page)
    execution = {key for key, (_, field) in schema().items() if field.metadata["execution"]}
    variants = {name: dict(about) for name, about in a.record["variants"].items()}
    for about in variants.values():
        config = flatten(about.pop("config"))
        # A change that is added later is compared with these.
        if about["arm"] in (a.record["baseline"], PLACEBO):
            about["config"] = {key: value for key, value in config.items() if key not in execution}
    record = a.record | {"variants": variants, "starts": _starts(a)}
    record.pop("sha256", None)
    write_text(page / "sweep.json", to_json(record, indent=1) + "\n")
    write_text(page / "runs.csv", runs_to_csv(a.runs))
    (page / speed.SPEEDS).unlink(missing_ok=True)  # of an earlier page
    if speeds:
        speed.write_speeds(page, speeds)
    return write_page(a, directory)


def read_page(page: Path) -> Analysis:
    """Analyze a published page again, from its sweep.json and runs.csv."""
    record = read_page_record(page)
    runs = runs_from_csv(page / "runs.csv")
    if lacking := [name for name, c in choices_of(record, runs).items() if c.missing]:
        raise UserError(
            f"{page / 'runs.csv'} lacks tuning runs of {', '.join(lacking[:5])} in sweep.json; "
            "restore both"
        )
    return analyze(record, runs)


def write_page(a: Analysis, directory: Path) -> Path:
    """Write directory/NAME.md, and the figures, claims.csv and report.json into directory/NAME;
    return the page.

    Published runs have no curves, so that a figure of them stays as it is.
    """
    name = a.record["name"]
    page = directory / name
    _write_figures(figures(a), page)
    there = [figure for figure in CAPTIONS if (page / f"{figure}.png").is_file()]
    paths = {figure: f"{name}/{figure}.png" for figure in there}
    write_text(page / "claims.csv", to_csv(claim_rows(a)))
    write_text(page / "report.json", to_report_json(a))
    findings = read_others(page, {claim.variant for claim in a.claims})
    notes = page / NOTES
    of_page = read_bytes(notes).decode() if notes.is_file() else ""
    speeds = speed.read_speeds(page)
    text = to_markdown(a, paths, findings, notes=of_page, speeds=speeds)
    write_text(directory / f"{name}.md", text)
    return directory / f"{name}.md"


def _write_figures(drawn: Mapping[str, Any], directory: Path) -> None:
    make_folder(directory)
    for name, figure in drawn.items():
        write_bytes(directory / f"{name}.png", to_bytes(figure, "png"))
