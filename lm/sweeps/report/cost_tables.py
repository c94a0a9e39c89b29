"""The tables of a report about the cost of training, and its last part: speeds and dates."""

import math
from collections.abc import Callable

import numpy as np

from lm.sweeps.analysis.answers import difference
from lm.sweeps.analysis.outcomes import Analysis, VariantResult, curve
from lm.sweeps.analysis.scope import tokens_per_parameter
from lm.sweeps.report.tables import Table

SPEEDS = "Speeds and dates"  # the title of the only part of a report that differs when the same runs are trained again

# What one training token of a variant costs.
EQUAL_COSTS: dict[str, Callable[[VariantResult], float]] = {
    "loss at equal FLOPs": lambda v: v.flops,
    "loss at equal time": lambda v: 1 / v.tokens_per_second,
}


def costs(a: Analysis) -> Table:
    """Return the cost of training each variant, and the losses at equal FLOPs if learning rates are constant."""
    header = ["variant", "parameters", "tokens per parameter", "FLOPs/token"]
    rows = []
    for v in a.variants.values():
        per_parameter = tokens_per_parameter(a.record["variants"][v.name])
        rows.append([v.name, f"{v.n_params:,}", per_parameter, f"{v.flops:,.0f}"])
    notes = {
        "tokens per parameter": "Training tokens of one run.",
        "FLOPs/token": "Training FLOPs, forward and backward.",
    }
    if len({v.tokens for v in a.variants.values()}) > 1:
        header.insert(2, "tokens per run")
        for row, v in zip(rows, a.variants.values(), strict=True):
            row.insert(2, f"{v.tokens:,}")
    note = (
        "Validation loss (mean over seeds, interpolated) at the cost of the cheapest complete run among the variants "
        "that comparisons connect. The learning rate is constant, so a run that stops there is complete. "
        '"Too early": before its first evaluation.'
    )
    return _with_loss(a, Table("Cost", header, rows, notes), "loss at equal FLOPs", note)


def speeds(a: Analysis) -> Table:
    """Return the measured throughput of each variant, and the losses at equal time if learning rates are constant."""
    rows = []
    for v in a.variants.values():
        measured = not math.isnan(v.tokens_per_second)
        speed = "{:,.0f} ({:,.0f} to {:,.0f})".format(v.tokens_per_second, *v.quartiles)
        rows.append([v.name, speed if measured else "not measured"])
    notes = {"tokens/s": "Median (quartiles) of 9 measurements with all devices busy, the variants taking turns."}
    table = Table(SPEEDS, ["variant", "tokens/s"], rows, notes)
    return _with_loss(a, table, "loss at equal time", "As at equal FLOPs, but at equal training time.")


def dates(a: Analysis) -> list[str]:
    """Return when the sweep was started, how long its runs took, and how fast the devices were, a line each."""
    runs = a.results.runs.values()
    seconds = math.fsum(run["seconds"] for run in runs)
    shares = {task: 0.0 for run in runs for task in run["seconds_of"] or ()}
    for task in shares:
        shares[task] = math.fsum((run["seconds_of"] or {}).get(task, 0.0) for run in runs) / seconds
    by_task = ", ".join(f"{share:.0%} {task}" for task, share in shares.items())
    return [
        f"last started {a.record['starts'][-1]['time']}; {seconds / 60:,.0f} minutes of training in total"
        + (f" ({by_task})" if by_task else ""),
        speedup(a),
    ]


def speedup(a: Analysis) -> str:
    """Return the speedup from training several runs at once."""
    speeds, baseline = a.results.speeds, a.record["baseline"]
    if not speeds:
        return "throughput not measured"
    if speeds["at_once"] == 1:
        return "speeds were measured one run at a time"
    ratio = speeds["variants"][baseline] / speeds["alone"]
    return f"{speeds['at_once']} runs of {baseline} at once: {ratio:.2f} times the tokens/s of one at a time"


def _with_loss(a: Analysis, table: Table, name: str, note: str) -> Table:
    """Return a table of the variants with the column of EQUAL_COSTS of that name, if learning rates are constant."""
    if not is_constant(a.record):
        return table
    found = [loss_at_equal(a, v, EQUAL_COSTS[name]) for v in a.variants.values()]
    cells = [loss if isinstance(loss, str) else difference(loss, sign="") for loss in found]
    rows = [[*row, cell] for row, cell in zip(table.rows, cells, strict=True)]
    return Table(table.title, [*table.header, name], rows, table.notes | {name: note})


def is_constant(record: dict) -> bool:
    """Return whether no variant's learning rate decays, so that the beginning of a run is itself a complete run."""
    return all(v["config"]["optimizer"]["schedule"] == "constant" for v in record["variants"].values())


def loss_at_equal(a: Analysis, v: VariantResult, cost_per_token: Callable[[VariantResult], float]) -> float | str:
    """Return the mean validation loss at the cost of the cheapest variant that comparisons connect with this one.

    Args:
        a: the sweep.
        v: the variant.
        cost_per_token: a function of EQUAL_COSTS.

    Returns:
        The loss, interpolated linearly between evaluations; a reason if there is none.
    """
    connected = [a.variants[name] for name in connected_variants(a, v.name) if name in a.variants]
    runs = [w.tokens * cost_per_token(w) for w in connected]
    budget = min((cost for cost in runs if cost), default=0)  # a variant that does not train costs nothing
    steps, values = curve(v.runs)
    if v.n_diverged:
        return "runs diverged"
    if math.isnan(budget):
        return "not measured"
    if not v.steps or not steps:
        return "not trained"
    costs = np.array(steps) * v.tokens_per_step * cost_per_token(v)
    return "too early" if budget < costs[0] else float(np.interp(budget, costs, values.mean(axis=0)))


def connected_variants(a: Analysis, name: str) -> set[str]:
    """Return a variant and all variants that chains of comparisons connect with it."""
    found, before = {name}, set()
    while found != before:
        before = set(found)
        found |= {end for pair in a.record["comparisons"] for end in pair if before & set(pair)}
    return found
