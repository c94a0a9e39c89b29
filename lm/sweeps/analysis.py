"""From a sweep's finished runs to what they say: per variant, per comparison, and in one sentence each."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from lm.errors import UserError
from lm.runs import command
from lm.sweeps import statistics
from lm.sweeps.results import STUCK, Results, at_edge, choose, identical, missing, stuck_above


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """One variant at its best learning rate; losses are of the test split in nats per token, None if diverged."""

    name: str
    grid: tuple[float, ...]  # the learning rates that it chose from
    rate: float
    at_edge: bool  # the best rate is the first or last of its grid: a better one may lie beyond
    runs: list[dict]  # at the best rate, by fresh seed
    losses: list[float | None]
    n_params: int
    flops: float
    loss: statistics.Interval | None  # None if a run diverged: its mean would not mean anything
    median: float  # a diverged run counts as infinite
    sampling_error: float  # of the test loss, over blocks of text; the mean over the runs that finished
    tokens_per_second: float
    quartiles: tuple[float, float]  # of it, over the rounds in which it was measured
    n_stuck: int  # runs that finished, but at a loss above STUCK times that of counting tokens alone

    @property
    def n_diverged(self) -> int:
        return self.losses.count(None)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """variant - against on the test split, paired by seed; difference is None if a run of either diverged."""

    variant: str
    against: str
    difference: statistics.Difference | None
    p_adjusted: float
    sampling_error: float  # of the difference, over the same blocks of text
    answer: str


@dataclasses.dataclass(frozen=True)
class Analysis:
    record: dict  # sweep.json
    results: Results
    variants: dict[str, VariantResult]
    comparisons: list[Comparison]
    notices: list[str]

    @property
    def claims(self) -> bool:
        return self.record["budget"] == "full"


def analyse(workdir: Path) -> Analysis:
    """Raises UserError where there is no sweep, or one that is not finished.

    A variant whose runs failed is left out with its comparisons, which still count in Holm's correction.
    """
    path = workdir / "sweep.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no sweep; give the directory that python -m lm.sweep printed")
    record, results = json.loads(path.read_text(encoding="utf-8")), Results(workdir)
    declared = len(record["comparisons"])
    record, notices = _without_what_failed(record, results, workdir)
    variants = {name: _variant(name, record, results) for name in record["variants"]}
    pairs = [(variants[a], variants[b]) for a, b in record["comparisons"]]
    differences = [_difference(a, b, declared) for a, b in pairs]
    lost = [math.nan] * (declared - len(pairs))
    adjusted = statistics.holm([math.nan if d is None else d.p for d in differences] + lost)[: len(pairs)]
    comparisons = [
        Comparison(a.name, b.name, d, p, _paired_sampling_error(a, b), _answer(a, b, d, p, record))
        for (a, b), d, p in zip(pairs, differences, adjusted, strict=True)
    ]
    notices += identical(results, list(variants))
    for a, b in pairs:
        if _text(record, a) != _text(record, b):
            notices.append(f"{a.name} and {b.name} have other data or tokenizers: their losses cannot be compared")
    for v in variants.values():
        notices += dict.fromkeys(record["variants"][v.name]["data"]["notices"])
        if v.at_edge and v.n_diverged < len(v.losses):
            notices.append(f"{v.name}: the best learning rate, {v.rate:g}, is at the edge of its grid")
        if v.n_diverged:
            notices.append(f"{v.name}: {v.n_diverged} of {len(v.losses)} runs at learning rate {v.rate:g} diverged")
        if v.n_stuck:
            notices.append(
                f"{v.name}: {v.n_stuck} of {len(v.losses)} runs at learning rate {v.rate:g} got stuck: they end above "
                f"{STUCK} times the loss of counting tokens alone (median of all {v.median:.4f})"
            )
    return Analysis(record, results, variants, comparisons, list(dict.fromkeys(notices)))


def _text(record: dict, v: VariantResult) -> str:
    return record["variants"][v.name]["data"]["fingerprint"]


def _without_what_failed(record: dict, results: Results, workdir: Path) -> tuple[dict, list[str]]:
    """The record and the results of the variants that are whole, and notices of the others, whose runs failed."""
    lacking, failures = missing(results, record), results.failures()
    left = {name: v for name, v in record["variants"].items() if name not in lacking}
    pairs = [pair for pair in record["comparisons"] if set(pair) <= left.keys()]
    whole = not lacking.keys() - failures.keys() and record["baseline"] in left and pairs
    if not (whole and results.speeds_of(left)):
        what = ", ".join(
            f"{name} lacks {n} runs" + (f" (failed: {failures[name]})" if name in failures else "")
            for name, n in lacking.items()
        )
        begun = command("lm.sweep", record["starts"][-1]["argv"][1:])
        raise UserError(
            f"{workdir} is not finished: {what or 'speeds are not measured'}; what began it goes on: {begun}"
        )
    results.found = {key: run for key, run in results.found.items() if key[1] in left}
    notices = [f"{name} and its comparisons are left out: runs failed ({failures[name]})" for name in lacking]
    return record | {"variants": left, "comparisons": pairs}, notices


def _variant(name: str, record: dict, results: Results) -> VariantResult:
    described = record["variants"][name]
    grid = described["grid"]
    rate = choose(results, record, name)
    runs = [results.found["final", name, rate, seed] for seed in record["seeds"]]
    losses = [run["test_loss"] for run in runs]
    errors = [statistics.sampling_error(run["test_sums"], run["test_counts"]) for run in runs if run["test_sums"]]
    return VariantResult(
        name=name,
        grid=tuple(grid),
        rate=rate,
        at_edge=at_edge(grid, rate),
        runs=runs,
        losses=losses,
        n_params=described["n_params"],
        flops=described["flops_per_token"],
        loss=None if None in losses else statistics.interval(losses),
        median=float(np.median([math.inf if loss is None else loss for loss in losses])),
        sampling_error=float(np.mean(errors)) if errors else math.nan,
        tokens_per_second=results.speeds["variants"][name],
        quartiles=tuple(results.speeds["quartiles"][name]),
        n_stuck=sum(loss is not None and loss > stuck_above(record, name, "test") for loss in losses),
    )


def _difference(a: VariantResult, b: VariantResult, comparisons: int) -> statistics.Difference | None:
    if a.n_diverged or b.n_diverged:
        return None
    return statistics.paired_difference(a.losses, b.losses, comparisons)


def _paired_sampling_error(a: VariantResult, b: VariantResult) -> float:
    """Of the difference of two mean losses: what is hard for both cancels."""
    if a.n_diverged or b.n_diverged:
        return math.nan
    if a.runs[0]["test_counts"] != b.runs[0]["test_counts"]:  # another text or tokenizer: nothing to pair
        return math.hypot(a.sampling_error, b.sampling_error)
    sums = [np.mean([run["test_sums"] for run in v.runs], axis=0) for v in (a, b)]
    return statistics.sampling_error(sums[0] - sums[1], a.runs[0]["test_counts"])


def _answer(a: VariantResult, b: VariantResult, d, p: float, record: dict) -> str:
    """One sentence that the numbers support."""
    n, budget = len(a.losses), record["budget"]
    if budget != "full":
        return f"No claim about {a.name} and {b.name}: the budget was {budget}, which only proves the machinery."
    if _text(record, a) != _text(record, b):
        return f"No claim about {a.name} and {b.name}: losses on other data or tokens cannot be compared."
    if d is None:
        return (
            f"{a.name} against {b.name}: no mean difference, because runs diverged "
            f"({a.n_diverged} of {n} and {b.n_diverged} of {n}; medians {a.median:.4f} and {b.median:.4f})."
        )
    if math.isnan(p):
        return (
            f"{a.name} - {b.name} is {difference(d.mean)} for every seed: one measurement, of which no p-value follows."
        )
    if d.low == d.high == 0:
        return f"{a.name} and {b.name} end at the same loss for every seed."
    range_ = f"95 % CI {difference(d.low)} to {difference(d.high)}"
    if p < 1 - statistics.LEVEL:
        direction = "lower" if d.mean < 0 else "higher"
        return (
            f"{a.name} ends {difference(abs(d.mean), sign='')} nats per token {direction} than {b.name} "
            f"(n = {n} paired seeds, {range_}, p = {p:.2g} after Holm's correction)."
        )
    detectable = f"a difference of {difference(d.detectable, sign='')} would have been found in 8 of 10 such sweeps"
    if d.p < 1 - statistics.LEVEL:
        detectable += f"; this interval alone excludes 0, too little among {len(record['comparisons'])} comparisons"
    if a.n_stuck or b.n_stuck:
        detectable += (
            f"; {a.n_stuck} of {n} and {b.n_stuck} of {n} runs got stuck, medians {a.median:.4f} and {b.median:.4f}"
        )
    return (
        f"No difference found between {a.name} and {b.name} at n = {n} ({range_}, p = {p:.2g} after Holm's "
        f"correction; {detectable})."
    )


def difference(x: float, sign: str = "+") -> str:
    """A difference of losses with four decimals, or with one digit where it would be none of them."""
    return f"{x:{sign}.4f}" if x == 0 or abs(x) >= 5e-5 else f"{x:{sign}.0e}"


def curve(runs: list[dict]) -> tuple[list[int], np.ndarray]:
    """(steps, losses (runs, points)) of the runs' validations; nan where a run had diverged."""
    steps = sorted({step for run in runs for step, _ in run["validation"]})
    losses = np.full((len(runs), len(steps)), np.nan)
    for i, run in enumerate(runs):
        for step, loss in run["validation"]:
            losses[i, steps.index(step)] = loss
    return steps, losses


def tokens_per_step(a: Analysis, v: VariantResult) -> int:
    t = a.record["variants"][v.name]["config"]["train"]
    return t["batch_size"] * t["seq_len"]
