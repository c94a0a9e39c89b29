"""What others found about the variants of a published page: others.csv beside its runs.csv.

Its columns: change (a variant), source, verdict (one of VERDICTS), evidence (a phrase), url, against
(what they compare with, if the page compares with something else; else empty). Their measures,
sizes, baselines and numbers of runs differ, so that only the direction is compared.
"""

import csv
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from scipy.stats import somersd

from lm.config.values import close_match
from lm.sweeps.analysis import Claim
from lm.system.errors import UserError
from lm.system.files import read_bytes

# As signs of a difference in loss.
VERDICTS = {"better": -1, "same": 0, "mixed": 0, "worse": 1, "unstable": 1}
MIN_ROWS = 4  # for a rank correlation


class Finding(NamedTuple):
    """What one source says about one change."""

    change: str
    source: str
    verdict: str
    evidence: str
    url: str
    against: str = ""


def read_others(page: Path, changes: Collection[str]) -> list[Finding]:
    """Return the findings of a page's others.csv, or none without the file.

    Raises UserError if a row is wrong, is about none of the changes, or repeats another.
    """
    path = page / "others.csv"
    if not path.is_file():
        return []
    try:
        rows = csv.DictReader(io.StringIO(read_bytes(path).decode()))
        findings = [Finding(**row) for row in rows]
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(
            f"{path} must have the columns {', '.join(Finding._fields)}: {error}"
        ) from None
    known = set()
    for finding in findings:
        place = f"{path}: {finding.change}"
        if finding.verdict not in VERDICTS or not (finding.url or "").startswith("https://"):
            raise UserError(
                f"{place}: give one of {', '.join(VERDICTS)}, and a url that starts with https://"
            )
        if finding.change not in changes:
            raise UserError(
                f"{place}: the page has no such variant{close_match(finding.change, list(changes))}"
            )
        if finding[:2] in known:
            raise UserError(f"{place}: there are two rows of {finding.source}; keep one")
        known.add(finding[:2])
    return findings


def rank_agreement(
    claims: Sequence[Claim], findings: Sequence[Finding]
) -> dict[str, tuple[float, int]]:
    """Return by source how its verdicts rank with the mean differences, and of how many changes.

    This is Kendall's, over the pairs of changes that the source does not call equal (Somers 1962):
    1 if the better one of each pair has the lower loss here, and -1 if it has the higher one. Of a
    change with several claims the first counts. Left out are findings against something that the
    page does not compare with, and sources with fewer than MIN_ROWS changes or one verdict for all.
    """
    means: dict[str, float] = {}
    for claim in claims:
        if claim.difference:
            means.setdefault(claim.variant, claim.difference.mean)
    findings = [finding for finding in findings if not finding.against]
    agreement = {}
    for source in dict.fromkeys(finding.source for finding in findings):
        own = [f for f in findings if f.source == source and f.change in means]
        signs = [VERDICTS[f.verdict] for f in own]
        if len(own) >= MIN_ROWS and len(set(signs)) > 1:
            tau = somersd(signs, [means[f.change] for f in own]).statistic
            agreement[source] = float(tau), len(own)
    return agreement
