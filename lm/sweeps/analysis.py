"""Analyze the finished runs of a sweep. Everything here returns numbers; `report.md.jinja` makes
the sentences.

The claims of a sweep are its comparisons. With several cells (sizes or texts) they are the means
over the cells, with lengths the changes from the first length to the last, and the comparisons
within a cell are secondary. Holm's correction is over the claims, and separately over the secondary
comparisons; a placebo is not corrected.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm.sweeps import statistics
from lm.sweeps.declare import in_cell
from lm.sweeps.results import Run, choices_of, errors_of, final_runs, stuck_above
from lm.sweeps.statistics import LEVEL, Estimate
from lm.sweeps.tuning import CURVE, Choice, Error, tuning_errors

# Kinds of comparisons.
CLAIM = "claim"
CELL = "cell"  # secondary: in one of several cells
PLACEBO = "placebo"
BESIDE = "beside"  # descriptive: against a second control, named by "beside" in the record
MEAN = "mean"  # the cell of a mean over the cells
FIRST_TO_LAST = "first to last"  # the cell of the last length minus the first
OVER_CELLS = (MEAN, FIRST_TO_LAST)
SAME_LOSS = 1e-6  # relative difference of two losses below which rounding explains it
# Largest difference in nats of a run trained again: on the same kind of processor, and, by
# rounding, on another one.
SAME_MACHINE = 0.001
OTHER_MACHINE = 0.02
MANY = 12  # claims; with more, reports are sorted and shorter
# Kinds of warnings, in the order in which a report has them.
WARNINGS = [
    "failed",
    "diverged",
    "stuck",
    "edge",
    "tokens",
    "machines",
    "identical",
    "cells",
    "data",
]
# verdicts besides those of statistics.VERDICTS
NO_CONCLUSION = "no conclusion"
NO_RESULT = "no result"


@dataclasses.dataclass(frozen=True)
class Variant:
    """The final runs of a variant."""

    name: str  # with its cell
    about: dict  # its entry in sweep.json
    choice: Choice
    runs: dict[int, Run]  # by seed
    tuning: Error  # of its mean loss

    @property
    def point(self) -> dict[str, Any]:
        """Return the value of each tuned config key in the final runs."""
        return dict(zip(self.about["tune"], self.choice.point or (), strict=True))

    @functools.cached_property
    def losses(self) -> dict[int, float]:
        """Return the test losses by seed; nan if the run diverged."""
        return {seed: _test_loss(run) for seed, run in self.runs.items()}

    @functools.cached_property
    def validation_losses(self) -> dict[int, float]:
        """Return the validation losses by seed; nan if the run diverged or the page has none."""
        return {
            seed: math.nan if run.val_loss is None else run.val_loss
            for seed, run in self.runs.items()
        }

    @property
    def n_diverged(self) -> int:
        return sum(map(math.isnan, self.losses.values()))

    @property
    def n_stuck(self) -> int:
        """Return how many runs ended near the loss of the unigram baseline."""
        return sum(loss > stuck_above(self.about, "test") for loss in self.losses.values())

    @property
    def loss(self) -> Estimate | None:
        """Return the mean test loss; None if a run diverged."""
        return None if self.n_diverged else statistics.estimate(list(self.losses.values()))

    @property
    def bits_per_byte(self) -> float:
        bytes_per_token = self.about["data"].get("test_bytes_per_token")
        if not (self.loss and bytes_per_token):
            return math.nan
        return self.loss.mean / math.log(2) / bytes_per_token

    @property
    def tokens_per_second(self) -> float:
        """Return the median over the runs, or the earlier page's; nan if it was not measured."""
        speeds = [run.tokens_per_second for run in self.runs.values() if run.tokens_per_second]
        return float(np.median(speeds)) if speeds else self.about.get("tokens_per_second", math.nan)


def _test_loss(run: Run) -> float:
    return math.nan if run.test_loss is None else run.test_loss


@dataclasses.dataclass(frozen=True)
class Claim:
    """A comparison: test loss of the first variant minus that of the second, in nats per token."""

    kind: str  # CLAIM, CELL, PLACEBO or BESIDE
    variant: str  # names without the cell
    against: str
    cell: str  # the size, text or length, MEAN, FIRST_TO_LAST, or "" without cells
    # with the error of tuning in its standard error; None: there is none, see `missing`
    difference: Estimate | None = None
    differences: tuple[float, ...] = ()  # of each seed; of each cell for a mean
    n_controls: int = 1  # the variants whose mean is subtracted: `against` and its placebos
    tuning: Error = dataclasses.field(default_factory=Error)  # of the difference
    # the same difference on the validation split, on which the values were tuned with other seeds
    validation: Estimate | None = None
    p_holm: float = math.nan  # after Holm's correction; nan for a placebo
    holm_low: float = -math.inf  # the interval that excludes 0 if and only if p_holm is below 0.05
    holm_high: float = math.inf
    # the smallest true difference that is found with a power of 80 % at the level of that interval
    detectable: float = math.nan
    verdict: str = NO_RESULT  # or NO_CONCLUSION, or one of statistics.VERDICTS
    missing: str = ""  # why there is no difference
    # Without a difference because of its results: it counts as a test, with p = 1, or leaving it out
    # would make the other tests easier.
    is_counted: bool = False
    tau: float = math.nan  # of a mean, see `statistics.MeanOverCells`
    prediction: tuple[float, float] = (-math.inf, math.inf)
    # With sizes: ln m, where `against` needs m times the training compute.
    log_multiplier: Estimate | None = None
    # With lengths: the last difference divided by the first, and its interval; infinite if the first
    # may be 0.
    ratio: tuple[float, float, float] | None = None

    @property
    def p(self) -> float:
        if self.difference:
            return self.difference.p
        return 1.0 if self.is_counted else math.nan

    @property
    def mean(self) -> float:
        """Return the mean difference; infinite if there is none, so that it is sorted last."""
        return self.difference.mean if self.difference else math.inf

    @property
    def signs(self) -> tuple[int, int]:
        """Return how many of the differences are negative and positive."""
        return sum(x < 0 for x in self.differences), sum(x > 0 for x in self.differences)

    @property
    def has_one_sign(self) -> bool:
        return 0 in self.signs

    @property
    def is_general(self) -> bool:
        """Return whether a mean very likely has the same sign in other cells.

        It is significant, all cells have its sign, and its prediction interval excludes 0.
        """
        low, high = self.prediction
        same_sign = self.has_one_sign and not low <= 0 <= high
        return self.cell == MEAN and self.is_significant and same_sign

    @property
    def is_significant(self) -> bool:
        return (self.p if self.kind == PLACEBO else self.p_holm) < 1 - LEVEL

    @property
    def reach(self) -> float:
        """Return the end of the 95 % interval that is farther from 0."""
        if not self.difference:
            return math.nan
        return max(self.difference.interval(), key=abs)


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Everything that a report shows."""

    record: dict  # sweep.json
    runs: list[Run]  # all that are finished
    variants: dict[str, Variant]  # by name, those with final runs
    claims: list[Claim]  # in the order of the record: means first, then cell by cell, then placebos
    # by kind, what a reader should know: names of variants, or of pairs
    warnings: dict[str, list[str]]
    failed: dict[str, str]  # by name, the error of each variant without final runs

    def by_source(self) -> list[tuple[str, str, str, Estimate]]:
        """Return variant, baseline, source or probe, and the difference in its test loss.

        The weights of the two mixtures may differ, but their sources are the same. After the cells
        of a comparison come the means over them; if there are many comparisons, only these.
        """
        by_cell: dict[tuple[str, str, str], dict[str, Estimate]] = {}
        for pair in self.record["comparisons"]:
            if not self.variants.keys() >= set(pair):
                continue
            a, b = (self.variants[name] for name in pair)
            if a.about["data"].get("sources") != b.about["data"].get("sources"):
                continue
            if any(v.n_diverged or v.n_stuck for v in (a, b)):
                continue
            control = control_of(self.record, self.variants, pair)
            compared = [a, *control.members]
            seeds = [seed for seed in control.seeds if seed in a.runs]
            seeds = [seed for seed in seeds if all(v.runs[seed].sources for v in compared)]
            for source in a.runs[seeds[0]].sources if len(seeds) > 1 else ():
                key = (a.about["arm"], b.about["arm"], source)
                differences = []
                for seed in seeds:
                    theirs = [v.runs[seed].sources[source] for v in control.members]
                    differences.append(
                        a.runs[seed].sources[source] - math.fsum(theirs) / len(theirs)
                    )
                difference = statistics.with_error(
                    statistics.estimate(differences),
                    *_error_of_difference(a.tuning, control.tuning),
                )
                by_cell.setdefault(key, {})[a.about["cell"]] = difference
        rows = []
        has_cells = len({v.about["cell"] for v in self.variants.values()}) > 1
        has_lengths = self.record["axis"] == "length"  # there is no mean over them
        for (arm, against, source), in_cells in by_cell.items():
            if len(in_cells) == 1 or not self.are_many or has_lengths:
                for cell, difference in in_cells.items():
                    place = cell if has_cells else ""
                    rows.append((in_cell(arm, place), in_cell(against, place), source, difference))
            if len(in_cells) > 1 and not has_lengths:
                name = f"{against} over {len(in_cells)} {self.record['axis']}s"
                mean = statistics.mean_over_cells(list(in_cells.values())).mean
                rows.append((arm, name, source, mean))
        return rows

    def trained_again(self) -> list[tuple[str, int, float, float, bool]]:
        """Return of each run that an addition repeats what is needed to judge it.

        That is: variant, seed, test loss, the published one, whether they agree.
        """
        repeated = []
        for run in self.runs:
            known = self.variants[run.variant].runs if run.variant in self.variants else {}
            if run.phase != "again" or run.seed not in known:
                continue
            first = known[run.seed]
            is_same = (run.processor, run.device) == (first.processor, first.device)
            now = _test_loss(run)
            published = _test_loss(first)
            agree = abs(now - published) <= (SAME_MACHINE if is_same else OTHER_MACHINE)
            both_diverged = math.isnan(now) and math.isnan(published)
            repeated.append((run.variant, run.seed, now, published, agree or both_diverged))
        return repeated

    def of_kind(self, kind: str) -> list[Claim]:
        return [claim for claim in self.claims if claim.kind == kind]

    def placebo_band(self, against: str, cell: str) -> tuple[float, float]:
        """Return the lowest and the highest difference of a control's members from the mean of the
        others; (0, 0) without placebos.

        Their true difference is 0: a difference within the band is as small as that of equal models.
        """
        own = [c for c in self.of_kind(PLACEBO) if (c.against, c.cell) == (against, cell)]
        means = [c.difference.mean for c in own if c.difference]
        if not means:
            return 0.0, 0.0
        if self.record.get("control") == "mean":
            # These differences, each from the mean of the others, have the sum 0 over all members.
            means.append(-math.fsum(means))
        return min(means), max(means)

    @property
    def are_many(self) -> bool:
        return len(self.of_kind(CLAIM)) > MANY

    def in_cells(self, claim: Claim) -> list[Claim]:
        """Return the comparisons of the same two variants in single cells."""
        key = claim.variant, claim.against
        of_pair = [c for c in self.claims if (c.variant, c.against) == key]
        return [c for c in of_pair if c.cell not in OVER_CELLS]

    def shown(self) -> list[Claim]:
        """Return the rows of the first table and of the forest plot.

        If there are many, they are sorted, below the placebo, and those of single cells are left
        out.
        """
        claims, cells, placebos = (self.of_kind(kind) for kind in (CLAIM, CELL, PLACEBO))
        if not self.are_many:
            return claims + cells + placebos
        means = [claim for claim in placebos if claim.cell in OVER_CELLS]
        beside = [claim for claim in self.of_kind(BESIDE) if claim.cell in OVER_CELLS]
        return (means or placebos) + sorted(claims + beside, key=lambda c: c.mean)


def analyze(record: dict, runs: Sequence[Run], failed: Mapping[str, str] | None = None) -> Analysis:
    """Analyze the finished runs of a sweep, and by variant the error of those that failed.

    Runs and failures of variants that are not in the record, which is sweep.json, are left out.
    """
    failed = {name: error for name, error in (failed or {}).items() if name in record["variants"]}
    choices = choices_of(record, runs, failed)
    errors = errors_of(record, choices)
    variants = {}
    for name, about in record["variants"].items():
        if name not in failed:
            runs_of_variant = final_runs(record, runs, name, choices[name].point)
            variants[name] = Variant(name, about, choices[name], runs_of_variant, errors[name])
    kind = CELL if record["axis"] else CLAIM
    comparisons = [_comparison(record, variants, pair, kind) for pair in record["comparisons"]]
    if record["axis"] == "size":
        comparisons = [
            c for group in _by_arms(comparisons) for c in _with_multipliers(record, variants, group)
        ]
    placebos = [_comparison(record, variants, pair, PLACEBO) for pair in record["placebos"]]
    beside = [_comparison(record, variants, pair, BESIDE) for pair in record.get("beside", ())]
    claims = []
    if record["axis"]:
        over = _first_to_last if record["axis"] == "length" else _mean
        claims += _judged(record, [over(record, group, CLAIM) for group in _by_arms(comparisons)])
        placebos += [over(record, group, PLACEBO) for group in _by_arms(placebos) if len(group) > 1]
        beside += [over(record, group, BESIDE) for group in _by_arms(beside) if len(group) > 1]
    claims += _judged(record, comparisons)
    claims += [_judged(record, [claim])[0] for claim in (*placebos, *beside)]
    order = list(record["variants"])
    runs = [run for run in runs if run.variant in record["variants"]]

    def place(run: Run) -> tuple:
        # None is before all numbers
        point = [(value is not None, value) for value in run.point.values()]
        return order.index(run.variant), run.phase == "final", point, run.seed

    runs = sorted(runs, key=place)
    return Analysis(record, runs, variants, claims, _warnings(record, variants, failed), failed)


class Control(NamedTuple):
    """The variants whose mean another one is compared with: a baseline and its placebos."""

    members: list[Variant]

    @property
    def seeds(self) -> list[int]:
        """Return the seeds that all of them have, in their order."""
        return [seed for seed in self.members[0].runs if all(seed in v.runs for v in self.members)]

    @property
    def tuning(self) -> Error:
        """Return the error of tuning of the mean: each of them is tuned by itself."""
        variances = [v.tuning.variance for v in self.members]
        return Error(sum(variances) / len(variances) ** 2, min(v.tuning.df for v in self.members))

    def mean(self, values: Callable[[Variant], dict[int, float]]) -> dict[int, float]:
        """Return the mean over the members by seed."""
        of_members = [values(v) for v in self.members]
        return {
            seed: math.fsum(x[seed] for x in of_members) / len(of_members) for seed in self.seeds
        }


def control_of(record: dict, variants: Mapping[str, Variant], pair: Sequence[str]) -> Control:
    """Return the control of a comparison, or of a placebo: then it is not in it itself.

    A page without "control" in its record compares with the baseline alone. A placebo with a run
    that diverged or got stuck is left out.
    """
    name, against = pair
    members = [variants[against]]
    for placebo, like in record["placebos"]:
        is_mean = record.get("control") == "mean"
        if is_mean and like == against and placebo != name and placebo in variants:
            v = variants[placebo]
            if v.runs and not v.n_diverged and not v.n_stuck:
                members.append(v)
    return Control(members)


def _comparison(
    record: dict, variants: Mapping[str, Variant], pair: Sequence[str], kind: str
) -> Claim:
    first, second = (record["variants"][name] for name in pair)
    claim = Claim(kind, first["arm"], second["arm"], first["cell"])
    if lost := [name for name in pair if name not in variants]:
        return dataclasses.replace(claim, missing=f"runs of {' and '.join(lost)} failed")
    if first["data"]["fingerprint"] != second["data"]["fingerprint"]:
        return dataclasses.replace(claim, missing="different data or tokens")
    a, b = (variants[name] for name in pair)
    if a.n_diverged or b.n_diverged:
        n = f"{a.n_diverged} of {len(a.losses)} and {b.n_diverged} of {len(b.losses)}"
        return dataclasses.replace(claim, missing=f"unstable: {n} runs diverged")
    if a.n_stuck or b.n_stuck:
        # A mean of runs that learned and runs that did not estimates neither.
        stuck = [
            f"{v.n_stuck} of {len(v.losses)} runs of {v.about['arm']}" for v in (a, b) if v.n_stuck
        ]
        missing = f"unstable: {' and '.join(stuck)} got stuck"
        return dataclasses.replace(claim, missing=missing, is_counted=True)
    control = control_of(record, variants, pair)
    losses = control.mean(lambda v: v.losses)
    on_validation = control.mean(lambda v: v.validation_losses)
    seeds = [seed for seed in a.runs if seed in losses]
    if not seeds:
        return dataclasses.replace(claim, missing="no common seeds")
    differences = tuple(a.losses[seed] - losses[seed] for seed in seeds)
    of_validation = [a.validation_losses[seed] - on_validation[seed] for seed in seeds]
    tuning = _error_of_difference(a.tuning, control.tuning)
    return dataclasses.replace(
        claim,
        n_controls=len(control.members),
        difference=statistics.with_error(statistics.estimate(differences), *tuning),
        differences=differences,
        tuning=tuning,
        validation=_with_tuning(of_validation, tuning),
    )


def _error_of_difference(a: Error, b: Error) -> Error:
    """Return the error of tuning in a difference: the variances of both sides, estimated together."""
    return Error(a.variance + b.variance, min(a.df, b.df))


def _with_tuning(differences: Sequence[float], tuning: Error) -> Estimate | None:
    if np.isnan(differences).any():
        return None
    return statistics.with_error(statistics.estimate(differences), *tuning)


def _common_seeds(a: Variant, b: Variant) -> list[int]:
    return [seed for seed in a.runs if seed in b.runs]


def _by_arms(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Group comparisons of the same two arms."""
    groups: dict[tuple, list[Claim]] = {}
    for claim in claims:
        groups.setdefault((claim.variant, claim.against), []).append(claim)
    return list(groups.values())


def _mean(record: dict, group: Sequence[Claim], kind: str) -> Claim:
    claim = Claim(kind, group[0].variant, group[0].against, MEAN)
    if lost := [f"{c.missing} at {c.cell}" for c in group if c.difference is None]:
        is_counted = any(c.is_counted for c in group)
        return dataclasses.replace(claim, missing="; ".join(lost), is_counted=is_counted)
    if len(group) < 2:
        return dataclasses.replace(claim, missing="one cell only")
    differences = [c.difference for c in group if c.difference]
    over_cells = statistics.mean_over_cells(differences)
    difference = over_cells.mean
    # Independent in each cell.
    variances = [c.tuning.variance for c in group]
    tuning = Error(sum(variances) / len(group) ** 2, min(c.tuning.df for c in group))
    if len({tuple(about["seeds"]) for about in record["variants"].values()}) == 1:
        # An earlier page: all cells have the same seeds, so that their differences are correlated.
        by_seed = statistics.estimate(np.mean([c.differences for c in group], axis=0).tolist())
        difference = statistics.with_error(by_seed, *tuning)
    validations = [c.validation for c in group if c.validation]
    validation = None
    if len(validations) == len(group):
        validation = statistics.mean_over_cells(validations).mean
    multipliers = [c.log_multiplier for c in group if c.log_multiplier]
    log_multiplier = None
    if len(multipliers) == len(group):
        log_multiplier = statistics.mean_over_cells(multipliers).mean
    return dataclasses.replace(
        claim,
        difference=difference,
        differences=tuple(d.mean for d in differences),
        n_controls=min(c.n_controls for c in group),
        tuning=tuning,
        validation=validation,
        tau=over_cells.tau,
        prediction=over_cells.prediction,
        log_multiplier=log_multiplier,
    )


def _first_to_last(record: dict, group: Sequence[Claim], kind: str) -> Claim:
    """Return how a comparison changes from the first length to the last, whose seeds differ."""
    first = group[0]
    last = group[-1]
    claim = Claim(kind, last.variant, last.against, FIRST_TO_LAST)
    if unfinished := record.get("unfinished"):
        return dataclasses.replace(claim, missing=f"{unfinished[-1]} is not finished")
    if not (first.difference and last.difference):
        lost = [c for c in (first, last) if c.missing]
        missing = "; ".join(f"{c.missing} at {c.cell}" for c in lost)
        is_counted = any(c.is_counted for c in lost)
        return dataclasses.replace(claim, missing=missing, is_counted=is_counted)
    validation = None
    if first.validation and last.validation:
        validation = statistics.difference(last.validation, first.validation)
    return dataclasses.replace(
        claim,
        difference=statistics.difference(last.difference, first.difference),
        n_controls=min(first.n_controls, last.n_controls),
        tuning=_error_of_difference(first.tuning, last.tuning),
        validation=validation,
        ratio=statistics.ratio(last.difference, first.difference),
    )


def _with_multipliers(
    record: dict, variants: Mapping[str, Variant], group: list[Claim]
) -> list[Claim]:
    """Add the compute multipliers to a comparison at several sizes on one text, if all finished."""
    if any(c.difference is None for c in group):
        return group
    compute_S2 = []
    losses_S2N = []
    texts = set()
    for c in group:
        pair = [variants[in_cell(arm, c.cell)] for arm in (c.variant, c.against)]
        control = control_of(record, variants, [v.name for v in pair]).mean(lambda v: v.losses)
        seeds = [seed for seed in pair[0].runs if seed in control]
        compute_S2.append([v.about["flops_per_token"] * v.about["tokens"] for v in pair])
        losses_S2N.append([[own[seed] for seed in seeds] for own in (pair[0].losses, control)])
        texts |= {v.about["data"]["fingerprint"] for v in pair}
    if len(texts) > 1 or not np.all(np.array(compute_S2) > 0):
        return group
    errors_S = [c.tuning for c in group]
    log_multipliers = statistics.log_multipliers(np.array(compute_S2, float), losses_S2N, errors_S)
    if log_multipliers is None:
        return group
    return [
        dataclasses.replace(c, log_multiplier=log_m)
        for c, log_m in zip(group, log_multipliers, strict=True)
    ]


def _judged(record: dict, family: Sequence[Claim]) -> list[Claim]:
    """Return the claims of one family with corrected p-values, and verdicts at Holm's level."""
    p_values = [claim.p for claim in family]
    factors = statistics.holm_factors(p_values)
    judged = []
    for claim, factor, p_holm in zip(family, factors, statistics.holm(p_values), strict=True):
        if claim.difference:
            factor = 1.0 if math.isnan(factor) else factor
            level = 1 - (1 - LEVEL) / factor
            low, high = claim.difference.interval(level)
            verdict = NO_CONCLUSION
            if record["budget"] == "full":
                verdict = statistics.verdict(low, high, record["margin"])
            claim = dataclasses.replace(
                claim,
                holm_low=low,
                holm_high=high,
                verdict=verdict,
                detectable=statistics.detectable(*claim.difference[1:3], level),
            )
            if claim.kind not in (PLACEBO, BESIDE):
                claim = dataclasses.replace(claim, p_holm=p_holm)
        judged.append(claim)
    return judged


class Noise(NamedTuple):
    """The noise of a published page, from which a sweep that is not trained yet is judged."""

    page: str
    cell: str
    n_params: int
    of_pairs: float  # variance of the difference of two variants that share a seed
    of_tuning: float  # of the error of tuning one list of a variant, by the present rule


def noise_of(record: dict, runs: Sequence[Run], n_params: int) -> Noise | None:
    """Return the noise in the cell of a page whose baseline is nearest in size; None if it did not
    tune, or compares nothing.
    """
    variants = record["variants"]
    baselines = [v for v in variants.values() if v["arm"] == record["baseline"]]
    nearest = min(baselines, key=lambda v: abs(math.log(v["n_params"] / n_params)))
    cell = nearest["cell"]
    claims = [c for c in analyze(record, runs).claims if c.cell == cell]
    variances = [
        np.var(c.differences, ddof=1) * 2 / (1 + 1 / c.n_controls)
        for c in claims
        if len(c.differences) > 2
    ]
    of_cell = {
        name: choice
        for name, choice in choices_of(record, runs).items()
        if variants[name]["cell"] == cell and choice.lines
    }
    if not variances or not of_cell:
        return None
    lines = {name: choice.lines for name, choice in of_cell.items()}
    shape = next(iter(of_cell.values())).shape
    errors = tuning_errors(lines, shape, CURVE)
    of_list = max(errors[name].variance / len(own) for name, own in lines.items())
    return Noise(record["name"], cell, nearest["n_params"], float(np.median(variances)), of_list)


def expected_difference(
    noise: Noise,
    n_seeds: int,
    n_controls: int,
    n_cells: int,
    n_comparisons: int,
    *,
    first_to_last: bool = False,
) -> tuple[float, float]:
    """Return the smallest detectable differences of a sweep with this noise: alone, and as the first
    of its comparisons under Holm.

    `first_to_last`: of the last length minus the first, and not of a mean over the cells.
    """
    sides = 1 + 1 / n_controls
    variance = noise.of_pairs / 2 * sides / n_seeds + noise.of_tuning * sides
    if first_to_last:
        n_cells = 2
        se = math.sqrt(2 * variance)
    else:
        se = math.sqrt(variance / n_cells)
    df = n_cells * (n_seeds - 1)
    levels = (LEVEL, 1 - (1 - LEVEL) / max(1, n_comparisons))
    alone, first = (statistics.detectable(se, df, level) for level in levels)
    return alone, first


def _warnings(
    record: dict, variants: Mapping[str, Variant], failed: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return what a reader should know before trusting the numbers, by kind, without empty kinds."""
    warnings: dict[str, list[str]] = {kind: [] for kind in WARNINGS}

    def warn(kind: str, *names: str) -> None:
        warnings[kind] += names

    for name, error in failed.items():
        warn("failed", f"{name} ({error})")
    for v in variants.values():
        if v.n_diverged:
            warn("diverged", f"{v.name} ({v.n_diverged} of {len(v.losses)})")
        if v.n_stuck:
            warn("stuck", f"{v.name} ({v.n_stuck} of {len(v.losses)})")
        if v.choice.at_edge:
            edges = [f"{key} = {v.point[key]:g}" for key in v.choice.at_edge]
            warn("edge", f"{v.name} ({', '.join(edges)})")
    for pair in (*record["comparisons"], *record["placebos"]):
        if not set(pair) <= variants.keys():
            continue
        a, b = (variants[name] for name in pair)
        if a.about["tokens"] != b.about["tokens"]:
            warn("tokens", " and ".join(pair))
        if _on_several_machines(a, b):
            warn("machines", " and ".join(pair))
    for group in _identical(variants.values()):
        warn("identical", " and ".join(group))
    warn("cells", *record.get("unfinished", []))
    for about in record["variants"].values():
        warn("data", *about["data"]["notices"])
    return {kind: list(dict.fromkeys(names)) for kind, names in warnings.items() if names}


def _on_several_machines(a: Variant, b: Variant) -> bool:
    """Return whether the two runs of a seed are from different machines, which may change losses."""
    for seed in _common_seeds(a, b):
        runs = (a.runs[seed], b.runs[seed])
        if len({(run.processor, run.device) for run in runs if run.processor}) > 1:
            return True
    return False


def _identical(variants: Iterable[Variant]) -> list[list[str]]:
    """Return groups of names of variants whose losses are equal, up to rounding, for each seed."""
    groups: list[list[Variant]] = []
    for v in variants:
        group = next((group for group in groups if _same_losses(group[0], v)), None)
        groups.append([v]) if group is None else group.append(v)
    return [[v.name for v in group] for group in groups if len(group) > 1]


def _same_losses(a: Variant, b: Variant) -> bool:
    shared = [(a.losses[seed], b.losses[seed]) for seed in _common_seeds(a, b)]
    return bool(shared) and all(math.isclose(x, y, rel_tol=SAME_LOSS) for x, y in shared)


def mean_curve(runs: Sequence[Run]) -> dict[int, float]:
    """Return by evaluated step the mean validation loss, nan after a run diverged."""
    steps = sorted({step for run in runs for step, _ in run.curve})
    curves = [dict(run.curve) for run in runs]
    return {step: float(np.mean([curve.get(step, np.nan) for curve in curves])) for step in steps}
