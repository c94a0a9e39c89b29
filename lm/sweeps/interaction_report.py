"""The answers and the table of a sweep with texts: how much each difference depends on the text."""

import math

from lm.sweeps.answers import difference
from lm.sweeps.interactions import Interaction
from lm.sweeps.outcomes import Analysis
from lm.sweeps.statistics import Difference
from lm.sweeps.tables import Table, p_value, with_interval


def interaction_table(a: Analysis) -> Table:
    """Return the interaction of each comparison with each text but the first."""
    n, moderated = len(a.interactions), any(x.at_best and x.at_best.df > x.at_best.n - 1 for x in a.interactions)
    notes = {
        "interaction [95 % CI]": "The difference in test loss on the text, minus that on the first text, in nats per "
        "token: mean over seeds with its 95 % t interval, which stands alone. Each variant has its own best learning "
        "rate on each text. The two texts have other tokens: a difference that is the same fraction of the loss on "
        "both is an interaction too, if the losses differ.",
        "p": f'Two-sided paired t test of "the interaction is 0" after Holm\'s correction for {n} '
        f"interaction{'s' * (n > 1)}. These are a family of their own: the comparisons are corrected separately."
        + " The variance is moderated by those of all pairs of variants."
        * moderated,
        "at the optimum [95 % CI], p": "The same at the estimated optima of the learning rate. An interaction is "
        "significant if both p-values are below 0.05 and the signs agree.",
        "sampling error": "Standard error over blocks of both test texts: how much other texts of the same kinds would "
        "change it. The interval does not include it.",
    }
    return Table("Dependence on the text", ["comparison", "texts", *notes], [_row(x) for x in a.interactions], notes)


def _row(x: Interaction) -> list[str]:
    names = [f"{x.variant} − {x.against}", f"{x.text} − {x.first}"]
    if x.missing:
        return [*names, x.missing, "–", "–", "–"]
    optimum = f"{with_interval(x.at_optimum)}, {p_value(x.p_at_optimum)}" if x.at_optimum else "no estimate"
    return [*names, with_interval(x.at_best), p_value(x.p_adjusted), optimum, f"{x.sampling_error:.4f}"]


def describe_interaction(x: Interaction, record: dict) -> str:
    """Return the answer that the numbers support."""
    names = f"{x.variant} − {x.against}"
    if (budget := record["budget"]) != "full":
        return f"No conclusion about {names} on two texts: budget {budget} only checks that the sweep runs."
    if x.missing:
        return f"{names} on {x.text} and on {x.first}: no interaction, because {x.missing}."
    if math.isnan(x.p_adjusted) or (x.at_optimum and math.isnan(x.p_at_optimum)):
        return (
            f"{names} on {x.text}, minus that on {x.first}, is {difference(x.at_best.mean)} for every seed: without "
            "variation over seeds there is no p-value."
        )
    numbers = f"n = {x.at_best.n} paired seeds, {_shown(x.at_best)}, p = {x.p_adjusted:.2g} after Holm's correction"
    if x.at_optimum:
        numbers += f"; at the estimated optima {_shown(x.at_optimum)}, p = {x.p_at_optimum:.2g}"
    if not x.is_significant:
        return (
            f"No significant interaction: {names} on {x.text}, minus that on {x.first} ({numbers}). This does not show "
            "that the two are equal."
        )
    more = "more" if x.at_best.mean > 0 else "less"
    size = difference(abs(x.at_best.mean), sign="")
    return f"{names} depends on the text: on {x.text} it is {size} nats per token {more} than on {x.first} ({numbers})."


def _shown(d: Difference) -> str:
    return f"{difference(d.mean)}, 95 % CI {difference(d.low)} to {difference(d.high)}"
