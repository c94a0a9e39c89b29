"""The tables of a report about learning rates."""

import math

from lm.sweeps.analysis.answers import difference
from lm.sweeps.analysis.outcomes import Analysis
from lm.sweeps.analysis.sensitivity import RateDifference, rate_differences, sensitivity
from lm.sweeps.report.tables import Table, with_interval
from lm.sweeps.storage.results import tuning_result

KINDS = {"final": "fresh", "tuning": "tuning"}  # of seeds, by phase


def rates(a: Analysis) -> Table | None:
    """Return the tuning results and the sensitivities; None if no variant had a choice of learning rates."""
    rows = []
    for v in a.variants.values():
        means = []
        for rate in v.tuned_rates:
            n_diverged, n_stuck, loss = tuning_result(a.results, a.record, v.name, rate)
            lost = ", ".join([f"{n_diverged} diverged"] * (n_diverged > 0) + [f"{n_stuck} stuck"] * (n_stuck > 0))
            shown = lost if math.isinf(loss) else difference(loss, sign="") + f" ({lost})" * bool(lost)
            means.append(f"{rate:g}: {shown}" + " (best)" * (rate == v.rate))
        if means:
            rows.append([v.name, ", ".join(means), difference(sensitivity(a.results, a.record, v.name), sign="")])
    notes = {
        "validation loss at each learning rate": "Mean over the tuning seeds at the end of training.",
        "LR sensitivity": "Expected loss above the best, in nats per token, if the learning rate is drawn from the "
        "grid (Wortsman et al. 2023, arXiv:2309.14322). Losses above the unigram baseline, and runs that diverged, "
        "count as that baseline; the paper takes the loss at initialization. It depends on the grid: compare variants "
        "with the same one.",
    }
    return Table("Tuning", ["variant", *notes], rows, notes, is_text=True) if rows else None


def differences(a: Analysis) -> Table | None:
    """Return the comparisons at each learning rate that both variants trained; None if no variant had a choice."""
    rows = []
    for c in a.comparisons:
        if {c.variant, c.against} <= a.variants.keys() and len(a.variants[c.variant].grid) > 1:
            name = f"{c.variant} − {c.against}"
            found = rate_differences(a.results, a.record, c.variant, c.against)
            rows += [[name, f"{d.rate:g}", _shown(d), f"{d.n} {KINDS[d.phase]}"] for d in found]
    notes = {
        "difference [95 % CI]": "Mean over seeds of the difference in test loss where both variants trained at the "
        "same learning rate, with the t interval of these seeds alone. It describes and does not test: it is not "
        "corrected, and with two seeds it is very wide.",
        "seeds": "The fresh seeds if both variants trained with them at this rate, else the tuning seeds. A variant "
        "trains with the fresh seeds at its best learning rate and the neighbors.",
    }
    header = ["comparison", "learning rate", *notes]
    return Table("Differences at each learning rate", header, rows, notes) if rows else None


def _shown(d: RateDifference) -> str:
    if not d.difference:
        return f"{d.n_diverged} of {2 * d.n} runs diverged"
    shown = with_interval(d.difference) if d.n > 1 else difference(d.difference.mean)
    return shown + f" ({d.n_stuck} of {2 * d.n} runs stuck)" * bool(d.n_stuck)
