"""The table of a sweep with texts: how much each difference depends on the text."""

from lm.sweeps.analysis.interactions import Interaction
from lm.sweeps.analysis.outcomes import Analysis
from lm.sweeps.report.tables import Table, p_value, with_interval


def interaction_table(a: Analysis) -> Table:
    """Return the interaction of each comparison with each text but the first."""
    n, differences = len(a.interactions), [x.difference for x in a.interactions if x.difference]
    moderated = any(d.df > d.n - 1 for d in differences)
    margin = f"{a.record['margin']:g}"
    notes = {
        "answer": f"Beyond the margin: the interaction is larger than {margin} nats per token, the margin of this "
        "sweep. Different: it is significant, but may be smaller than that. Equivalent: it is smaller. Undecided: none "
        "of these is shown.",
        "interaction [95 % CI]": "The difference in test loss on the text, minus that on the first text, in nats per "
        "token: mean over seeds with its 95 % t interval, which stands alone. Each variant has its own best learning "
        "rate on each text. The two texts have other tokens: a difference that is the same fraction of the loss on "
        "both is an interaction too, if the losses differ.",
        "p": f'Two-sided paired t test of "the interaction is 0" after Holm\'s correction for {n} '
        f"interaction{'s' * (n > 1)}. These are a family of their own: the comparisons are corrected separately."
        + " The variance is moderated by those of all pairs of variants."
        * moderated,
        "at the optimum [95 % CI], p": "The same at the estimated optima of the learning rate. An interaction is "
        "significant if both p-values are below 0.05 and the signs agree. Without an estimate after tuning there is no "
        "claim.",
        "sampling error": "Standard error over blocks of both test texts: how much other texts of the same kinds would "
        "change it. The intervals, which are over seeds alone, do not include it.",
    }
    return Table("Dependence on the text", ["comparison", "texts", *notes], [_row(x) for x in a.interactions], notes)


def _row(x: Interaction) -> list[str]:
    names = [f"{x.variant} − {x.against}", f"{x.text} − {x.first}"]
    if x.missing:
        return [*names, x.missing, *["–"] * 4]
    optimum = f"{with_interval(x.at_optimum)}, {p_value(x.p_at_optimum)}" if x.at_optimum else "no estimate"
    return [*names, x.verdict, with_interval(x.difference), p_value(x.p_adjusted), optimum, f"{x.sampling_error:.4f}"]
