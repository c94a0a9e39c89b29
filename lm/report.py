"""What a sweep found: python -m lm.report sweeps/swiglu_vs_silu-full

Writes report.html (one self-contained page), report.md, variants.csv, runs.csv and the pictures into the sweep's
directory; --publish DIR also copies the Markdown and the pictures there, from full budgets only.
"""

import argparse
import base64
import csv
import html
import io
import math
import shlex
import sys
from pathlib import Path

import numpy as np

from lm.errors import UserError
from lm.files import write_text
from lm.sweeps.analysis import Analysis, VariantResult, analyse, curve, difference, tokens_per_step

CAPTIONS = {
    "differences": "Differences in test loss, paired by seed. Ticks: seeds. Bars: 95 % t intervals, uncorrected.",
    "curves": "Validation loss of the best learning rate; bands: 95 % intervals over seeds; dotted, where it is in "
    "reach: counting tokens alone.",
    "learning_rates": "Validation loss at the end of training over the learning rate.",
    "equal_cost": "The second half of the learning curves over what they cost.",
}

COLUMNS = 8  # of the table of validation losses


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lm.report", description="Tables and pictures of a sweep.")
    parser.add_argument("sweep", metavar="SWEEP_DIR", help="the directory that python -m lm.sweep printed")
    parser.add_argument("--publish", metavar="DIR", help="copy the Markdown and the pictures there (docs/results)")
    arguments = parser.parse_args(argv)
    workdir = Path(arguments.sweep)
    try:
        a = analyse(workdir)
        if arguments.publish and not a.claims:
            raise UserError(
                f"--publish: the budget was {a.record['budget']}, which makes no claim; run the full budget"
            )
        write_report(a, workdir, arguments.publish and Path(arguments.publish))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


def write_report(a: Analysis, workdir: Path, publish: Path | None) -> None:
    from lm.sweeps.figures import figures, to_bytes

    drawn = figures(a)
    svgs = {name: to_bytes(figure, "svg") for name, figure in drawn.items()}
    pngs = {name: to_bytes(figure, "png") for name, figure in drawn.items()}
    (workdir / "figures").mkdir(exist_ok=True)
    for name, content in pngs.items():
        (workdir / "figures" / f"{name}.png").write_bytes(content)
    write_text(workdir / "variants.csv", to_csv(variant_rows(a)))
    write_text(workdir / "runs.csv", to_csv(run_rows(a)))
    write_text(workdir / "report.md", to_markdown(a, "figures/"))
    write_text(workdir / "report.html", to_html(a, svgs))
    print("\n".join(c.answer for c in a.comparisons))
    print(f"{workdir / 'report.html'}  {workdir / 'report.md'}  {workdir / 'variants.csv'}  {workdir / 'runs.csv'}")
    if publish:
        name = a.record["name"]
        (publish / name).mkdir(parents=True, exist_ok=True)
        write_text(publish / f"{name}.md", to_markdown(a, f"{name}/"))
        write_text(publish / name / "runs.csv", to_csv(run_rows(a)))
        for picture, content in pngs.items():
            (publish / name / f"{picture}.png").write_bytes(content)
        print(publish / f"{name}.md")


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def variant_rows(a: Analysis) -> list[dict]:
    """One row a variant, numbers unrounded."""
    rows = []
    for v in a.variants.values():
        t = a.record["variants"][v.name]["config"]["train"]
        rows.append(
            {
                "variant": v.name,
                "parameters": v.n_params,
                "flops_per_token": v.flops,
                "learning_rate": v.rate,
                "runs": len(v.losses),
                "diverged": v.n_diverged,
                "test_loss": v.loss.mean if v.loss else None,
                "test_loss_low": v.loss.low if v.loss else None,
                "test_loss_high": v.loss.high if v.loss else None,
                "test_loss_median": v.median,
                "sd_over_seeds": v.loss.sd if v.loss else None,
                "sampling_error": v.sampling_error,
                "loss_at_equal_flops": at_equal(a, v, lambda w: w.flops),
                "loss_at_equal_time": at_equal(a, v, lambda w: 1 / w.tokens_per_second),
                "tokens_per_second": v.tokens_per_second,
                "tokens": t["steps"] * t["batch_size"] * t["seq_len"],
            }
        )
    return rows


def at_equal(a: Analysis, v: VariantResult, cost_per_token) -> float | None:
    """The mean validation loss at the cost that the cheapest variant's whole training has, by linear interpolation.

    None where that is before the first validation, or a run diverged.
    """
    budget = min(
        a.record["variants"][w.name]["config"]["train"]["steps"] * tokens_per_step(a, w) * cost_per_token(w)
        for w in a.variants.values()
    )
    steps, losses = curve(v.runs)
    if v.n_diverged or not steps:
        return None
    costs = np.array(steps) * tokens_per_step(a, v) * cost_per_token(v)
    return None if budget < costs[0] else float(np.interp(budget, costs, losses.mean(axis=0)))


def run_rows(a: Analysis) -> list[dict]:
    """One row a run, tuning included."""
    names = ("phase", "variant", "learning_rate", "seed", "status", "diverged_at", "steps", "val_loss", "test_loss")
    return [{name: run[name] for name in names} for run in a.results.found.values()]


def to_csv(rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# ---- Tables ----------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "infinite" if math.isinf(value) else difference(value, sign="")


def variant_table(a: Analysis) -> list[list[str]]:
    """The heading and a row for each variant."""
    rows = [
        [
            "variant", "parameters", "FLOPs/token", "learning rate", "test loss, mean [95 % interval]",
            "sd over seeds", "sampling error", "at equal FLOPs", "at equal time", "tokens/s", "diverged",
        ]
    ]  # fmt: skip
    for v, row in zip(a.variants.values(), variant_rows(a), strict=True):
        loss = f"median {number(v.median)}"
        if v.loss:
            loss = f"{v.loss.mean:.4f} [{v.loss.low:.4f}, {v.loss.high:.4f}]"
        rows.append(
            [
                v.name, f"{v.n_params:,}", f"{v.flops:,.0f}", f"{v.rate:g}" + (" (edge)" if v.at_edge else ""), loss,
                number(row["sd_over_seeds"]), number(v.sampling_error), number(row["loss_at_equal_flops"]),
                number(row["loss_at_equal_time"]), f"{v.tokens_per_second:,.0f}", f"{v.n_diverged} of {len(v.losses)}",
            ]
        )  # fmt: skip
    return rows


def curve_table(a: Analysis) -> list[list[str]]:
    """The heading and a row for each variant: its mean validation loss, at up to COLUMNS steps of the sweep."""
    curves = {name: curve(v.runs) for name, v in a.variants.items()}
    steps = sorted({step for found, _ in curves.values() for step in found})
    n = min(COLUMNS, len(steps))
    steps = [steps[round((i + 1) * len(steps) / n) - 1] for i in range(n)]
    rows = [["validation loss after step", *(f"{step:,}" for step in steps)]]
    for name, (found, losses) in curves.items():
        means = dict(zip(found, losses.mean(axis=0), strict=True))
        rows.append([name, *(number(means.get(step)) for step in steps)])
    return rows


def unigram_line(a: Analysis) -> str:
    """What counting tokens alone reaches on each text of the sweep."""
    losses = {}
    for v in a.record["variants"].values():
        parts = [f"{loss:.4f} on {split}" for split, loss in v["data"]["unigram"].items() if loss is not None]
        losses[v["data"]["fingerprint"]] = f"{v['data']['name']}: {', '.join(parts)}"
    return f"Counting tokens alone (unigrams plus one) gives for {'; '.join(losses.values())}."


def comparison_table(a: Analysis) -> list[list[str]]:
    """The heading and a row for each declared comparison."""
    rows = [["comparison", "difference [95 % interval]", "p (Holm)", "sampling error", "detectable"]]
    for c in a.comparisons:
        d = c.difference
        shown = "runs diverged" if d is None else "{} [{}, {}]".format(*map(difference, (d.mean, d.low, d.high)))
        p = "–" if math.isnan(c.p_adjusted) else f"{c.p_adjusted:.2g}"
        rows.append(
            [f"{c.variant} − {c.against}", shown, p, number(c.sampling_error), number(d.detectable if d else None)]
        )
    return rows


NOTES = (
    "Losses are of the test split in nats per token, every token predicted once; learning rates were chosen on the "
    "validation split with tuning seeds of their own, and every run in these tables has a fresh seed. Differences are "
    "paired by seed: same data order and, for shared parameters, same initial values; t intervals, each by itself; p "
    "after Holm's correction over the comparisons that the sweep declared. Seeds and text are two sources of error "
    "and are told apart: sd over seeds, and sampling error, the standard error over blocks of the test text (what "
    "another text of the same kind would change). Detectable: the true difference that 8 of 10 such sweeps would have "
    "found, at the first step of that correction. At equal FLOPs or time: validation loss at the cost of the cheapest "
    "variant's whole run. Tokens/s: with all devices busy, measured at the end with the variants taking turns "
    "(medians of 9 rounds)."
)


def headline(a: Analysis) -> str:
    return a.comparisons[0].answer


def _code(started: dict) -> tuple[str, str]:
    """The commit and the versions of one start; a sweep that was continued may have several."""
    git = started["git"]
    commit = f"{git['commit']}{' with uncommitted changes' if git['dirty'] else ''}" if git else "unknown"
    versions = ", ".join(f"{name} {version}" for name, version in started["versions"].items() if version)
    return f"commit {commit}", f"versions {versions}"


def repetition(a: Analysis) -> list[str]:
    """Everything needed to repeat the sweep, a line each."""
    r, last = a.record, a.record["starts"][-1]
    seconds = sum(run["seconds"] for run in a.results.found.values())
    t = r["variants"][r["baseline"]]["config"]["train"]
    data = {(v["data"]["name"], v["data"]["fingerprint"][:12]) for v in r["variants"].values()}
    return [
        f"python -m lm.sweep --config configs/sweeps/{r['name']}.py --budget {r['budget']}",
        "started as: python -m lm.sweep " + shlex.join(_relative(last["argv"][1:])),
        *dict.fromkeys(line for started in r["starts"] for line in _code(started)),
        f"device {r['device']}, {last['platform']}; last started {last['time']}",
        "data " + ", ".join(f"{name} (fingerprint {digest}...)" for name, digest in sorted(data)),
        f"{len(a.results.found)} runs of {t['steps']} steps of {t['batch_size']} x {t['seq_len']} tokens, "
        f"{t['steps'] * t['batch_size'] * t['seq_len']:,} tokens each; "
        f"seeds {r['seeds']}, for tuning {r['tuning_seeds']}; {seconds / 60:,.0f} minutes in all",
        speed_up(a),
    ]


def speed_up(a: Analysis) -> str:
    """What training runs together was worth."""
    speeds, baseline = a.results.speeds, a.record["baseline"]
    ratio = speeds["variants"][baseline] / speeds["alone"]
    return f"{speeds['at_once']} runs of {baseline} at once: {ratio:.2f} times the tokens/s of one at a time"


def _relative(arguments: list[str]) -> list[str]:
    """Command-line arguments without the directories of the machine they were typed on."""
    parts = [a.rpartition("=") for a in arguments]  # --key=/directory too
    return [key + equals + (Path(value).name if value.startswith("/") else value) for key, equals, value in parts]


def to_markdown(a: Analysis, figures: str) -> str:
    """The report as Markdown; `figures` is put before the names of the pictures."""

    def table(rows: list[list[str]]) -> str:
        lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    r = a.record
    changes = [["variant", "what it changes"]]
    changes += [[name, _changes(v)] for name, v in r["variants"].items()]
    parts = [
        f"# {r['name']}",
        *([] if a.claims else [f"**No claim: budget {r['budget']}.** It proves the machinery, no more."]),
        f"**Question.** {r['question']}",
        f"**Answer.** {headline(a)}",
        *(f"* {c.answer}" for c in a.comparisons[1:]),
        *(f"* Notice: {notice}" for notice in a.notices),
        table(comparison_table(a)),
        f"![differences]({figures}differences.png)",
        table(variant_table(a)),
        f"{NOTES} {unigram_line(a)}",
        table(curve_table(a)),
        *(f"![{name}]({figures}{name}.png)\n\n{CAPTIONS[name]}" for name in list(CAPTIONS)[1:]),
        f"Base: {_base(r)}. Changed:",
        table(changes),
        "To repeat it:",
        "```\n" + "\n".join(repetition(a)) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _base(record: dict) -> str:
    """The base config and what the sweep and its budget change in it for all variants."""
    return ", ".join([record["base"], *(f"{key} = {value}" for key, value in record["values"].items())])


def _changes(variant: dict) -> str:
    changes = {key: value for key, value in variant["changes"].items() if key != "optimizer.learning_rate"}
    if "model.d_ff" in changes:
        changes["model.d_ff"] = variant["config"]["model"]["d_ff"]
    rates = "learning rates " + ", ".join(f"{rate:g}" for rate in variant["grid"])
    return ", ".join([*(f"{key} = {value}" for key, value in changes.items()), rates])


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } figcaption { font-size: 0.85rem; color: #555; }
figure img { max-width: 100%; }
.claim { font-size: 1.15rem; } .none { background: #fff3cd; padding: 0.5rem 1rem; }
pre { background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: 0.8rem; }
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
    changes = [["variant", "what it changes"]] + [[name, _changes(v)] for name, v in r["variants"].items()]
    none = "" if a.claims else f"<p class=none>No claim: budget {r['budget']}. It proves the machinery, no more.</p>"
    others = "".join(f"<li>{html.escape(c.answer)}</li>" for c in a.comparisons[1:])
    others += "".join(f"<li>Notice: {html.escape(notice)}</li>" for notice in a.notices)
    body = [
        f"<h1>{html.escape(r['name'])}</h1>{none}<p><b>{html.escape(r['question'])}</b></p>",
        f"<p class=claim>{html.escape(headline(a))}</p><ul>{others}</ul>",
        table(comparison_table(a)), figure("differences"), table(variant_table(a)),
        f"<p>{html.escape(NOTES)} {html.escape(unigram_line(a))}</p>", table(curve_table(a)),
        *(figure(name) for name in list(CAPTIONS)[1:]),
        f"<h2>What was changed</h2><p>Base: {html.escape(_base(r))}</p>", table(changes),
        "<h2>To repeat it</h2><pre>" + html.escape("\n".join(repetition(a))) + "</pre>",
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
