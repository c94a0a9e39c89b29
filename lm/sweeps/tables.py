"""What a sweep found in numbers and words: the rows of its tables, how to read them, and what repeats it."""

import collections
import csv
import io
import math

import numpy as np

from lm.sweeps.analysis import Analysis, VariantResult, curve, difference, tokens_per_step
from lm.sweeps.results import STUCK, tuned
from lm.training.workdir import format_command

COLUMNS = 10  # of the table of validation losses: what fits beside the longest names


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
                "stuck": v.n_stuck,
                "test_loss": v.loss.mean if v.loss else None,
                "test_loss_low": v.loss.low if v.loss else None,
                "test_loss_high": v.loss.high if v.loss else None,
                "test_loss_median": v.median,
                "sd_over_seeds": v.loss.sd if v.loss else None,
                "sampling_error": v.sampling_error,
                "loss_at_equal_flops": at_equal(a, v, lambda w: w.flops),
                "loss_at_equal_time": at_equal(a, v, lambda w: 1 / w.tokens_per_second),
                "tokens_per_second": v.tokens_per_second,
                "tokens_per_second_low": v.quartiles[0],
                "tokens_per_second_high": v.quartiles[1],
                "tokens": t["steps"] * t["batch_size"] * t["seq_len"],
            }
        )
    return rows


def at_equal(a: Analysis, v: VariantResult, cost_per_token) -> float | None:
    """The mean validation loss at what the cheapest of the variants it is compared with costs, by linear interpolation.

    None where that is before the first validation, a run diverged, or the costs are not known.
    """
    n_steps = {name: a.record["variants"][name]["config"]["train"]["steps"] for name in a.variants}
    rivals = [a.variants[name] for name in compared_with(a, v.name) if name in a.variants]
    whole = [n_steps[w.name] * tokens_per_step(a, w) * cost_per_token(w) for w in rivals]
    budget = min((cost for cost in whole if cost), default=0)  # what trains nothing costs nothing
    steps, losses = curve(v.runs)
    if v.n_diverged or not n_steps[v.name] or not steps or math.isnan(budget):
        return None
    costs = np.array(steps) * tokens_per_step(a, v) * cost_per_token(v)
    return None if budget < costs[0] else float(np.interp(budget, costs, losses.mean(axis=0)))


def compared_with(a: Analysis, name: str) -> set[str]:
    """The variants that comparisons connect with one, and itself."""
    found, before = {name}, set()
    while found != before:
        before = set(found)
        found |= {end for pair in a.record["comparisons"] for end in pair if before & set(pair)}
    return found


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


def number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "infinite" if math.isinf(value) else difference(value, sign="")


def variants(a: Analysis) -> list[list[str]]:
    """The heading and a row for each variant."""
    rows = [
        [
            "variant", "parameters", "FLOPs/token", "learning rate", "test loss, mean [95 % interval]",
            "sd over seeds", "sampling error", "at equal FLOPs", "at equal time", "tokens/s", "diverged", "stuck",
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
                number(row["loss_at_equal_time"]),
                "–" if math.isnan(v.tokens_per_second) else
                "{:,.0f} ({:,.0f} to {:,.0f})".format(v.tokens_per_second, *v.quartiles),
                f"{v.n_diverged} of {len(v.losses)}", f"{v.n_stuck} of {len(v.losses)}",
            ]
        )  # fmt: skip
    return rows


def curves(a: Analysis) -> list[list[str]]:
    """The heading and a row for each variant: its mean validation loss, at up to COLUMNS steps of the sweep.

    Of a variant of which runs got stuck the median, as in the pictures.
    """
    found = {name: curve(v.runs) for name, v in a.variants.items()}
    steps = sorted({step for own, _ in found.values() for step in own})
    n = min(COLUMNS, len(steps))
    steps = [steps[round((i + 1) * len(steps) / n) - 1] for i in range(n)]
    rows = [["validation loss after step", *(f"{step:,}" for step in steps)]]
    for name, (own, losses) in found.items():
        middle = dict(zip(own, a.variants[name].middle(losses), strict=True))
        rows.append([a.variants[name].label, *(number(middle.get(step)) for step in steps)])
    return rows


def rates(a: Analysis) -> list[list[str]]:
    """The heading and a row for each variant with a choice: what chose its rate, as in lm.sweeps.results.choose.

    Empty where no variant had a choice.
    """
    rows = []
    for v in a.variants.values():
        means = []
        for rate in v.grid if len(v.grid) > 1 else ():
            n_diverged, n_stuck, loss = tuned(a.results, a.record, v.name, rate)
            said = ", ".join([f"{n_diverged} diverged"] * (n_diverged > 0) + [f"{n_stuck} stuck"] * (n_stuck > 0))
            shown = said if math.isinf(loss) else number(loss) + f" ({said})" * bool(said)
            means.append(f"{rate:g}: {shown}" + " (best)" * (rate == v.rate))
        if means:
            rows.append([v.name, ", ".join(means)])
    return [["variant", "validation loss at each learning rate, mean of the tuning seeds"], *rows] if rows else []


def unigram_line(a: Analysis) -> str:
    """What counting tokens alone reaches on each text of the sweep."""
    losses = {}
    for v in a.record["variants"].values():
        parts = [f"{loss:.4f} on {split}" for split, loss in v["data"]["unigram"].items() if loss is not None]
        losses[v["data"]["fingerprint"]] = f"{v['data']['name']}: {', '.join(parts)}"
    return f"Counting tokens alone (unigrams plus one) gives for {'; '.join(losses.values())}."


def comparisons(a: Analysis) -> list[list[str]]:
    """The heading and a row for each declared comparison."""
    rows = [["comparison", "difference [95 % interval]", "p (Holm)", "sampling error", "detectable"]]
    for c in a.comparisons:
        d = c.difference
        shown = c.lost if d is None else "{} [{}, {}]".format(*map(difference, (d.mean, d.low, d.high)))
        p = "–" if math.isnan(c.p_adjusted) else f"{c.p_adjusted:.2g}"
        rows.append(
            [f"{c.variant} − {c.against}", shown, p, number(c.sampling_error), number(d.detectable if d else None)]
        )
    return rows


def notes(a: Analysis) -> str:
    """How the tables are to be read."""
    chosen = "every run in the tables above has a fresh seed"
    if any(len(v.grid) > 1 for v in a.variants.values()):
        chosen = (
            "where there was a choice of learning rates it was made on the validation split by other seeds (the fewest "
            f"diverged or stuck, then the lowest mean of the others); {chosen}"
        )
    return (
        f"Losses are of the test split in nats per token, every token predicted once; {chosen}. Differences are paired "
        "by seed: same data order and, for shared parameters, same initial values; t intervals, each by itself; p "
        "after Holm's correction over the comparisons that the sweep declared. Seeds and text are two sources of error "
        "and are told apart: sd over seeds, and sampling error, the standard error over blocks of the test text (what "
        "another text of the same kind would change). Detectable: the true difference that 8 of 10 such sweeps would "
        "have found, at the first step of that correction. At equal FLOPs or time: validation loss at the cost of the "
        "whole run of the cheapest one among the variants that comparisons connect, where the schedule of a dearer one "
        "has not come to its end. Tokens/s: with all devices busy, measured at the end with the variants taking turns; "
        "median and quartiles of 9 rounds, which tell how noisy the machine was. Stuck: ended above "
        f"{STUCK} times the loss of counting tokens alone. {unigram_line(a)}"
    )


def code(started: dict) -> tuple[str, str]:
    """The commit and the versions of one start; a sweep that was continued may have several."""
    git = started["git"]
    commit = f"{git['commit']}{' with uncommitted changes' if git['dirty'] else ''}" if git else "unknown"
    versions = ", ".join(f"{name} {version}" for name, version in started["versions"].items() if version)
    return f"commit {commit}", f"versions {versions}"


def repetition(a: Analysis) -> list[str]:
    """Everything needed to repeat the sweep, a line each."""
    r, last = a.record, a.record["starts"][-1]
    seconds = sum(run["seconds"] for run in a.results.found.values())
    lengths = collections.Counter(_length(r["variants"][run["variant"]]["config"]) for run in a.results.found.values())
    data = {(v["data"]["name"], v["data"]["fingerprint"][:12]) for v in r["variants"].values()}
    return [
        format_command("lm.sweep", last["argv"][1:]),
        *dict.fromkeys(line for started in r["starts"] for line in code(started)),
        f"device {r['device']}, {last['processor']}, {last['platform']}; last started {last['time']}",
        "data " + ", ".join(f"{name} (fingerprint {digest}...)" for name, digest in sorted(data)),
        *(f"{n} runs of {length}" for length, n in lengths.items()),
        f"seeds {r['seeds']}, for tuning {r['tuning_seeds']}; {seconds / 60:,.0f} minutes in all",
        speed_up(a),
    ]


def _length(config: dict) -> str:
    t = config["train"]
    tokens = t["steps"] * t["batch_size"] * t["seq_len"]
    return f"{t['steps']} steps of {t['batch_size']} x {t['seq_len']} tokens, {tokens:,} tokens each"


def speed_up(a: Analysis) -> str:
    """What training runs together was worth."""
    speeds, baseline = a.results.speeds, a.record["baseline"]
    if not speeds:
        return "no speeds were measured: runs failed"
    ratio = speeds["variants"][baseline] / speeds["alone"]
    return f"{speeds['at_once']} runs of {baseline} at once: {ratio:.2f} times the tokens/s of one at a time"


def base(record: dict) -> str:
    """The base config and what the sweep and its budget change in it for all variants."""
    return ", ".join([record["base"], *(f"{key} = {value}" for key, value in record["values"].items())])


def changes(record: dict) -> list[list[str]]:
    """The heading and what each variant changes in the base."""
    return [["variant", "what it changes"], *([name, _changes(v)] for name, v in record["variants"].items())]


def _changes(variant: dict) -> str:
    changes = {key: value for key, value in variant["changes"].items() if key != "optimizer.learning_rate"}
    if "model.d_ff" in changes:
        changes["model.d_ff"] = variant["config"]["model"]["d_ff"]
    rates = "learning rates " + ", ".join(f"{rate:g}" for rate in variant["grid"])
    return ", ".join([*(f"{key} = {value}" for key, value in changes.items()), rates])
