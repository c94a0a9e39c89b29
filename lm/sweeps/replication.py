"""Compare a sweep with the numbers of a paper: python -m lm.sweep --replicate FILE.toml

A file names a sweep, a source and the losses or differences that the source reports, in nats per
token: see configs/replications/. A size may differ with the model and the text, so the verdict is on
the direction, from the interval at Holm's level for the arms of the file:

    replicated      wholly on the source's side of 0; within the margin, if the source reports no
                    difference
    contradicted    wholly on the other side of 0, or within the margin though the source reports a
                    difference; wholly beyond the margin, if it reports none
    undecided       none of these

The power is the probability of "replicated" if the true difference here is that of the source. This
module does not import jax.
"""

import math
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from lm.command_line.loading import locate
from lm.config.values import close_match, short
from lm.sweeps import statistics
from lm.sweeps.analysis import CLAIM, Analysis, analyze
from lm.sweeps.record import read_page_record, read_record
from lm.sweeps.results import RUNS, read_runs, runs_from_csv
from lm.sweeps.statistics import LEVEL, Estimate
from lm.system.errors import UserError
from lm.system.files import NUMBER, check_shape, read_bytes
from lm.system.text_tables import table

REPLICATED = "replicated"
CONTRADICTED = "contradicted"
UNDECIDED = "undecided"
_ARM = {
    "variant": str, "against": str, "difference?": NUMBER, "losses?": [NUMBER], "sds?": [NUMBER],
    "runs?": int, "url?": str, "note?": str,
}  # fmt: skip
_FILE = {"sweep": str, "source": str, "url?": str, "arm": [_ARM]}


class Comparison(NamedTuple):
    """A difference of a source beside that of the sweep."""

    variant: str
    against: str
    theirs: Estimate  # its standard error is nan if the source does not have it
    ours: Estimate
    level: float  # of the interval of the verdict
    verdict: str
    power: float
    url: str
    note: str

    @property
    def size(self) -> str:
        """Return how the sizes compare; "agrees" if they may be equal."""
        se = math.hypot(self.ours.se, 0.0 if math.isnan(self.theirs.se) else self.theirs.se)
        low, high = self.ours._replace(mean=self.ours.mean - self.theirs.mean, se=se).interval()
        if low <= 0 <= high:
            return "agrees"
        if self.ours.mean * self.theirs.mean < 0:
            return "other sign"
        return "smaller" if abs(self.ours.mean) < abs(self.theirs.mean) else "larger"


def replicate(path: Path) -> tuple[dict[str, Any], list[Comparison]]:
    """Return the content of a file and its comparisons; raises UserError if it is wrong."""
    path = Path(locate(str(path)))
    if not path.is_file():
        raise UserError(f"--replicate: there is no file {path}; configs/replications/ has examples")
    try:
        content = tomllib.loads(read_bytes(path).decode())
        check_shape(content, _FILE)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--replicate {path}: {error}; configs/replications/ has examples"
        ) from None
    a = read_results(Path(content["sweep"]))
    if a.record["axis"] == "length":
        raise UserError(
            f"--replicate {path}: the claims of {content['sweep']} are how differences change with "
            "the length of training; give a sweep without lengths"
        )
    compared = []
    for arm in content["arm"]:
        claims = {(c.variant, c.against): c for c in a.of_kind(CLAIM)}
        key = arm["variant"], arm["against"]
        if key not in claims:
            names = [" − ".join(pair) for pair in claims]
            hint = close_match(" − ".join(key), names)
            raise UserError(
                f"--replicate {path}: {content['sweep']} has no {short(' − '.join(key))}{hint}; it "
                f"has {'; '.join(names)}"
            )
        if ours := claims[key].difference:
            compared.append((arm, _reported(arm, path), ours))
    factors = statistics.holm_factors([ours.p for _, _, ours in compared])
    margin = a.record["margin"]
    comparisons = []
    for (arm, theirs, ours), factor in zip(compared, factors, strict=True):
        level = 1 - (1 - LEVEL) / (1.0 if math.isnan(factor) else factor)
        sign = direction(theirs, margin)
        verdict = judge(ours.interval(level), sign, margin)
        chance = power(ours, theirs.mean, sign, margin, level)
        url = arm.get("url", content.get("url", ""))
        note = arm.get("note", "")
        comparison = Comparison(
            arm["variant"], arm["against"], theirs, ours, level, verdict, chance, url, note
        )
        comparisons.append(comparison)
    return content, comparisons


def read_results(directory: Path) -> Analysis:
    """Analyze the sweep of a directory, or a published page."""
    if (directory / RUNS).is_file():
        return analyze(read_record(directory), read_runs(directory))
    return analyze(read_page_record(directory), runs_from_csv(directory / "runs.csv"))


def _reported(arm: dict[str, Any], path: Path) -> Estimate:
    """Return the difference that a source reports, with its standard error if it has one."""
    losses = arm.get("losses", ())
    sds = arm.get("sds", ())
    if (len(losses) != 2 and "difference" not in arm) or len(sds) not in (0, 2):
        raise UserError(
            f"--replicate {path}: {arm['variant']} needs difference = -0.01, or losses = [its own, "
            "that of against]; with sds = [two standard deviations] and runs = their number"
        )
    mean = arm.get("difference", losses[0] - losses[1] if losses else math.nan)
    n = arm.get("runs", 1)
    se = math.hypot(*sds) / math.sqrt(n) if sds else math.nan
    return Estimate(float(mean), se, n - 1, n)


def direction(theirs: Estimate, margin: float) -> int:
    """Return the sign of the difference that a source reports, or 0 if it reports none.

    It reports none if the difference is within the margin, and within two of its standard errors.

    >>> [direction(Estimate(-0.004, se, 9, 10), 0.005) for se in (0.0004, 0.003, math.nan)]
    [-1, 0, 0]
    """
    if abs(theirs.mean) > margin or abs(theirs.mean) > 2 * theirs.se:
        return 1 if theirs.mean > 0 else -1
    return 0


def judge(interval: tuple[float, float], sign: int, margin: float) -> str:
    """Return the verdict of an interval on a difference of this sign, or on none (0).

    >>> [judge(ends, -1, 0.005) for ends in ((-0.05, -0.01), (0.001, 0.02), (-0.004, 0.003), (-0.02, 0.01))]
    ['replicated', 'contradicted', 'contradicted', 'undecided']
    >>> [judge(ends, 0, 0.005) for ends in ((-0.004, 0.001), (-0.03, -0.02), (-0.03, -0.002))]
    ['replicated', 'contradicted', 'undecided']
    """
    low, high = interval
    within = -margin < low and high < margin
    if sign:
        replicated = low > 0 if sign > 0 else high < 0
        contradicted = not replicated and (within or (high < 0 if sign > 0 else low > 0))
    else:
        replicated = within
        contradicted = high < -margin or low > margin
    if contradicted:
        return CONTRADICTED
    return REPLICATED if replicated else UNDECIDED


def power(ours: Estimate, theirs: float, sign: int, margin: float, level: float) -> float:
    """Return the probability of "replicated" if the true difference is `theirs`.

    >>> round(power(Estimate(0.0, 0.004, 30, 4), 0.01, 1, 0.005, 0.95), 2)
    0.68
    """
    if not (ours.se > 0 and ours.df > 0):
        return math.nan
    reach = float(stats.t.ppf(0.5 + level / 2, ours.df)) * ours.se
    if sign:
        return float(stats.nct.sf(reach / ours.se, ours.df, abs(theirs) / ours.se))
    room = margin - reach  # the estimate must lie this close to 0
    if room <= 0:
        return 0.0
    ends = ((room - theirs) / ours.se, (-room - theirs) / ours.se)
    return float(stats.t.cdf(ends[0], ours.df) - stats.t.cdf(ends[1], ours.df))


def describe(path: Path) -> str:
    """Return the comparisons of a file as a table for a terminal."""
    content, comparisons = replicate(path)
    header = ["variant − against", "source", "here", "95 % interval", "verdict", "size", "power"]
    lines = [cells_of(c) for c in comparisons]
    about = f"{content['source']}\nand {content['sweep']}: differences of losses, nats per token"
    return f"{about}\n{table([header, *lines])}"


def cells_of(c: Comparison) -> list[str]:
    """Return a comparison as the cells of a table."""
    low, high = c.ours.interval()
    error = "" if math.isnan(c.theirs.se) else f" ± {c.theirs.se:.4f}"
    return [
        f"{c.variant} − {c.against}",
        f"{c.theirs.mean:+.4f}{error}",
        f"{c.ours.mean:+.4f}",
        f"[{low:+.4f}, {high:+.4f}]",
        c.verdict,
        c.size,
        f"{100 * c.power:.0f} %",
    ]
