"""The answer to whether a difference depends on the text, in one sentence that the numbers support."""

import math

from lm.sweeps.analysis.answers import LEFT_OUT, difference, with_interval
from lm.sweeps.analysis.interactions import Interaction
from lm.sweeps.analysis.scope import describe_scope_of_texts
from lm.sweeps.design.axes import at_size


def describe_interaction(x: Interaction, record: dict) -> str:
    """Return the answer to whether a difference depends on the text."""
    names = f"{x.variant} − {x.against}"
    if (budget := record["budget"]) != "full":
        return f"No conclusion about {names} on two texts: budget {budget} only checks that the sweep runs."
    if x.missing:
        return f"{names} on {x.text} and on {x.first}: no interaction, because {x.missing}."
    if math.isnan(x.p_adjusted) or (x.at_optimum and math.isnan(x.p_at_optimum)):
        return (
            f"{names} on {x.text}, minus that on {x.first}, is {difference(x.difference.mean)} for every seed: without "
            "variation over seeds there is no p-value."
        )
    d = x.difference
    numbers = [f"n = {d.n} paired seeds, {with_interval(d)}, p = {x.p_adjusted:.2g} after Holm's correction"]
    if x.at_optimum:
        numbers.append(f"at the estimated optima {with_interval(x.at_optimum)}, p = {x.p_at_optimum:.2g}")
    sentence = {"equivalent": _equivalent, "undecided": _undecided, "no claim": _no_claim}.get(x.verdict, _different)
    claim, remark = sentence(x, record["margin"])
    error = f"the intervals are over seeds, and the sampling error of the two texts is {x.sampling_error:.4f}"
    scope = describe_scope_of_texts(_entries(x, record))
    return f"{claim} ({'; '.join([*numbers, remark, error])}). {scope}"


def _different(x: Interaction, margin: float) -> tuple[str, str]:
    more, size = "more" if x.difference.mean > 0 else "less", difference(abs(x.difference.mean), sign="")
    claim = f"{x.variant} − {x.against} depends on the text: on {x.text} it is {size} nats per token {more} than on "
    claim += x.first + (
        f", by more than the margin of {margin:g}"
        if x.verdict == "beyond the margin"
        else f"; whether by more than the margin of {margin:g} is undecided"
    )
    return claim, f"for an interaction beyond the margin p = {x.p_beyond:.2g}"


def _equivalent(x: Interaction, margin: float) -> tuple[str, str]:
    claim = f"{x.variant} − {x.against} is the same on {x.text} and on {x.first} within the margin of {margin:g} nats"
    claim += " per token" + ": the interaction is significant, but smaller" * x.is_significant
    return claim, f"for equivalence p = {x.p_equivalent:.2g}"


def _no_claim(x: Interaction, _: float) -> tuple[str, str]:
    dependence = f"the dependence of {x.variant} − {x.against} on the text ({x.text} minus {x.first})"
    return f"No claim about {dependence}, because there is no estimate at the optima", LEFT_OUT


def _undecided(x: Interaction, margin: float) -> tuple[str, str]:
    claim = f"Undecided whether {x.variant} − {x.against} depends on the text: no significant interaction, {x.text} "
    claim += f"minus {x.first}, and no equivalence within the margin of {margin:g} nats per token"
    return claim, f"smallest detectable interaction {difference(x.difference.detectable, sign='')}"


def _entries(x: Interaction, record: dict) -> list[tuple[dict, dict]]:
    """Return for each of the two texts the entries of both variants in sweep.json."""
    entries = record["variants"]
    return [(entries[at_size(x.variant, t)], entries[at_size(x.against, t)]) for t in (x.text, x.first)]
