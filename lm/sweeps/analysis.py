"""Analyze the finished runs of a sweep: results per variant and comparisons."""

import dataclasses
import math
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lm.errors import UserError
from lm.sweeps import statistics
from lm.sweeps.answers import describe_answer
from lm.sweeps.axes import size_of
from lm.sweeps.margins import p_beyond, p_equivalent
from lm.sweeps.moderation import NO_PRIOR, fit_prior
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
    mixed_machines,
    ordered,
    rate_from,
    stuck_above,
)
from lm.sweeps.scope import describe_scope
from lm.sweeps.statistics import CrossedInterval, Difference


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
        bits_per_byte: of the mean loss; nan if a run diverged or the bytes of the test text are not known.
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
    bits_per_byte: float
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
    def did_not_train(self) -> bool:
        """Return whether all runs got stuck, but for those that diverged."""
        return self.n_stuck > 0 and self.n_stuck + self.n_diverged == len(self.losses)

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
        difference: None if runs of either diverged or failed, or if all got stuck; `missing` then says which of them.
        p_adjusted: the p-value after Holm's correction.
        sampling_error: standard error of the difference over the same blocks of text.
        answer: the result in one sentence, and what it holds for.
        missing: "runs diverged", "runs failed" or "did not train" if there is no difference, else "".
        same_tokens: whether both variants trained on the same number of tokens.
        at_optimum: the difference of the estimated minima over learning rates; None if a variant has no estimate.
        p_at_optimum: its p-value after Holm's correction.
        p_beyond, p_equivalent: p-values of the tests in `lm.sweeps.margins` after Holm's correction; with an estimate
            at the optimum, the larger one of both estimates, because an answer needs both.
        pairing: the variance of the difference, divided by that without pairing.
        verdict: "beyond the margin", "different", "equivalent" or "undecided", else why there is none of them.
        over_text: the difference with its interval over other seeds and other text; None as for `difference`, or if
            the two were tested on different tokens.
    """

    variant: str
    against: str
    difference: Difference | None
    p_adjusted: float
    sampling_error: float
    answer: str
    missing: str = ""
    same_tokens: bool = True
    at_optimum: Difference | None = None
    p_at_optimum: float = math.nan
    p_beyond: float = math.nan
    p_equivalent: float = math.nan
    pairing: float = math.nan
    verdict: str = ""
    over_text: CrossedInterval | None = None

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
    results.runs = ordered(results.runs, record)
    if results.speeds and record["variants"].keys() - results.speeds["variants"].keys():
        raise UserError(f"{workdir}: speeds.json lacks a variant; delete it and rerun the sweep")
    failed = _failed(record, results, workdir)
    variants = {name: _variant(name, record, results) for name in record["variants"] if name not in failed}
    warnings = [f"{name} is left out: runs failed ({error})" for name, error in failed.items()]
    warnings += identical_variants(results, list(variants))
    warnings += mixed_machines(results, record["comparisons"])
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
    declared, found, margin = record["comparisons"], [], record["margin"]
    differences = _differences(record, variants, lambda v: None if v.n_diverged or v.did_not_train else v.losses)
    at_optimum = _differences(record, variants, lambda v: v.optimum.losses)
    adjusted, adjusted_at_optimum = (_adjusted(ds, lambda d: d.p) for ds in (differences, at_optimum))
    beyond = _adjusted_of_both(differences, at_optimum, lambda d: p_beyond(d, margin))
    equivalent = _adjusted_of_both(differences, at_optimum, lambda d: p_equivalent(d, margin))
    for i, (a, b) in enumerate(declared):
        c = Comparison(a, b, differences[i], adjusted[i], math.nan, "", "", True, at_optimum[i], adjusted_at_optimum[i])
        if failed := [name for name in (a, b) if name not in variants]:
            answer = f"{a} against {b}: no result, because runs of {' and '.join(failed)} failed."
            found.append(dataclasses.replace(c, answer=answer, missing="runs failed", verdict="runs failed"))
            continue
        v, w = variants[a], variants[b]
        missing = "did not train" if v.did_not_train or w.did_not_train else "runs diverged"
        c = dataclasses.replace(
            c,
            missing="" if c.difference else missing,
            sampling_error=_paired_sampling_error(v, w),
            same_tokens=v.tokens == w.tokens,
            p_beyond=beyond[i],
            p_equivalent=equivalent[i],
            pairing=_pairing(v, w),
            over_text=_interval_over_text(v, w),
        )
        c = dataclasses.replace(c, verdict=_verdict(c, record))
        found.append(dataclasses.replace(c, answer=describe_answer(v, w, c, record) + _scope(c, record)))
    return found


def _differences(record: dict, variants: dict[str, VariantResult], losses: Callable) -> list[Difference | None]:
    """Return the difference of each declared comparison, None where a variant is missing or has no losses.

    The variants of the same size on the same text whose runs all trained give the prior of the variances: runs of two
    sizes have less noise in common.
    """
    usable = {name: found for name, v in variants.items() if (found := losses(v)) is not None}
    trained = [name for name in usable if not variants[name].n_stuck]
    like = {name: (_text(record, name), size_of(name, record.get("sizes") or ())) for name in trained}
    priors = {key: fit_prior([usable[name] for name in trained if like[name] == key]) for key in set(like.values())}
    found, n = [], len(record["comparisons"])
    for a, b in record["comparisons"]:
        prior = priors[like[a]] if {a, b} <= like.keys() and like[a] == like[b] else NO_PRIOR
        both = {a, b} <= usable.keys()
        found.append(statistics.paired_difference(usable[a], usable[b], n, prior) if both else None)
    return found


def _adjusted(differences: list[Difference | None], p: Callable[[Difference], float]) -> list[float]:
    """Return the p-values after Holm's correction."""
    return statistics.holm([math.nan if d is None else p(d) for d in differences])


def _adjusted_of_both(differences, at_optimum, p: Callable[[Difference], float]) -> list[float]:
    """Return the larger one of the corrected p-values at the best rate and, if there is one, at the optimum."""
    at_rate = _adjusted(differences, p)
    at_optimum = [x if o is None else y for x, o, y in zip(at_rate, at_optimum, _adjusted(at_optimum, p), strict=True)]
    return np.maximum(at_rate, at_optimum).tolist()  # nan where one of the two is


def _verdict(c: Comparison, record: dict) -> str:
    """Return the `verdict` of a comparison whose tests are done."""
    level = 1 - statistics.LEVEL
    if record["budget"] != "full" or _text(record, c.variant) != _text(record, c.against):
        return "no conclusion"
    if c.difference is None:
        return c.missing
    if c.difference.sd == 0:
        return "equal losses" if c.difference.mean == 0 else "no p-value"
    if c.is_significant and c.p_beyond < level:
        return "beyond the margin"
    if c.p_equivalent < level:
        return "equivalent"
    return "different" if c.is_significant else "undecided"


def _pairing(a: VariantResult, b: VariantResult) -> float:
    """Return the variance of the paired difference divided by that of unpaired runs, the sum of both variances."""
    if a.loss is None or b.loss is None:
        return math.nan
    unpaired = a.loss.sd**2 + b.loss.sd**2
    return float(np.var(np.subtract(a.losses, b.losses), ddof=1)) / unpaired if unpaired > 0 else math.nan


def _variant(name: str, record: dict, results: Results) -> VariantResult:
    described = record["variants"][name]
    grid, train = described["grid"], described["config"]["train"]
    rate = best_rate(results, record, name)
    runs = [results.runs["final", name, rate, seed] for seed in record["seeds"]]
    losses = [run["test_loss"] for run in runs]
    errors = [statistics.sampling_error(run["test_sums"], run["test_counts"]) for run in runs if run["test_sums"]]
    bytes_per_token = described["data"].get("test_bytes_per_token")  # sweeps of older versions lack it
    mean = None if None in losses else statistics.interval(losses)
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
        loss=mean,
        median=float(np.median([math.inf if loss is None else loss for loss in losses])),
        sampling_error=float(np.mean(errors)) if errors else math.nan,
        tokens_per_second=results.speeds["variants"][name] if results.speeds else math.nan,
        quartiles=tuple(results.speeds["quartiles"][name]) if results.speeds else (math.nan, math.nan),
        n_stuck=sum(loss is not None and loss > stuck_above(record, name, "test") for loss in losses),
        bits_per_byte=mean.mean / math.log(2) / bytes_per_token if mean and bytes_per_token else math.nan,
        optimum=estimate_optimum(results, record, name, rate),
        rate_from=rate_from(record, name),
    )


def _paired_sampling_error(a: VariantResult, b: VariantResult) -> float:
    """Return the sampling error of the difference of two mean losses; text that is hard for both cancels."""
    if a.n_diverged or b.n_diverged:
        return math.nan
    if a.runs[0]["test_counts"] != b.runs[0]["test_counts"]:  # another text or tokenizer: nothing to pair
        return math.hypot(a.sampling_error, b.sampling_error)
    sums = [np.mean([run["test_sums"] for run in v.runs], axis=0) for v in (a, b)]
    return statistics.sampling_error(sums[0] - sums[1], a.runs[0]["test_counts"])


def _interval_over_text(a: VariantResult, b: VariantResult) -> CrossedInterval | None:
    if a.n_diverged or b.n_diverged or a.runs[0]["test_counts"] != b.runs[0]["test_counts"]:
        return None
    sums = [np.array([run["test_sums"] for run in v.runs]) for v in (a, b)]
    return statistics.crossed_interval(sums[0] - sums[1], a.runs[0]["test_counts"])


def _scope(c: Comparison, record: dict) -> str:
    """Return what the answer holds for; "" if there is no conclusion."""
    if record["budget"] != "full" or c.verdict in ("no conclusion", "did not train"):
        return ""
    return " " + describe_scope(record["variants"][c.variant], record["variants"][c.against])


def curve(runs: list[dict]) -> tuple[list[int], np.ndarray]:
    """Return the evaluated steps and the validation losses (runs, steps), nan after a run diverged."""
    steps = sorted({step for run in runs for step, _ in run["validation"]})
    losses = np.full((len(runs), len(steps)), np.nan)
    for i, run in enumerate(runs):
        for step, loss in run["validation"]:
            losses[i, steps.index(step)] = loss
    return steps, losses
