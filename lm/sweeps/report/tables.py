"""The tables of a report, and the text that explains them."""

import collections
import csv
import dataclasses
import io
import math

from lm.sweeps.analysis.answers import describe_looks, describe_placebo, difference
from lm.sweeps.analysis.outcomes import Analysis, Comparison, VariantResult, curve
from lm.sweeps.analysis.sensitivity import sensitivity
from lm.sweeps.design.axes import LEARNING_RATE
from lm.sweeps.design.search import run_length, show_value, trial_of
from lm.sweeps.statistics.inference import CrossedInterval, Difference
from lm.sweeps.storage.results import STUCK
from lm.workdir.provenance import format_command

UNCERTAIN_TRIALS = " Another draw of the trials would change the difference, too; p does not include that."
MAX_STEPS = 10  # columns of the table of validation losses


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        title: its heading.
        header: the names of the columns.
        rows: the cells.
        notes: footnotes, by the column that they explain.
        is_text: whether the cells are sentences rather than numbers.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    is_text: bool = False


# ---- For people ------------------------------------------------------------------------------------------------


def comparisons(a: Analysis) -> Table:
    """Return the declared comparisons."""
    n, optima = len(a.comparisons), any(c.at_optimum for c in a.comparisons)
    margin = f"{a.record['margin']:g}"
    notes = {
        "answer": f"Beyond the margin: the difference is larger than {margin} nats per token, the margin of this "
        "sweep. Different: it is significant, but may be smaller than that. Equivalent: it is smaller. Undecided: none "
        f"of these is shown.{' Every answer needs both estimates, where there are two.' * optima}",
        "difference [95 % CI]": "Mean over seeds of the difference in test loss, in nats per token (negative: the "
        "first variant is better), with its 95 % t interval. Both runs of a pair share the seed: the order of the data "
        "and the initial values of the parameters they have in common. Each interval stands alone, without correction.",
        "p": f"Two-sided paired t test after Holm's correction for {n} comparison{'s' * (n > 1)}; below 0.05 is "
        "significant." + _moderation(a) + UNCERTAIN_TRIALS * bool(a.record["search"]),
        "at the optimum [95 % CI], p": "The same at each variant's estimated optimum: the minimum of the "
        "parabola in log2(learning rate) through the losses at the best rate and its two neighbors, with its jackknife "
        "interval and corrected p-value. A difference is significant if both p-values are below 0.05 and the signs "
        "agree." + _no_optimum(a),
        "detectable [95 % CI]": "The true difference that this test would find in 8 of 10 such sweeps (80 % power), "
        "given the spread over seeds and the correction. Few seeds give the spread, and so this number, only roughly.",
        "pairing": "Variance of the difference, divided by that without pairing: at 0.25, unpaired runs would need "
        "four times as many seeds.",
        "sampling error": "Standard error of the difference over blocks of the test text: how much another text of the "
        "same kind would change it. The first interval does not include it. More seeds do not reduce it, and all "
        "comparisons on this text share it.",
        "over seeds and text [95 % CI]": "The interval of the difference over both sources of error: other seeds, and "
        "another text of the same kind. Without correction for the number of comparisons.",
    }
    rows = [_comparison_row(c) for c in a.comparisons]
    looks = a.record["looks"]
    if len(looks) > 1:
        notes = {"seeds": describe_looks(looks)} | notes
        for row, c in zip(rows, a.comparisons, strict=True):
            row.insert(1, f"{c.n_seeds} (look {c.look})")
    header = ["comparison", *notes]
    if a.placebo:
        name, *cells = _comparison_row(a.placebo)
        rows.append([name, *[f"{a.placebo.n_seeds}"] * (len(looks) > 1), *cells])
        notes = {"comparison": describe_placebo(a.record)} | notes
    return Table("Comparisons at each size (no claims)" if a.savings else "Comparisons", header, rows, notes)


def _comparison_row(c: Comparison) -> list[str]:
    name, d = f"{c.variant} − {c.against}", c.difference
    if not c.same_tokens:
        name += " (different numbers of tokens)"
    if d is None:
        return [name, *[c.missing] * 8]
    at_optimum = f"{with_interval(c.at_optimum)}, {p_value(c.p_at_optimum)}" if c.at_optimum else "no estimate"
    over_text = with_interval(c.over_text) if c.over_text else "other tokens"
    detectable = "{} [{}, {}]".format(*map(_loss, (d.detectable, *d.detectable_range)))
    pairing = "–" if math.isnan(c.pairing) else f"{c.pairing:.2f}"
    numbers = [
        with_interval(d),
        p_value(c.p_adjusted),
        at_optimum,
        detectable,
        pairing,
        _loss(c.sampling_error),
        over_text,
    ]
    return [name, c.verdict, *numbers]


def _moderation(a: Analysis) -> str:
    """Return a sentence on the degrees of freedom of the tests; "" if no variance is moderated."""
    found = [d for c in a.comparisons if (d := c.difference) and d.df > d.n - 1]
    if not found:
        return ""

    def shown(dfs: list[float]) -> str:
        low, high = (f"{df:.3g}" for df in (min(dfs), max(dfs)))
        return low if low == high else f"{low} to {high}"

    return (
        f" The variance is moderated by those of all pairs of variants: {shown([d.df for d in found])} degrees of "
        f"freedom instead of {shown([d.n - 1 for d in found])}."
    )


def with_interval(d: Difference | CrossedInterval) -> str:
    """Format the mean and its interval."""
    return f"{difference(d.mean)} [{difference(d.low)}, {difference(d.high)}]"


def p_value(p: float) -> str:
    """Format a p-value; it is not a number where nothing varies over seeds.

    >>> p_value(0.0123), p_value(math.nan)
    ('0.012', 'undefined')
    """
    return "undefined" if math.isnan(p) else f"{p:.2g}"


def _no_optimum(a: Analysis) -> str:
    """Return sentences on the variants that have no estimate of the optimum, why, and what follows."""
    names = collections.defaultdict(list)
    for v in a.variants.values():
        if v.optimum.missing:
            names[v.optimum.missing].append(v.name)
    text = "".join(f" No estimate for {', '.join(found)}: {reason}." for reason, found in names.items())
    if any(c.leaves_out_tuning for c in [*a.comparisons, *([a.placebo] if a.placebo else [])]):
        text += " A comparison of tuned variants without it makes no claim."
    return text


def losses(a: Analysis) -> Table:
    """Return the test loss of each variant at its best learning rate."""
    header = ["variant", "learning rate", "test loss [95 % CI]", "bits per byte"]
    header += ["sd over seeds", "sampling error", "diverged", "stuck"]
    rows = []
    for v in a.variants.values():
        loss, sd = f"median {_loss(v.median)}", "runs diverged"
        if v.loss:
            loss, sd = f"{v.loss.mean:.4f} [{v.loss.low:.4f}, {v.loss.high:.4f}]", _loss(v.loss.sd)
        error = "runs diverged" if math.isnan(v.sampling_error) else _loss(v.sampling_error)
        rate, n = show_value(v.rate) if a.record["search"] else f"{v.rate:g}", len(v.losses)
        rate += _extrapolated(v) + " (edge)" * v.at_edge
        bits = "not known" if math.isnan(v.bits_per_byte) else f"{v.bits_per_byte:.4f}"
        rows.append([v.name, rate, loss, bits if v.loss else "runs diverged", sd, error])
        rows[-1] += [f"{v.n_diverged} of {n}", f"{v.n_stuck} of {n}"]
    tuned = not a.record["search"] and any(len(v.grid) > 1 for v in a.variants.values())
    notes = {
        "learning rate": (
            "The best of the grid on the validation split, with tuning seeds that are used for nothing else: the "
            "fewest diverged or stuck runs, then the lowest mean loss."
            if tuned
            else "That of the best trial: see Tuning."
            if a.record["search"]
            else "Given by the sweep; there was nothing to choose."
        )
        + " (extrapolated): that of another size, scaled; there were no tuning runs."
        * any(map(_extrapolated, a.variants.values()))
        + " (edge): the first or last of the grid." * any(v.at_edge for v in a.variants.values()),
        "test loss [95 % CI]": "Mean over fresh seeds, in nats per token, with its 95 % t interval; the median where a "
        "run diverged. Every token of the test split is predicted once.",
        "bits per byte": "The mean loss in bits, times the tokens per UTF-8 byte of the test text, so that it does not "
        "depend on the tokenizer.",
        "sd over seeds": "Standard deviation: what another seed changes.",
        "sampling error": "Standard error over blocks of the test text: what another text of the same kind changes.",
        "diverged": "A loss or an update was not finite.",
        "stuck": f"Ended above {STUCK} times the loss of the unigram baseline, which predicts each token from the "
        f"token counts of the training text alone. {unigram_baseline(a)}",
    }
    where = "in the best trial" if a.record["search"] else "at the best learning rate"
    return Table(f"Test loss {where}", header, rows, notes)


def _extrapolated(v: VariantResult) -> str:
    return " (extrapolated)" if v.rate_from else ""


def curves(a: Analysis) -> Table:
    """Return the mean validation loss of each variant at up to MAX_STEPS of the evaluated steps."""
    found = {name: curve(v.runs) for name, v in a.variants.items()}
    steps = sorted({step for own, _ in found.values() for step in own})
    n = min(MAX_STEPS, len(steps))
    steps = [steps[round((i + 1) * len(steps) / n) - 1] for i in range(n)]
    rows = []
    for name, (own, values) in found.items():
        v = a.variants[name]
        means = dict(zip(own, v.center(values), strict=True))
        rows.append([v.label, *(_loss(means.get(step, math.nan)) for step in steps)])
    header = ["variant", *(f"step {step:,}" for step in steps)]
    where = "in the best trial" if a.record["search"] else "at the best learning rate"
    median = " The median where a run got stuck." * any(v.n_stuck for v in a.variants.values())
    gaps = " –: not evaluated at this step, or a run had diverged." * any("–" in row for row in rows)
    notes = {"variant": f"Mean over the fresh seeds {where}.{median}{gaps}"}
    return Table("Validation loss during training", header, rows, notes)


def changes(record: dict) -> Table:
    """Return the changes of the base config that each variant makes."""
    rows = [[name, _changes(v, record["search"])] for name, v in record["variants"].items()]
    return Table("Variants", ["variant", "changes"], rows, is_text=True)


def _changes(variant: dict, search: dict | None) -> str:
    changes = {key: value for key, value in variant["changes"].items() if key != "optimizer.learning_rate"}
    if "model.d_ff" in changes:
        changes["model.d_ff"] = variant["config"]["model"]["d_ff"]
    rates = "learning rates " + ", ".join(f"{rate:g}" for rate in variant["grid"])
    rates += f" around the best of {variant['rate_from']}" if variant.get("rate_from") else ""
    rates = f"{len(search['trials'])} random trials" if search else rates
    return ", ".join([*(f"{key} = {value}" for key, value in changes.items()), rates])


def base(record: dict) -> str:
    """Return the base config and the values that the sweep and its budget change for all variants."""
    return ", ".join([record["base"], *(f"{key} = {value}" for key, value in record["values"].items())])


def background(record: dict) -> str:
    """Return the docstring of the sweep file without paragraphs that begin with "Result": they are of an earlier run.

    >>> background({"background": "Do gates help?\\n\\nResult: not significantly.\\n\\nSee Shazeer 2020."})
    'Do gates help?\\n\\nSee Shazeer 2020.'
    """
    return "\n\n".join(part for part in record["background"].split("\n\n") if not part.startswith("Result"))


def unigram_baseline(a: Analysis) -> str:
    """Return the loss of the unigram baseline on each text of the sweep."""
    found = {}
    for v in a.record["variants"].values():
        parts = [f"{loss:.4f} on {split}" for split, loss in v["data"]["unigram"].items() if loss is not None]
        found[v["data"]["fingerprint"]] = f"{v['data']['name']}: {', '.join(parts)}"
    return f"Unigram baseline: {'; '.join(found.values())}."


def _loss(value: float) -> str:
    if math.isnan(value):
        return "–"
    return "infinite" if math.isinf(value) else difference(value, sign="")


# ---- For programs ----------------------------------------------------------------------------------------------


def variant_rows(a: Analysis) -> list[dict]:
    """Return one row per variant, numbers unrounded."""
    rows = []
    for v in a.variants.values():
        rows.append(
            {
                "variant": v.name,
                "parameters": v.n_params,
                "flops_per_token": v.flops,
                "learning_rate": v.rate,
                "runs": len(v.losses),
                "diverged": v.n_diverged,
                "stuck": v.n_stuck,
                "test_loss": v.loss.mean if v.loss else None,
                "test_loss_low": v.loss.low if v.loss else None,
                "test_loss_high": v.loss.high if v.loss else None,
                "test_loss_median": v.median,
                "bits_per_byte": v.bits_per_byte,
                "sd_over_seeds": v.loss.sd if v.loss else None,
                "sampling_error": v.sampling_error,
                "tokens_per_second": v.tokens_per_second,
                "tokens_per_second_low": v.quartiles[0],
                "tokens_per_second_high": v.quartiles[1],
                "tokens": v.tokens,
                "learning_rate_sensitivity": sensitivity(a.results, a.record, v.name),
            }
        )
    return rows


def run_rows(a: Analysis) -> list[dict]:
    """Return one row per run, tuning included."""
    names = ("phase", "variant", "learning_rate", "seed", "status", "diverged_at", "steps", "val_loss", "test_loss")
    runs = a.results.runs.values()
    return [{name: run[name] for name in names} | _trial(a.record, run) | _machine(run) for run in runs]


def _trial(record: dict, run: dict) -> dict:
    """Return the number of a run's trial and the values that it drew; empty without a search."""
    if not record["search"]:
        return {}
    number, values = trial_of(record, run["learning_rate"])
    return {"trial": number} | {key: value for key, value in values.items() if key != LEARNING_RATE}


def _machine(run: dict) -> dict:
    """Return where a run was trained; empty for runs of older versions."""
    p = run["provenance"]
    if p is None:
        return dict.fromkeys(("processor", "device", "commit"))
    return {"processor": p["processor"], "device": p["device"], "commit": _commit(p["git"])}


def to_csv(rows: list[dict]) -> str:
    """Return rows as CSV text; "" without rows."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# ---- Reproduction ----------------------------------------------------------------------------------------------


def code(started: dict) -> tuple[str, str]:
    """Return the commit and the versions of one start of a command."""
    versions = ", ".join(f"{name} {version}" for name, version in started["versions"].items() if version)
    return f"commit {_commit(started['git'])}", f"versions {versions}"


def _commit(git: dict | None) -> str:
    return f"{git['commit']}{' with uncommitted changes' if git['dirty'] else ''}" if git else "unknown"


def reproduction(a: Analysis) -> list[str]:
    """Return all that is needed to repeat the sweep, a line each; the commits and machines of all starts, each once."""
    r, last = a.record, a.record["starts"][-1]
    lengths = collections.Counter(_length(r, run) for run in a.results.runs.values())
    data = {(v["data"]["name"], v["data"]["fingerprint"][:12]) for v in r["variants"].values()}
    return [
        format_command("lm.sweep", last["argv"][1:]),
        *dict.fromkeys(line for started in r["starts"] for line in code(started)),
        *dict.fromkeys(f"device {s['device']}, {s['processor']}, {s['platform']}" for s in r["starts"]),
        "data " + ", ".join(f"{name} (fingerprint {digest}...)" for name, digest in sorted(data)),
        *(f"{n} runs of {length}" for length, n in lengths.items()),
        *_seeds(r),
    ]


def _seeds(r: dict) -> list[str]:
    """Return the seeds and looks of a sweep, a line for each size that has seeds of its own."""
    fresh, tuning = r["seeds"], r["tuning_seeds"]
    if isinstance(fresh, dict):
        return [f"size {size}: seeds {fresh[size]}, tuning seeds {tuning[size]}" for size in fresh]
    looks = f" looks {r['looks']}," * (len(r["looks"]) > 1)
    return [f"seeds {fresh},{looks} tuning seeds {tuning}"]


def _length(record: dict, run: dict) -> str:
    steps, batch_size = run_length(record, run["variant"], run["learning_rate"])
    seq_len = record["variants"][run["variant"]]["config"]["train"]["seq_len"]
    tokens = steps * batch_size * seq_len
    return f"{steps} steps of {batch_size} x {seq_len} tokens, {tokens:,} tokens each"
