"""What a sweep found: python -m lm.report sweeps/swiglu_vs_silu-full

Writes report.html (one self-contained page), report.md, variants.csv, runs.csv and the pictures into the sweep's
directory; --publish DIR also copies the Markdown, the pictures and runs.csv there, of a full budget that
is whole.
"""

import argparse
import base64
import html
import sys
from pathlib import Path

from lm.errors import TemporaryError, UserError
from lm.files import write_text
from lm.sweeps import tables
from lm.sweeps.analysis import Analysis, analyse

CAPTIONS = {
    "differences": "Differences in test loss, paired by seed. Ticks: seeds. Bars: 95 % t intervals, each by itself: "
    "among several, one that leaves out 0 is not yet a finding.",
    "curves": "Validation loss of the best learning rate; bands: 95 % intervals over seeds; dotted, where it is in "
    "reach: counting tokens alone.",
    "learning_rates": "Validation loss at the end of training over the learning rate.",
    "equal_cost": "The second half of the learning curves over what they cost; all of them, on a logarithmic axis, "
    "where one costs more than twice another.",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lm.report", description="Tables and pictures of a sweep.")
    parser.add_argument("sweep", metavar="SWEEP_DIR", help="the directory that python -m lm.sweep printed")
    parser.add_argument(
        "--publish", metavar="DIR", help="copy the Markdown, the pictures and runs.csv there (docs/results)"
    )
    arguments = parser.parse_args(argv)
    workdir = Path(arguments.sweep)
    try:
        a = analyse(workdir)
        if arguments.publish and not a.claims:
            raise UserError(
                f"--publish: the budget was {a.record['budget']}, which makes no claim; run the full budget"
            )
        if arguments.publish and a.failed:
            raise UserError(f"--publish: runs of {', '.join(a.failed)} failed; finish the sweep")
        write_report(a, workdir, arguments.publish and Path(arguments.publish))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    except OSError as error:  # a full disk, a directory that is none
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return TemporaryError.code
    return 0


def write_report(a: Analysis, workdir: Path, publish: Path | None) -> None:
    from lm.sweeps.figures import figures, to_bytes

    drawn = figures(a)
    svgs = {name: to_bytes(figure, "svg") for name, figure in drawn.items()}
    pngs = {name: to_bytes(figure, "png") for name, figure in drawn.items()}
    (workdir / "figures").mkdir(exist_ok=True)
    for name, content in pngs.items():
        (workdir / "figures" / f"{name}.png").write_bytes(content)
    write_text(workdir / "variants.csv", tables.to_csv(tables.variant_rows(a)))
    write_text(workdir / "runs.csv", tables.to_csv(tables.run_rows(a)))
    write_text(workdir / "report.md", to_markdown(a, "figures/"))
    write_text(workdir / "report.html", to_html(a, svgs))
    print("\n".join(c.answer for c in a.comparisons))
    print(f"{workdir / 'report.html'}  {workdir / 'report.md'}  {workdir / 'variants.csv'}  {workdir / 'runs.csv'}")
    if publish:
        name = a.record["name"]
        (publish / name).mkdir(parents=True, exist_ok=True)
        write_text(publish / f"{name}.md", to_markdown(a, f"{name}/"))
        write_text(publish / name / "runs.csv", tables.to_csv(tables.run_rows(a)))
        for picture, content in pngs.items():
            (publish / name / f"{picture}.png").write_bytes(content)
        print(publish / f"{name}.md")


def to_markdown(a: Analysis, figures: str) -> str:
    """The report as Markdown; `figures` is put before the names of the pictures."""

    def table(rows: list[list[str]]) -> str:
        lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    r = a.record
    parts = [
        f"# {r['name']}",
        *([] if a.claims else [f"**No claim: budget {r['budget']}.** It proves the machinery, no more."]),
        f"**Question.** {r['question']}",
        f"**Answer.** {a.comparisons[0].answer}",
        *(f"* {c.answer}" for c in a.comparisons[1:]),
        *(f"* Notice: {notice}" for notice in a.notices),
        table(tables.comparisons(a)),
        f"![differences]({figures}differences.png)\n\n{CAPTIONS['differences']}",
        table(tables.variants(a)),
        tables.notes(a),
        table(tables.curves(a)),
        *([table(rates)] if (rates := tables.rates(a)) else []),
        *(f"![{name}]({figures}{name}.png)\n\n{CAPTIONS[name]}" for name in list(CAPTIONS)[1:]),
        f"**Background**, in the words of the sweep's file:\n\n{r['background']}",
        f"Base: {tables.base(r)}. Changed:",
        table(tables.changes(r)),
        "To repeat it:",
        "```\n" + "\n".join(tables.repetition(a)) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } figcaption { font-size: 0.85rem; color: #555; }
figure img { max-width: 100%; }
.claim { font-size: 1.15rem; } .none { background: #fff3cd; padding: 0.5rem 1rem; }
pre { background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: 0.8rem; }
.words { white-space: pre-wrap; }
.wide { overflow-x: auto; }
"""


def to_html(a: Analysis, svgs: dict[str, bytes]) -> str:
    """One page with everything in it."""

    def table(rows: list[list[str]]) -> str:
        def line(cells, tag):
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        return (
            "<div class=wide><table>"
            + line(rows[0], "th")
            + "".join(line(r, "td") for r in rows[1:])
            + "</table></div>"
        )

    def figure(name: str) -> str:
        source = "data:image/svg+xml;base64," + base64.b64encode(svgs[name]).decode()
        return (
            f'<figure><img src="{source}" alt="{name}"><figcaption>{html.escape(CAPTIONS[name])}</figcaption></figure>'
        )

    r = a.record
    none = "" if a.claims else f"<p class=none>No claim: budget {r['budget']}. It proves the machinery, no more.</p>"
    others = "".join(f"<li>{html.escape(c.answer)}</li>" for c in a.comparisons[1:])
    others += "".join(f"<li>Notice: {html.escape(notice)}</li>" for notice in a.notices)
    body = [
        f"<h1>{html.escape(r['name'])}</h1>{none}<p><b>{html.escape(r['question'])}</b></p>",
        f"<p class=claim>{html.escape(a.comparisons[0].answer)}</p><ul>{others}</ul>",
        table(tables.comparisons(a)), figure("differences"), table(tables.variants(a)),
        f"<p>{html.escape(tables.notes(a))}</p>", table(tables.curves(a)),
        table(rates) if (rates := tables.rates(a)) else "",
        *(figure(name) for name in list(CAPTIONS)[1:]),
        f"<h2>Background</h2><div class=words>{html.escape(r['background'])}</div>",
        f"<h2>What was changed</h2><p>Base: {html.escape(tables.base(r))}</p>", table(tables.changes(r)),
        "<h2>To repeat it</h2><pre>" + html.escape("\n".join(tables.repetition(a))) + "</pre>",
        "<h2>Base config of each variant</h2>",
        *(f"<details><summary>{html.escape(n)}</summary><pre>{html.escape(_pretty(v['config']))}</pre></details>"
          for n, v in r["variants"].items()),
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><title>{html.escape(r["name"])}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _pretty(config: dict) -> str:
    from lm.config import flatten

    return "\n".join(f"config.{key} = {value!r}" for key, value in flatten(config).items())


if __name__ == "__main__":
    sys.exit(main())
