"""Analyze the finished runs of a sweep: results per variant, comparisons, and a sentence for each comparison."""

import dataclasses
import math
import shlex
from pathlib import Path

import numpy as np

from lm.errors import UserError
from lm.sweeps import statistics
from lm.sweeps.multipliers import Saving, answer, savings
from lm.sweeps.optimum import Optimum, estimate_optimum
from lm.sweeps.records import read_sweep
from lm.sweeps.results import (
    STUCK,
    Results,
    at_edge,
    best_rate,
    identical_variants,
    missing_runs,
    rate_from,
    stuck_above,
)


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """One variant at its best learning rate. Losses are on the test split, in nats per token.

    Attributes:
        name: the variant's name.
        grid: the learning rates it could choose from.
        rate: the best one; at_edge: whether it is the first or last of the grid.
        runs: the runs at that rate, one per fresh seed; losses: their test losses, None if diverged.
        n_params, flops: parameters, and training FLOPs per token.
        steps, tokens_per_step: the length of one run.
        loss: mean and interval over seeds; None if a run diverged.
        median: the median loss, where a diverged run counts as infinite.
        sampling_error: standard error of the loss over blocks of text, averaged over the runs; nan if all diverged.
        tokens_per_second: median throughput; nan if not measured, which needs all runs of the sweep to finish.
        quartiles: the quartiles of the throughput.
        n_stuck: how many runs ended above STUCK times the unigram baseline.
        optimum: the estimated minimum over learning rates, between those of the grid.
        rate_from: the variant whose best rate decides on this one's; None: it was tuned.
    """

    name: str
    grid: tuple[float, ...]
    rate: float
    at_edge: bool
    runs: list[dict]
    losses: list[float | None]
    n_params: int
    flops: float
    steps: int
    tokens_per_step: int
    loss: statistics.Interval | None
    median: float
    sampling_error: float
    tokens_per_second: float
    quartiles: tuple[float, float]
    n_stuck: int
    optimum: Optimum
    rate_from: str | None = None

    @property
    def tuning_grid(self) -> tuple[float, ...]:
        """Return the learning rates of the tuning runs."""
        return self.grid if len(self.grid) > 1 and not self.rate_from else ()

    @property
    def n_diverged(self) -> int:
        return self.losses.count(None)

    @property
    def tokens(self) -> int:
        """Return the training tokens of one run."""
        return self.steps * self.tokens_per_step

    @property
    def label(self) -> str:
        """Return the legend entry of the curve that `center` computes."""
        return self.name + " (median)" * (self.n_stuck > 0)

    def center(self, losses: np.ndarray) -> np.ndarray:
        """Return the mean over runs of losses (runs, points), or the median if a run is stuck."""
        return (np.median if self.n_stuck else np.mean)(losses, axis=0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """variant - against on the test split, paired by seed.

    Attributes:
        variant, against: the names of the two variants.
        difference: None if runs of either diverged or failed; `missing` then says which of the two.
        p_adjusted: the p-value after Holm's correction.
        sampling_error: standard error of the difference over the same blocks of text.
        answer: the result in one sentence.
        missing: "runs diverged" or "runs failed" if there is no difference, else "".
        same_tokens: whether both variants trained on the same number of tokens.
        at_optimum: the difference of the estimated minima over learning rates; None if a variant has no estimate.
        p_at_optimum: its p-value after Holm's correction.
    """

    variant: str
    against: str
    difference: statistics.Difference | None
    p_adjusted: float
    sampling_error: float
    answer: str
    missing: str = ""
    same_tokens: bool = True
    at_optimum: statistics.Difference | None = None
    p_at_optimum: float = math.nan

    @property
    def is_significant(self) -> bool:
        """Return whether the difference is significant, and also that at the estimated optima if there is one."""
        if self.difference is None or not self.p_adjusted < 1 - statistics.LEVEL:
            return False
        if self.at_optimum is None:
            return True
        agree = self.at_optimum.mean * self.difference.mean > 0
        return agree and self.p_at_optimum < 1 - statistics.LEVEL


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Everything a report shows.

    Attributes:
        record: sweep.json.
        results: the runs.
        variants: the variants whose runs are complete.
        failed: by name, the error of each variant that is left out because runs of it failed.
        comparisons: the declared comparisons.
        warnings: what a reader should know before trusting the numbers.
        savings: the training compute that variants save, if the sweep has sizes; they are then the claims.
    """

    record: dict
    results: Results
    variants: dict[str, VariantResult]
    failed: dict[str, str]
    comparisons: list[Comparison]
    warnings: list[str]
    savings: list[Saving] = ()

    @property
    def answers(self) -> list[str]:
        """Return one answer per claim: per pair of variants if the sweep has sizes, else per comparison."""
        return [answer(s, self.record) for s in self.savings] or [c.answer for c in self.comparisons]

    @property
    def is_full(self) -> bool:
        """Return whether the budget supports conclusions."""
        return self.record["budget"] == "full"


def analyze(workdir: Path) -> Analysis:
    """Analyze the sweep of a directory; variants whose runs failed are left out with a warning.

    Raises:
        UserError: the directory holds no sweep, or one that is not finished.
    """
    path = workdir / "sweep.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no sweep; give the directory that python -m lm.sweep printed")
    record, results = read_sweep(path), Results(workdir)
    if unknown := {key[1] for key in results.runs} - record["variants"].keys():
        raise UserError(f"{workdir}: results/ has runs of {min(unknown)!r}, which sweep.json does not describe")
    if results.speeds and record["variants"].keys() - results.speeds["variants"].keys():
        raise UserError(f"{workdir}: speeds.json lacks a variant; delete it and rerun the sweep")
    failed = _failed(record, results, workdir)
    variants = {name: _variant(name, record, results) for name in record["variants"] if name not in failed}
    warnings = [f"{name} is left out: runs failed ({error})" for name, error in failed.items()]
    warnings += identical_variants(results, list(variants))
    for a, b in record["comparisons"]:
        if _text(record, a) != _text(record, b):
            warnings.append(f"{a} and {b} use different data or tokenizers: their losses cannot be compared")
    for v in variants.values():
        warnings += _warnings(v, record)
    comparisons = _comparisons(record, variants)
    warnings = list(dict.fromkeys(warnings))
    return Analysis(record, results, variants, failed, comparisons, warnings, savings(record, variants))


def _warnings(v: VariantResult, record: dict) -> list[str]:
    found, n = list(record["variants"][v.name]["data"]["notices"]), len(v.losses)
    if v.at_edge and v.n_diverged < n:
        found.append(
            f"{v.name}: the best learning rate, {v.rate:g}, is at the edge of its grid; a better one may exist"
        )
    if v.n_diverged:
        found.append(f"{v.name}: {v.n_diverged} of {n} runs at learning rate {v.rate:g} diverged")
    if v.n_stuck:
        found.append(
            f"{v.name}: {v.n_stuck} of {n} runs at learning rate {v.rate:g} got stuck: they end above {STUCK} times "
            f"the loss of the unigram baseline (median of all runs: {v.median:.4f})"
        )
    return found


def _text(record: dict, name: str) -> str:
    return record["variants"][name]["data"]["fingerprint"]


def _failed(record: dict, results: Results, workdir: Path) -> dict[str, str]:
    """Return the variants that lack failed runs, and the error; raises UserError if anything else is missing."""
    missing, failures = missing_runs(results, record), results.failures()
    unfinished = [f"{name} lacks runs" for name, keys in missing.items() if not keys <= failures.keys()]
    if not (missing or results.speeds):
        unfinished = ["the throughput is not measured"]
    if unfinished:
        command = shlex.join(["python", "-m", "lm.sweep", *record["starts"][-1]["argv"][1:]])
        raise UserError(f"{workdir} is not finished: {', '.join(unfinished)}; resume with {command}")
    failed = {name: failures[min(keys)].split("\n")[0] for name, keys in missing.items()}
    if failed.keys() == record["variants"].keys():
        raise UserError(f"{workdir}: every variant has runs that failed ({next(iter(failed.values()))})")
    return failed


def _comparisons(record: dict, variants: dict[str, VariantResult]) -> list[Comparison]:
    """Return the declared comparisons; one without a difference still counts in Holm's correction."""
    declared, found = record["comparisons"], []
    pairs = [(variants.get(a), variants.get(b)) for a, b in declared]
    differences = [None if None in pair else _difference(*pair, len(declared)) for pair in pairs]
    at_optimum = [None if None in pair else _difference_at_optimum(*pair, len(declared)) for pair in pairs]
    adjusted, adjusted_at_optimum = (
        statistics.holm([math.nan if d is None else d.p for d in ds]) for ds in (differences, at_optimum)
    )
    for i, (a, b) in enumerate(declared):
        c = Comparison(a, b, differences[i], adjusted[i], math.nan, "", "", True, at_optimum[i], adjusted_at_optimum[i])
        if failed := [name for name in (a, b) if name not in variants]:
            answer = f"{a} against {b}: no result, because runs of {' and '.join(failed)} failed."
            found.append(dataclasses.replace(c, answer=answer, missing="runs failed"))
            continue
        v, w = pairs[i]
        answer = _answer(v, w, c, record)
        if v.tokens != w.tokens:
            answer += f" The two trained on different numbers of tokens: {v.tokens:,} and {w.tokens:,}."
        found.append(
            dataclasses.replace(
                c,
                answer=answer,
                missing="" if c.difference else "runs diverged",
                sampling_error=_paired_sampling_error(v, w),
                same_tokens=v.tokens == w.tokens,
            )
        )
    return found


def _variant(name: str, record: dict, results: Results) -> VariantResult:
    described = record["variants"][name]
    grid, train = described["grid"], described["config"]["train"]
    rate = best_rate(results, record, name)
    runs = [results.runs["final", name, rate, seed] for seed in record["seeds"]]
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
        steps=train["steps"],
        tokens_per_step=train["batch_size"] * train["seq_len"],
        loss=None if None in losses else statistics.interval(losses),
        median=float(np.median([math.inf if loss is None else loss for loss in losses])),
        sampling_error=float(np.mean(errors)) if errors else math.nan,
        tokens_per_second=results.speeds["variants"][name] if results.speeds else math.nan,
        quartiles=tuple(results.speeds["quartiles"][name]) if results.speeds else (math.nan, math.nan),
        n_stuck=sum(loss is not None and loss > stuck_above(record, name, "test") for loss in losses),
        optimum=estimate_optimum(results, record, name, rate),
        rate_from=rate_from(record, name),
    )


def _difference(a: VariantResult, b: VariantResult, comparisons: int) -> statistics.Difference | None:
    if a.n_diverged or b.n_diverged:
        return None
    return statistics.paired_difference(a.losses, b.losses, comparisons)


def _difference_at_optimum(a: VariantResult, b: VariantResult, comparisons: int) -> statistics.Difference | None:
    if a.optimum.missing or b.optimum.missing:
        return None
    return statistics.paired_difference(a.optimum.losses, b.optimum.losses, comparisons)


def _paired_sampling_error(a: VariantResult, b: VariantResult) -> float:
    """Return the sampling error of the difference of two mean losses; text that is hard for both cancels."""
    if a.n_diverged or b.n_diverged:
        return math.nan
    if a.runs[0]["test_counts"] != b.runs[0]["test_counts"]:  # another text or tokenizer: nothing to pair
        return math.hypot(a.sampling_error, b.sampling_error)
    sums = [np.mean([run["test_sums"] for run in v.runs], axis=0) for v in (a, b)]
    return statistics.sampling_error(sums[0] - sums[1], a.runs[0]["test_counts"])


def _answer(a: VariantResult, b: VariantResult, c: Comparison, record: dict) -> str:
    """Return one sentence that the numbers support."""
    n, budget, d = len(a.losses), record["budget"], c.difference
    if budget != "full":
        return f"No conclusion about {a.name} and {b.name}: budget {budget} only checks that the sweep runs."
    if _text(record, a.name) != _text(record, b.name):
        return f"No conclusion about {a.name} and {b.name}: losses on different data or tokens cannot be compared."
    if d is None:
        return (
            f"{a.name} against {b.name}: no mean difference, because runs diverged "
            f"({a.n_diverged} of {n} and {b.n_diverged} of {n}; medians {a.median:.4f} and {b.median:.4f})."
        )
    if d.low == d.high == 0:
        return f"{a.name} and {b.name} end at the same loss for every seed."
    if math.isnan(c.p_adjusted):
        return (
            f"{a.name} - {b.name} is {difference(d.mean)} for every seed: without variation over seeds there is no "
            "p-value."
        )
    return _significant(c) if c.is_significant else _not_significant(a, b, c, record)


def _significant(c: Comparison) -> str:
    d, o = c.difference, c.at_optimum
    at_optimum = (
        f"; at the estimated optima {difference(abs(o.mean), sign='')} {_direction(o)}, {_range(o)}, "
        f"p = {c.p_at_optimum:.2g}"
        if o
        else ""
    )
    return (
        f"{c.variant} ends {difference(abs(d.mean), sign='')} nats per token {_direction(d)} than {c.against} "
        f"(n = {d.n} paired seeds, {_range(d)}, p = {c.p_adjusted:.2g} after Holm's correction{at_optimum})."
    )


def _not_significant(a: VariantResult, b: VariantResult, c: Comparison, record: dict) -> str:
    d, o, level = c.difference, c.at_optimum, 1 - statistics.LEVEL
    remarks = [f"smallest detectable difference {difference(d.detectable, sign='')}"]
    if d.p < level <= c.p_adjusted:
        remarks.append(
            f"this interval alone excludes 0, which is not enough among {len(record['comparisons'])} comparisons"
        )
    if o and (c.p_adjusted < level or c.p_at_optimum < level):
        remarks.append(
            "the differences at the best rates of the grid and at the estimated optima must both be significant, "
            f"with the same sign; at the optima: {difference(o.mean)}, {_range(o)}, p = {c.p_at_optimum:.2g}"
        )
    if a.n_stuck or b.n_stuck:
        remarks.append(
            f"{a.n_stuck} of {d.n} and {b.n_stuck} of {d.n} runs got stuck, medians {a.median:.4f} and {b.median:.4f}"
        )
    return (
        f"No significant difference between {a.name} and {b.name} (n = {d.n} paired seeds, {_range(d)}, "
        f"p = {c.p_adjusted:.2g} after Holm's correction; {'; '.join(remarks)})."
    )


def _direction(d: statistics.Difference) -> str:
    return "lower" if d.mean < 0 else "higher"


def _range(d: statistics.Difference) -> str:
    return f"95 % CI {difference(d.low)} to {difference(d.high)}"


def difference(x: float, sign: str = "+") -> str:
    """Format a difference of losses with four decimals, or with one digit where these would all be 0.

    >>> difference(0.25), difference(-4e-6)
    ('+0.2500', '-4e-06')
    """
    return f"{x:{sign}.4f}" if x == 0 or abs(x) >= 5e-5 else f"{x:{sign}.0e}"


def curve(runs: list[dict]) -> tuple[list[int], np.ndarray]:
    """Return the evaluated steps and the validation losses (runs, steps), nan after a run diverged."""
    steps = sorted({step for run in runs for step, _ in run["validation"]})
    losses = np.full((len(runs), len(steps)), np.nan)
    for i, run in enumerate(runs):
        for step, loss in run["validation"]:
            losses[i, steps.index(step)] = loss
    return steps, losses
