"""What others found about the variants of a published page: the file others.csv beside its runs.csv.

Its columns: change (a variant), source, verdict (one of VERDICTS), evidence (a phrase), url. Their measures, sizes and
numbers of runs differ, so that only the direction is compared.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scipy.stats import kendalltau

from lm.errors import UserError
from lm.files import read_bytes
from lm.sweeps.analysis import Claim

VERDICTS = {"better": -1, "same": 0, "mixed": 0, "worse": 1, "unstable": 1}  # as signs of a difference in loss
MIN_ROWS = 4  # for a rank correlation


class Finding(NamedTuple):
    """What one source says about one change."""

    change: str
    source: str
    verdict: str
    evidence: str
    url: str


def read_others(page: Path) -> list[Finding]:
    """Return the findings of a page's others.csv, or none without the file; raises UserError if a row is wrong."""
    path = page / "others.csv"
    if not path.is_file():
        return []
    try:
        found = [Finding(**row) for row in csv.DictReader(io.StringIO(read_bytes(path).decode()))]
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} must have the columns {', '.join(Finding._fields)}: {error}") from None
    for finding in found:
        if finding.verdict not in VERDICTS or not finding.url.startswith("https://"):
            verdicts = ", ".join(VERDICTS)
            raise UserError(f"{path}: {finding.change}: give one of {verdicts}, and a url that starts with https://")
    return found


def rank_agreement(claims: Sequence[Claim], findings: Sequence[Finding]) -> dict[str, tuple[float, int]]:
    """Return by source Kendall's tau-b of its verdicts and the mean differences of the claims, and the number of both.

    It is 1 if every change that the source calls better than another has the lower loss here, and -1 if none has.
    Sources with fewer than MIN_ROWS changes, or with one verdict for all, are left out.
    """
    means = {claim.variant: claim.difference.mean for claim in claims if claim.difference}
    found = {}
    for source in dict.fromkeys(finding.source for finding in findings):
        pairs = [(VERDICTS[f.verdict], means[f.change]) for f in findings if f.source == source and f.change in means]
        if len(pairs) >= MIN_ROWS and len({verdict for verdict, _ in pairs}) > 1:
            found[source] = float(kendalltau(*zip(*pairs, strict=True)).statistic), len(pairs)
    return found
