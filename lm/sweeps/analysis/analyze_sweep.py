"""Analyze the finished runs of a sweep: compute the results of each variant, the comparisons and the warnings."""

import dataclasses
import math
import shlex
from pathlib import Path

import numpy as np

from lm.errors import UserError
from lm.sweeps.analysis.answers import describe_answer, describe_placebo_answer
from lm.sweeps.analysis.exponents import falls
from lm.sweeps.analysis.interaction_answers import describe_interaction
from lm.sweeps.analysis.interactions import interactions
from lm.sweeps.analysis.looks import PairTest, at_look, pair_tests, placebo_test, seeds_needed
from lm.sweeps.analysis.multipliers import savings
from lm.sweeps.analysis.optimum import estimate_optimum
from lm.sweeps.analysis.outcomes import Analysis, Comparison, VariantResult
from lm.sweeps.analysis.scope import describe_scope
from lm.sweeps.design.placebo import placebo_pair
from lm.sweeps.design.search import run_length
from lm.sweeps.design.seeds import seeds_of
from lm.sweeps.statistics import inference
from lm.sweeps.statistics.inference import CrossedInterval, Difference
from lm.sweeps.storage.records import read_sweep
from lm.sweeps.storage.results import (
    SPEEDS,
    STUCK,
    Results,
    at_edge,
    best_rate,
    missing_runs,
    ordered,
    rate_from,
    stuck_above,
)
from lm.sweeps.storage.run_checks import identical_variants, mixed_machines, mixed_sizes


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
        raise UserError(f"{workdir}: speeds.json lacks a variant; delete this file and rerun the sweep")
    pairs = [*record["comparisons"], *([placebo_pair(record)] if record["placebo"] else [])]
    needed = seeds_needed(record, results)
    failed = _failed(record, results, workdir, needed)
    variants = {n: _variant(n, at_look(record, needed[n]), results) for n in record["variants"] if n not in failed}
    warnings = [f"{name} is left out: runs failed ({error})" for name, error in failed.items()]
    if not (failed or results.speeds):
        warnings.append(f"the throughput is not measured ({results.failures()[SPEEDS]})")
    warnings += identical_variants(results, list(variants))
    warnings += mixed_machines(results, pairs) + mixed_sizes(results, record.get("sizes"))
    for a, b in pairs:
        if _text(record, a) != _text(record, b):
            warnings.append(f"{a} and {b} use different data or tokenizers: their losses cannot be compared")
    for v in variants.values():
        warnings += _warnings(v, record)
    comparisons = [
        _comparison(record, results, failed, pair, test)
        for pair, test in zip(record["comparisons"], pair_tests(record, results), strict=True)
    ]
    placebo = _placebo(record, results, failed) if record["placebo"] else None
    by_text = [
        dataclasses.replace(x, answer=describe_interaction(x, record))
        for x in interactions(record, comparisons, variants)
    ]
    return Analysis(
        record,
        results,
        variants,
        failed,
        comparisons,
        list(dict.fromkeys(warnings)),
        savings(record, variants),
        falls(record, variants),
        by_text,
        placebo,
    )


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


def _failed(record: dict, results: Results, workdir: Path, needed: dict[str, int]) -> dict[str, str]:
    """Return the error of each variant with failed runs; raises UserError if anything else is missing."""
    missing, failures = missing_runs(results, record, needed), results.failures()
    unfinished = [f"{name} lacks runs" for name, keys in missing.items() if not keys <= failures.keys()]
    if not (missing or results.speeds or SPEEDS in failures):
        unfinished = ["the throughput is not measured"]
    if unfinished:
        command = shlex.join(["python", "-m", "lm.sweep", *record["starts"][-1]["argv"][1:]])
        raise UserError(f"{workdir} is not finished: {', '.join(unfinished)}; resume with {command}")
    failed = {name: failures[min(keys)].split("\n")[0] for name, keys in missing.items()}
    if failed.keys() == record["variants"].keys():
        raise UserError(f"{workdir}: every variant has runs that failed ({next(iter(failed.values()))})")
    return failed


def _comparison(record: dict, results: Results, failed: dict[str, str], pair, test: PairTest) -> Comparison:
    """Return the comparison of a pair, from its test; one without a difference still counts in Holm's correction."""
    if lost := [name for name in pair if name in failed]:
        answer = f"{pair[0]} against {pair[1]}: no result, because runs of {' and '.join(lost)} failed."
        return Comparison(*pair, None, math.nan, math.nan, answer, missing="runs failed", verdict="runs failed")
    same = test._asdict()
    del same["same_text"]
    c = Comparison(*pair, sampling_error=math.nan, answer="", **same)
    v, w = (_variant(name, at_look(record, test.n_seeds), results) for name in pair)
    missing = "did not train" if v.did_not_train or w.did_not_train else "runs diverged"
    verdict = (test.verdict or missing) if record["budget"] == "full" else "no conclusion"
    c = dataclasses.replace(
        c,
        missing="" if c.difference else missing,
        sampling_error=_paired_sampling_error(v, w),
        same_tokens=v.tokens == w.tokens,
        pairing=_pairing(v, w),
        verdict=verdict,
        over_text=_interval_over_text(v, w, c.difference),
    )
    return dataclasses.replace(c, answer=describe_answer(v, w, c, record) + _scope(c, record))


def _placebo(record: dict, results: Results, failed: dict[str, str]) -> Comparison:
    """Return the comparison of the placebo with the baseline."""
    placebo = _comparison(record, results, failed, placebo_pair(record), placebo_test(record, results))
    return dataclasses.replace(placebo, answer=describe_placebo_answer(placebo, record))


def _pairing(a: VariantResult, b: VariantResult) -> float:
    """Return the variance of the paired difference, divided by the sum of both variances, that of unpaired runs."""
    if a.loss is None or b.loss is None:
        return math.nan
    unpaired = a.loss.sd**2 + b.loss.sd**2
    return float(np.var(np.subtract(a.losses, b.losses), ddof=1)) / unpaired if unpaired > 0 else math.nan


def _variant(name: str, record: dict, results: Results) -> VariantResult:
    described = record["variants"][name]
    grid = described["grid"]
    rate = best_rate(results, record, name)
    steps, batch_size = run_length(record, name, rate)
    runs = [results.runs["final", name, rate, seed] for seed in seeds_of(record["seeds"], name)]
    losses = [run["test_loss"] for run in runs]
    errors = [inference.sampling_error(run["test_sums"], run["test_counts"]) for run in runs if run["test_sums"]]
    bytes_per_token = described["data"].get("test_bytes_per_token")  # sweeps of older versions lack it
    mean = None if None in losses else inference.interval(losses)
    return VariantResult(
        name=name,
        grid=tuple(grid),
        rate=rate,
        at_edge=not record["search"] and at_edge(grid, rate),
        runs=runs,
        losses=losses,
        n_params=described["n_params"],
        flops=described["flops_per_token"],
        steps=steps,
        tokens_per_step=batch_size * described["config"]["train"]["seq_len"],
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
    return inference.sampling_error(sums[0] - sums[1], a.runs[0]["test_counts"])


def _interval_over_text(a: VariantResult, b: VariantResult, d: Difference | None) -> CrossedInterval | None:
    if a.n_diverged or b.n_diverged or a.runs[0]["test_counts"] != b.runs[0]["test_counts"]:
        return None
    sums = [np.array([run["test_sums"] for run in v.runs]) for v in (a, b)]
    return inference.crossed_interval(sums[0] - sums[1], a.runs[0]["test_counts"], d)


def _scope(c: Comparison, record: dict) -> str:
    """Return the limits of the answer (size, text and tuning); "" if there is no conclusion."""
    if record["budget"] != "full" or c.verdict in ("no conclusion", "did not train"):
        return ""
    return " " + describe_scope(*(record["variants"][name] for name in (c.variant, c.against)), record["search"])
