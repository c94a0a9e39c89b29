"""The table of a sweep with sizes and without comparisons: how the loss of each variant falls with the size."""

from lm.sweeps.analysis.exponents import NO_LAW, Fall, exponent, floor
from lm.sweeps.analysis.outcomes import Analysis
from lm.sweeps.report.tables import Table, p_value


def exponents_table(a: Analysis) -> Table:
    """Return the exponents and irreducible losses over each measure of the size, and the true irreducible loss."""
    notes = {
        "over": "The measure x of the size in the fit of loss = E + A x^-a. Without embeddings, the tables of "
        "embeddings and positions and the head do not count (Kaplan et al. 2020, arXiv:2001.08361). Where they are a "
        "large part of the smallest models, the exponents with and without them differ (Pearce and Song 2024, "
        "arXiv:2406.12907).",
        "exponent a [95 % CI]": "Least squares over the mean test losses of the sizes"
        + (", at the estimated optima of the learning rate" if all(f.at_optimum for f in a.falls) else "")
        + ". The interval has all values that the losses allow, given their variance over seeds (profile likelihood)."
        + f" None: {NO_LAW}." * any(None in f.laws.values() for f in a.falls),
        "irreducible loss E [95 % CI]": "The limit of the fit for models of unlimited size, in nats per token. −∞: "
        "these sizes do not show that there is a limit.",
        "true E": "The loss of the best possible model on this test text, with as little context at the beginning of "
        "each window as the models have. Known for synthetic text only.",
        "misfit p": 'F test of "the mean losses lie on this curve", from their variance over seeds. Below 0.05 the '
        "loss does not follow this power law, and the intervals, which are over seeds alone, are too narrow.",
    }
    rows = [row for f in a.falls for row in _rows(f)]
    return Table("How the loss falls with size", ["variant", *notes], rows, notes)


def _rows(f: Fall) -> list[list[str]]:
    if f.missing:
        return [[f.variant, "–", f.missing, "–", "–", "–"]]
    true = "unknown" if f.true_floor is None else f"{f.true_floor:.4f}"
    rows = []
    for measure, law in f.laws.items():
        found = [exponent(law), floor(law), true, p_value(law.p_misfit)] if law else ["none", "none", true, "–"]
        rows.append([f.variant, measure, *found])
    return rows
