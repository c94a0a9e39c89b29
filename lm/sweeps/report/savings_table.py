"""The table of a sweep with sizes: the training compute that each variant saves."""

from lm.sweeps.analysis.multipliers import Saving, factor, percent_saved
from lm.sweeps.analysis.outcomes import Analysis
from lm.sweeps.report.tables import Table, p_value


def savings_table(a: Analysis) -> Table:
    """Return the saved compute at each size and its mean over sizes, with the change of the multiplier with size."""
    n = len(a.savings)
    notes = {
        "size": "The mean over sizes is the claim; the others show where it comes from. Trend: the factor by which the "
        "multiplier m changes when both variants get 10 times the compute.",
        "training FLOPs": "Of one run.",
        "compute saved [95 % CI]": "1 - 1/m, where the second variant needs m times the training FLOPs of the first "
        "for the same test loss. ln m is the difference of their losses, divided by the fall of the loss with "
        "ln(FLOPs). This slope is that of the parabola through the mean losses of both variants at all sizes. "
        "Intervals leave out one seed of one size at a time (jackknife). Negative: the first variant needs more.",
        "p": f'Two-sided t test of "m is 1" for the mean over sizes, after Holm\'s correction for {n} '
        f"pair{'s' * (n > 1)} of variants; undefined if ln m does not vary over seeds. The other rows (–) are not "
        "tested.",
        "at the optimum [95 % CI], p": "The same at the estimated optima of the learning rate. A saving is significant "
        "if both p-values are below 0.05 and the signs agree."
        + "".join(f" No estimate, and so no claim: {s.without_optimum}." for s in a.savings if s.without_optimum),
    }
    rows = [row for s in a.savings for row in _rows(s)]
    header = ["comparison", *notes]
    return Table("Training compute saved", header, rows, notes)


def _rows(s: Saving) -> list[list[str]]:
    name = f"{s.variant} − {s.against}"
    if s.missing:
        return [[name, "all", "–", s.missing, "–", "–"]]
    best, optimum = s.at_best, s.at_optimum
    rows = []
    for i, size in enumerate(s.sizes):
        flops = " and ".join(dict.fromkeys(f"{flops:.3g}" for flops in s.compute_S2[i]))
        at_optimum = percent_saved(optimum.at_sizes[i]) if optimum else "no estimate"
        rows.append([name, size, flops, percent_saved(best.at_sizes[i]), "–", at_optimum])
    pooled = f"{percent_saved(optimum.pooled)}, {p_value(s.p_at_optimum)}" if optimum else "no estimate"
    trend = f"m × {factor(optimum.trend)}" if optimum else "no estimate"
    return [
        *rows,
        [name, "mean over sizes", "–", percent_saved(best.pooled), p_value(s.p_adjusted), pooled],
        [name, "trend, per 10 × FLOPs", "–", f"m × {factor(best.trend)}", "–", trend],
    ]
