"""The answers of a sweep with sizes: how much training compute each variant saves, one claim per pair of variants."""

import dataclasses
import math

import numpy as np

from lm.sweeps.analysis.scope import describe_scope_of_sizes
from lm.sweeps.design.axes import at_size
from lm.sweeps.statistics import inference
from lm.sweeps.statistics.moderation import ROUNDING
from lm.sweeps.statistics.scaling import Estimate, Multipliers, multipliers


@dataclasses.dataclass(frozen=True)
class Saving:
    """The training compute that a variant saves against another.

    Attributes:
        variant, against: the names of the two, without the size.
        sizes: the names of the sizes.
        n_seeds: runs of each variant at each size.
        compute_S2: training FLOPs per run, of the variant and of the other.
        loss_S2: mean test losses: at the estimated optima where all variants have one, else at the best rates.
        at_best: the multipliers at the best learning rates of the grids; None if there are none: see `missing`.
        at_optimum: the same at the estimated optima; None if a variant at a size has none.
        p_adjusted, p_at_optimum: the p-values of the pooled multipliers after Holm's correction for the pairs.
        without_optimum: why there are no multipliers at the optima; "" if there are, and where nothing was tuned.
        missing: the reason if there are no multipliers, else "".
    """

    variant: str
    against: str
    sizes: list[str]
    n_seeds: int = 0
    compute_S2: np.ndarray | None = None
    loss_S2: np.ndarray | None = None
    at_best: Multipliers | None = None
    at_optimum: Multipliers | None = None
    p_adjusted: float = math.nan
    p_at_optimum: float = math.nan
    without_optimum: str = ""
    missing: str = ""

    @property
    def estimate(self) -> Multipliers:
        """Return the multipliers at the optima if there are any: their intervals cover the truth more often."""
        return self.at_optimum or self.at_best

    @property
    def has_no_p(self) -> bool:
        """Return whether a pooled multiplier is the same for all seeds, so that there is no test."""
        return any(math.isnan(m.pooled.p) for m in (self.at_best, self.at_optimum) if m)

    @property
    def is_significant(self) -> bool:
        """Return whether the pooled multiplier is significant at the best rates and at the optima.

        Without an estimate at the optima it is not, unless nothing was tuned: at the best rates alone, equal variants
        differ in more than 1 of 20 sweeps (`benchmarks/calibration/sizes.py`), because p leaves out how far these rates
        are from the optima.
        """
        if self.missing or self.without_optimum or not self.p_adjusted < 1 - inference.LEVEL:
            return False
        if self.at_optimum is None:
            return True
        agree = self.at_optimum.pooled.value * self.at_best.pooled.value > 0
        return agree and self.p_at_optimum < 1 - inference.LEVEL


def savings(record: dict, variants: dict) -> list[Saving]:
    """Return the saving of each declared pair of variants; empty if the sweep has no sizes.

    Args:
        record: sweep.json.
        variants: by name, the VariantResults of the variants whose runs are complete.
    """
    sizes = record.get("sizes")
    if not sizes:
        return []
    at_first = record["comparisons"][:: len(sizes)]  # each pair is compared at all sizes, one after the other
    pairs = [[name.removesuffix(at_size("", sizes[0])) for name in names] for names in at_first]
    found = [_saving(*pair, sizes, record, variants) for pair in pairs]
    p_best, p_optimum = (
        inference.holm([math.nan if m is None else m.pooled.p for m in ms])
        for ms in ([s.at_best for s in found], [s.at_optimum for s in found])
    )
    return [
        dataclasses.replace(s, p_adjusted=p, p_at_optimum=q) for s, p, q in zip(found, p_best, p_optimum, strict=True)
    ]


def _saving(variant: str, against: str, sizes: list[str], record: dict, variants: dict) -> Saving:
    names = [(at_size(variant, size), at_size(against, size)) for size in sizes]
    saving = Saving(variant, against, sizes)
    if missing := incomparable([name for pair in names for name in pair], record, variants):
        return dataclasses.replace(saving, missing=missing)
    results = [[variants[name] for name in pair] for pair in names]
    compute_S2 = np.array([[v.flops * v.tokens for v in pair] for pair in results])
    losses_SN2 = np.array([[v.losses for v in pair] for pair in results], float).swapaxes(1, 2)
    if np.ptp(compute_S2, axis=1).max() == 0 and np.ptp(losses_SN2, axis=2).max() <= ROUNDING:
        return dataclasses.replace(saving, missing="their losses are equal but for rounding")
    at_best, at_optimum = multipliers(compute_S2, losses_SN2), None
    if at_best is None:
        return dataclasses.replace(saving, missing="the loss does not fall with the compute at every size")
    without_optimum = _reasons([v for pair in results for v in pair if v.optimum.missing])
    if not without_optimum:
        losses_SN2 = np.array([[v.optimum.losses for v in pair] for pair in results]).swapaxes(1, 2)
        at_optimum = multipliers(compute_S2, losses_SN2)
        if at_optimum is None:
            without_optimum = "the losses at the optima do not fall with the compute at every size"
    return dataclasses.replace(
        saving,
        n_seeds=losses_SN2.shape[1],
        compute_S2=compute_S2,
        loss_S2=losses_SN2.mean(axis=1),
        at_best=at_best,
        at_optimum=at_optimum,
        without_optimum=without_optimum if any(len(v.grid) > 1 for pair in results for v in pair) else "",
    )


def _reasons(variants: list) -> str:
    """Return the names of these variants by the reason why they have no estimate of the optimum; "" for none."""
    names = {}
    for v in variants:
        names.setdefault(v.optimum.missing, []).append(v.name)
    return "; ".join(f"{' and '.join(found)}: {reason}" for reason, found in names.items())


def without_losses(names: list[str], variants: dict) -> str:
    """Return which of these variants have no losses, and why; "" if all have them.

    Args:
        names: of the variants.
        variants: by name, the VariantResults of the variants whose runs are complete.
    """
    if failed := [name for name in names if name not in variants]:
        return f"runs of {' and '.join(failed)} failed"
    if lost := [name for name in names if variants[name].n_diverged or variants[name].n_stuck]:
        return f"runs of {' and '.join(lost)} diverged or got stuck"
    return ""


def incomparable(names: list[str], record: dict, variants: dict) -> str:
    """Return why the losses of these variants cannot be compared over sizes; "" if they can.

    Args:
        names: of the variants, each at a size.
        record: sweep.json.
        variants: by name, the VariantResults of the variants whose runs are complete.
    """
    if missing := without_losses(names, variants):
        return missing
    if len({record["variants"][name]["data"]["fingerprint"] for name in names}) > 1:
        return "losses on different data or tokens cannot be compared"
    return ""


def percent_saved(e: Estimate) -> str:
    """Format ln m as the saved compute, 1 - 1 / m, with its interval.

    >>> percent_saved(Estimate(0.12, 0.07, 0.18, 0.001)), percent_saved(Estimate(-0.09, -0.15, -0.03, 0.01))
    ('11 % [7, 16]', '-9 % [-16, -3]')
    >>> percent_saved(Estimate(0.1, -30, 30, 0.9))
    '10 % [-1e+15, 100]'
    """
    value, low, high = (_rounded(100 - 100 * _exp(-x)) for x in (e.value, e.low, e.high))
    return f"{value} % [{low}, {high}]"


def factor(e: Estimate) -> str:
    """Format exp of an estimate with its interval.

    >>> factor(Estimate(0.0, -0.1, 0.1, 1.0))
    '1.00 [0.90, 1.11]'
    """
    value, low, high = (_rounded(_exp(x), digits=2) for x in (e.value, e.low, e.high))
    return f"{value} [{low}, {high}]"


def _exp(x: float) -> float:
    """Return exp(x), or a very large number instead of an OverflowError: a flat loss gives a huge ln m."""
    return math.exp(min(x, 700.0))


def _rounded(x: float, digits: int = 0) -> str:
    """Format a number with these decimals, or as a power of ten.

    >>> _rounded(-0.2), _rounded(1.234, digits=2), _rounded(4e15)
    ('0', '1.23', '4e+15')
    """
    return f"{x:.0e}" if abs(x) >= 1e5 else f"{round(x, digits) + 0.0:.{digits}f}"


def answer(s: Saving, record: dict) -> str:
    """Return the answer that the numbers support, and its limits: sizes, text and tuning."""
    if (budget := record["budget"]) != "full":
        return f"No conclusion about {s.variant} and {s.against}: budget {budget} only checks that the sweep runs."
    if s.missing:
        return f"{s.variant} against {s.against}: no compute multiplier, because {s.missing}."
    if s.has_no_p:
        return (
            f"{s.variant} saves {percent_saved(s.estimate.pooled)} of the training compute that {s.against} needs for "
            f"the same loss: without variation over seeds there is no p-value. {_scope(s, record)}"
        )
    p, both = s.p_adjusted, ""
    if s.at_optimum:
        p = s.p_at_optimum
        both = f"; at the best rates of the grids {percent_saved(s.at_best.pooled)}, p = {s.p_adjusted:.2g}"
    numbers = (
        f"mean over {len(s.sizes)} sizes, {s.n_seeds} seeds each, 95 % CI, p = {p:.2g} after Holm's correction{both}"
    )
    if s.without_optimum:
        return (
            f"No claim about the training compute of {s.variant} and {s.against}, because there is no estimate at the "
            f"optimum ({s.without_optimum}): at the best rates {s.variant} saves {percent_saved(s.estimate.pooled)} "
            f"({numbers}). {_scope(s, record)}"
        )
    if not s.is_significant:
        return (
            f"No significant difference in training compute between {s.variant} and {s.against}: {s.variant} saves "
            f"{percent_saved(s.estimate.pooled)} ({numbers}). {_scope(s, record)}"
        )
    return f"{_finding(s)} ({numbers}). {_trend(s)} {_scope(s, record)}"


def _scope(s: Saving, record: dict) -> str:
    entries = record["variants"]
    return describe_scope_of_sizes(
        {size: (entries[at_size(s.variant, size)], entries[at_size(s.against, size)]) for size in s.sizes}
    )


def _finding(s: Saving) -> str:
    e = s.estimate.pooled
    if e.value > 0:
        return f"{s.variant} saves {percent_saved(e)} of the training compute that {s.against} needs for the same loss"
    reverse = Estimate(-e.value, -e.high, -e.low, e.p)
    more, low, high = (_rounded(100 * _exp(x) - 100) for x in reverse[:3])
    return f"{s.variant} needs {more} % [{low}, {high}] more training compute than {s.against} for the same loss"


def _trend(s: Saving) -> str:
    e = s.estimate.trend
    if e.low <= 0 <= e.high:
        return (
            f"No significant trend with size: 10 times the compute changes the multiplier by a factor of {factor(e)}."
        )
    verb = "grows" if e.value > 0 else "shrinks"
    return f"The multiplier {verb} with size: by a factor of {factor(e)} per 10 times the compute."
