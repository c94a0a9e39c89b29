"""The claims of a sweep as rows of claims.csv: every test that the report makes a statement about, with its numbers."""

import math

from lm.sweeps.analysis.interactions import Interaction
from lm.sweeps.analysis.multipliers import Saving
from lm.sweeps.analysis.outcomes import Analysis, Comparison
from lm.sweeps.design.placebo import PLACEBO
from lm.sweeps.statistics.inference import Difference
from lm.sweeps.statistics.scaling import Estimate

DIFFERENCE, INTERACTION, MULTIPLIER = "difference", "interaction", "log compute multiplier"
FOUND = ("beyond the margin", "different")  # the verdicts that are findings


def claim_rows(a: Analysis) -> list[dict]:
    """Return one row per claim; none for a sweep that compares nothing.

    With sizes the claims are the compute multipliers, and the differences at each size are not listed. A budget that
    supports no conclusions has no significant rows.

    Returns:
        Rows with the columns
            kind            DIFFERENCE, INTERACTION, MULTIPLIER or PLACEBO
            variant, against, on    the names of the two; for an interaction, also those of the two texts
            seeds           of each variant (at each size)
            estimate, low, high, p  at the best rates of the grids, in nats per token, or the natural logarithm of the
                            multiplier; interval and p are before Holm's correction, and with looks include the
                            share of the error that the look may spend
            p_page          p after Holm's correction for the claims of the same kind in this sweep; "" for a placebo
            at_optimum, p_at_optimum    the same at the estimated optima, p uncorrected; "" without an estimate
            answer          see `Comparison.verdict`; for a multiplier "different", "undecided", or why there is none
            significant     "yes" or "no": a difference within the margin is no finding
        Numbers have six digits, so that another version of SciPy gives the same text; "" for a number that is missing.
    """
    if a.savings:
        rows = [_saving(s) for s in a.savings]
    else:
        rows = [_comparison(c) for c in a.comparisons] + [_interaction(x) for x in a.interactions]
    if a.placebo:
        rows.append(_comparison(a.placebo) | {"kind": PLACEBO, "p_page": ""})
    return rows if a.is_full else [row | _answer("no conclusion", False) for row in rows]


def _comparison(c: Comparison) -> dict:
    numbers = _numbers(c.difference, c.p_adjusted, c.at_optimum)
    found = c.is_significant and c.verdict in FOUND
    return _names(DIFFERENCE, c) | {"seeds": c.n_seeds} | numbers | _answer(c.verdict, found)


def _interaction(x: Interaction) -> dict:
    names = _names(INTERACTION, x, on=f"{x.text} − {x.first}")
    numbers = _numbers(x.difference, x.p_adjusted, x.at_optimum)
    found = x.is_significant and x.verdict in FOUND
    return names | {"seeds": x.difference.n if x.difference else 0} | numbers | _answer(x.missing or x.verdict, found)


def _saving(s: Saving) -> dict:
    at_best, at_optimum = (m and m.pooled for m in (s.at_best, s.at_optimum))
    answer = s.missing or ("different" if s.is_significant else "undecided")
    numbers = _numbers(at_best, s.p_adjusted, at_optimum)
    return _names(MULTIPLIER, s) | {"seeds": s.n_seeds} | numbers | _answer(answer, s.is_significant)


def _names(kind: str, of: Comparison | Interaction | Saving, on: str = "") -> dict:
    return {"kind": kind, "variant": of.variant, "against": of.against, "on": on}


def _numbers(at_best: Difference | Estimate | None, p_page: float, at_optimum: Difference | Estimate | None) -> dict:
    def center(found):
        return found.mean if isinstance(found, Difference) else found.value

    numbers = dict.fromkeys(("estimate", "low", "high", "p", "p_page", "at_optimum", "p_at_optimum"), math.nan)
    if at_best:
        numbers |= {"estimate": center(at_best), "low": at_best.low, "high": at_best.high, "p": at_best.p}
        numbers["p_page"] = p_page
    if at_optimum:
        numbers |= {"at_optimum": center(at_optimum), "p_at_optimum": at_optimum.p}
    return {name: "" if math.isnan(x) else f"{x:.6g}" for name, x in numbers.items()}


def _answer(answer: str, significant: bool) -> dict:
    return {"answer": answer, "significant": "yes" if significant else "no"}
