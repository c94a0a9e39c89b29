"""The answer to a comparison in one sentence that the numbers support."""

from lm.sweeps.analysis.outcomes import Comparison, VariantResult
from lm.sweeps.design.placebo import placebo_pair
from lm.sweeps.statistics.inference import LEVEL, Difference, shares
from lm.sweeps.statistics.margins import seeds_to_decide

LEFT_OUT = "p leaves out how far the best rates of the grids are from the optima"


def describe_answer(a: VariantResult, b: VariantResult, c: Comparison, record: dict) -> str:
    """Return the answer to a comparison.

    Args:
        a, b: the results of the two variants, with the seeds of the comparison.
        c: the comparison of a against b.
        record: sweep.json.
    """
    n, budget, d = len(a.losses), record["budget"], c.difference
    if budget != "full":
        return f"No conclusion about {a.name} and {b.name}: budget {budget} only checks that the sweep runs."
    if c.verdict == "no conclusion":
        return f"No conclusion about {a.name} and {b.name}: losses on different data or tokens cannot be compared."
    if c.verdict == "did not train":
        return _did_not_train(a, b)
    if d is None:
        return (
            f"{a.name} against {b.name}: no mean difference, because runs diverged "
            f"({a.n_diverged} of {n} and {b.n_diverged} of {n}; medians {a.median:.4f} and {b.median:.4f})."
        )
    if c.verdict == "equal losses":
        return f"{a.name} and {b.name} end at the same loss for every seed."
    if c.verdict == "no p-value":
        return (
            f"{a.name} - {b.name} is {difference(d.mean)} for every seed: without variation over seeds there is no "
            "p-value."
        )
    stuck = (
        f"{a.n_stuck} of {n} and {b.n_stuck} of {n} runs got stuck, medians {a.median:.4f} and {b.median:.4f}"
        if a.n_stuck or b.n_stuck
        else ""
    )
    if c.leaves_out_tuning:
        claim, remarks = _no_claim(a, b, record)
    else:
        claim, remarks = {"equivalent": _equivalent, "undecided": _undecided}.get(c.verdict, _different)(c, record)
    evidence = _evidence(c, len(record["looks"]))
    remarks += [stuck] * bool(stuck)
    return f"{claim} ({'; '.join([evidence, *remarks])})."


def _no_claim(a: VariantResult, b: VariantResult, record: dict) -> tuple[str, list[str]]:
    """Return the claim and the remark for tuned variants, one of which has no estimate at the optimum."""
    reasons = dict.fromkeys(v.optimum.missing for v in (a, b) if v.optimum.missing)
    claim = f"No claim about {a.name} and {b.name}, because there is no estimate at the optimum"
    left_out = "p leaves out the luck of the random trials" if record["search"] else LEFT_OUT
    return f"{claim}: {' and '.join(reasons)}", [left_out]


def describe_placebo_answer(c: Comparison, record: dict) -> str:
    """Return the answer to the comparison of the placebo, whose true difference is 0, with the baseline."""
    if c.verdict not in ("beyond the margin", "different", "equivalent", "undecided"):
        return c.answer
    d, o = c.difference, c.at_optimum
    about = f"{c.variant} - {c.against} is {difference(d.mean)} (n = {d.n} paired seeds, {_interval(d)}, p = {d.p:.2g}"
    if o:
        about += f"; at the estimated optima {_estimate(o)}, p = {o.p:.2g}"
    verdict = "a false positive, as 1 in 20 sweeps may have" if c.is_significant else "not significant, as it should be"
    return f"Placebo, whose true difference is 0: {about}): {verdict}."


def describe_placebo(record: dict) -> str:
    """Describe the placebo and what it checks."""
    names = placebo_pair(record)
    changes, baseline = (record["variants"][name]["changes"] for name in names)
    changed = ", ".join(f"{key} = {value}" for key, value in changes.items() if baseline.get(key) != value)
    return (
        f"{names[0]}: {names[1]} with {changed}, which changes the program but not the distribution "
        "of its results. The true difference is 0, so it checks the whole procedure, from tuning to test: a "
        "significant one is a false positive, as 1 in 20 sweeps may have. It is not one of the comparisons, and its p "
        "is not corrected."
    )


def describe_looks(looks: list[int]) -> str:
    """Describe the looks: their numbers of seeds, and the bounds of their tests."""
    bounds = [f"{share * (1 - LEVEL):.2g}" for share in shares(looks)]
    return (
        f"Looks at {', '.join(map(str, looks))} seeds: more were trained only for comparisons that were undecided. The "
        f"bounds of the looks on an uncorrected p are {', '.join(bounds)}, 0.05 in total, for each kind of test. Every "
        "p here is scaled by 0.05 over the bound of its look, so that below 0.05 is significant; the intervals have "
        "the level of their look."
    )


def _did_not_train(a: VariantResult, b: VariantResult) -> str:
    """Return the answer where all runs of a variant got stuck or diverged, so that its loss means nothing."""
    found = [
        f"{v.name} did not train: at its best learning rate {v.n_stuck} of {len(v.losses)} runs got stuck and "
        f"{v.n_diverged} diverged"
        for v in (a, b)
        if v.did_not_train
    ]
    return f"No conclusion about {a.name} and {b.name}: {'; '.join(found)} (medians {a.median:.4f} and {b.median:.4f})."


def _different(c: Comparison, record: dict) -> tuple[str, list[str]]:
    d, margin = c.difference, record["margin"]
    claim = f"{c.variant} ends {difference(abs(d.mean), sign='')} nats per token {_direction(d)} than {c.against}"
    claim += (
        f", by more than the margin of {margin:g}"
        if c.verdict == "beyond the margin"
        else f"; whether by more than the margin of {margin:g} is undecided"
    )
    return claim, [f"for a difference beyond the margin p = {c.p_beyond:.2g}"]


def _equivalent(c: Comparison, record: dict) -> tuple[str, list[str]]:
    claim = f"{c.variant} and {c.against} are equivalent within the margin of {record['margin']:g} nats per token"
    if c.is_significant:
        claim += ": their difference is significant, but smaller"
    return claim, [f"for equivalence p = {c.p_equivalent:.2g}"]


def _undecided(c: Comparison, record: dict) -> tuple[str, list[str]]:
    d, o, level, margin = c.difference, c.at_optimum, 1 - LEVEL, record["margin"]
    remarks = [f"smallest detectable difference {difference(d.detectable, sign='')}", _seeds(c, margin)]
    if d.p < level <= c.p_adjusted:
        remarks.append(
            f"this interval alone excludes 0, which is not enough among {len(record['comparisons'])} comparisons"
        )
    if o and (c.p_adjusted < level or c.p_at_optimum < level):
        remarks.append(
            "the differences at the best rates of the grid and at the estimated optima must both be significant, "
            "with the same sign"
        )
    claim = (
        f"Undecided between {c.variant} and {c.against}: no significant difference, and no equivalence within the "
        f"margin of {margin:g} nats per token"
    )
    return claim, remarks


def _seeds(c: Comparison, margin: float) -> str:
    """Return how many seeds find a difference of the margin, by the estimate that needs more of them."""
    d = c.difference
    seeds = max(seeds_to_decide(estimate, margin) for estimate in (d, c.at_optimum) if estimate and estimate.sd > 0)
    what = f"find a true difference of {margin:g} in 8 of 10 such sweeps"
    return f"{seeds:,} seeds would {what}" if seeds > d.n else f"{d.n} seeds {what}"


def _evidence(c: Comparison, n_looks: int) -> str:
    """Return the number of seeds, and the intervals and p-values of both estimates of the difference."""
    d, o = c.difference, c.at_optimum
    look = f", look {c.look} of {n_looks}" if n_looks > 1 else ""
    text = f"n = {d.n} paired seeds{look}, {_estimate(d)}, p = {c.p_adjusted:.2g} after Holm's correction"
    if o:
        text += f"; at the estimated optima {_estimate(o)}, p = {c.p_at_optimum:.2g}"
    return text


def _estimate(d: Difference) -> str:
    return f"difference {with_interval(d)}"


def with_interval(d: Difference) -> str:
    """Return the mean and the interval of a difference."""
    return f"{difference(d.mean)}, {_interval(d)}"


def _interval(d: Difference) -> str:
    return f"95 % CI {difference(d.low)} to {difference(d.high)}"


def _direction(d: Difference) -> str:
    return "lower" if d.mean < 0 else "higher"


def difference(x: float, sign: str = "+") -> str:
    """Format a difference of losses with four decimals, or with one digit where these would all be 0.

    >>> difference(0.25), difference(-4e-6)
    ('+0.2500', '-4e-06')
    """
    return f"{x:{sign}.4f}" if x == 0 or abs(x) >= 5e-5 else f"{x:{sign}.0e}"
