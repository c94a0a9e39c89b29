"""From a sweep's finished runs to what they say: per variant, per comparison, and in one sentence each."""

import dataclasses
import json
import math
import shlex
from pathlib import Path

import numpy as np

from lm.errors import UserError
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
    tokens_per_second: float  # not a number if some runs of the sweep failed: speeds are measured when all are there
    quartiles: tuple[float, float]  # of it, over the rounds in which it was measured
    n_stuck: int  # runs that finished, but at a loss above STUCK times that of counting tokens alone

    @property
    def n_diverged(self) -> int:
        return self.losses.count(None)

    @property
    def label(self) -> str:
        """Beside its curve, which is that of `middle`."""
        return self.name + " (median)" * (self.n_stuck > 0)

    def middle(self, losses: np.ndarray) -> np.ndarray:
        """Of losses (runs, points): their mean, or the median where a stuck run would draw the mean away."""
        return (np.median if self.n_stuck else np.mean)(losses, axis=0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """variant - against on the test split, paired by seed."""

    variant: str
    against: str
    difference: statistics.Difference | None  # None if runs of either diverged or failed
    p_adjusted: float
    sampling_error: float  # of the difference, over the same blocks of text
    answer: str
    lost: str  # why there is no difference


@dataclasses.dataclass(frozen=True)
class Analysis:
    record: dict  # sweep.json
    results: Results
    variants: dict[str, VariantResult]
    failed: dict[str, str]  # the variants that are not there because runs of theirs failed, and how
    comparisons: list[Comparison]
    notices: list[str]

    @property
    def claims(self) -> bool:
        return self.record["budget"] == "full"


def analyse(workdir: Path) -> Analysis:
    """Raises UserError where there is no sweep, or one that is not finished; variants of which runs failed are told."""
    path = workdir / "sweep.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no sweep; give the directory that python -m lm.sweep printed")
    record, results = json.loads(path.read_text(encoding="utf-8")), Results(workdir)
    failed = _failed(record, results, workdir)
    variants = {name: _variant(name, record, results) for name in record["variants"] if name not in failed}
    notices = [f"{name} is left out: runs failed ({error})" for name, error in failed.items()]
    notices += identical(results, list(variants))
    for a, b in record["comparisons"]:
        if _text(record, a) != _text(record, b):
            notices.append(f"{a} and {b} have other data or tokenizers: their losses cannot be compared")
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
    return Analysis(record, results, variants, failed, _comparisons(record, variants), list(dict.fromkeys(notices)))


def _text(record: dict, name: str) -> str:
    return record["variants"][name]["data"]["fingerprint"]


def _failed(record: dict, results: Results, workdir: Path) -> dict[str, str]:
    """The variants that lack runs because they failed, and how; raises UserError where anything else is missing."""
    lacking, failures = missing(results, record), results.failures()
    unfinished = [f"{name} lacks runs" for name, keys in lacking.items() if not keys <= failures.keys()]
    if not (lacking or results.speeds):
        unfinished = ["speeds are not measured"]
    if unfinished:
        begun = shlex.join(["python", "-m", "lm.sweep", *record["starts"][-1]["argv"][1:]])
        raise UserError(f"{workdir} is not finished: {', '.join(unfinished)}; go on with {begun}")
    failed = {name: failures[min(keys)].split("\n")[0] for name, keys in lacking.items()}
    if failed.keys() == record["variants"].keys():
        raise UserError(f"{workdir}: every variant has runs that failed ({next(iter(failed.values()))})")
    return failed


def _comparisons(record: dict, variants: dict[str, VariantResult]) -> list[Comparison]:
    """What the sweep declared; a comparison without a difference counts in Holm's correction all the same."""
    declared, found = record["comparisons"], []
    differences = [
        _difference(variants[a], variants[b], len(declared)) if {a, b} <= variants.keys() else None for a, b in declared
    ]
    adjusted = statistics.holm([math.nan if d is None else d.p for d in differences])
    for (a, b), d, p in zip(declared, differences, adjusted, strict=True):
        if gone := [name for name in (a, b) if name not in variants]:
            answer = f"{a} against {b}: not known, because runs of {' and '.join(gone)} failed."
            found.append(Comparison(a, b, None, p, math.nan, answer, "runs failed"))
        else:
            v, w, lost = variants[a], variants[b], "" if d else "runs diverged"
            found.append(Comparison(a, b, d, p, _paired_sampling_error(v, w), _answer(v, w, d, p, record), lost))
    return found


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
        tokens_per_second=results.speeds["variants"][name] if results.speeds else math.nan,
        quartiles=tuple(results.speeds["quartiles"][name]) if results.speeds else (math.nan, math.nan),
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
    if _text(record, a.name) != _text(record, b.name):
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
