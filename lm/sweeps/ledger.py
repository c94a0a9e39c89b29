"""Keep the ledger of the changes that are added to a study: what was tried, and what was accepted.

Whoever adds one change after another finds one that seems to help. LORD++ keeps the expected share of
false ones among all that are accepted at ALPHA, however many are tried (Ramdas et al. 2017,
arXiv:1710.00499, and its sequence from Javanmard and Montanari 2018, Annals of Statistics 46:526).
Change t is accepted if its p is at most

    level_t = W0 g_t + (ALPHA - W0) g_{t - tau_1} + ALPHA (g_{t - tau_2} + g_{t - tau_3} + ...)
    g_t = 0.0772 log(max(t, 2)) / (t exp(sqrt(log t))),

where tau_1, tau_2, ... are the accepted changes before it: a level falls with each change that is
tried, and rises after one is accepted. The level is fixed when a change starts, before its result is
known, so a change that was started counts as tried. `benchmarks/calibration` simulates this.
"""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scipy import stats

from lm.sweeps.record import PATIENCE
from lm.sweeps.statistics import Estimate
from lm.system.errors import UserError
from lm.system.files import make_folder, read_bytes, write_text
from lm.system.locks import lock
from lm.system.text_tables import csv_table, csv_text

ALPHA = 0.05  # bound on the expected share of false ones among the accepted changes
W0 = ALPHA / 2  # what is spent on changes before the first is accepted


class Entry(NamedTuple):
    """A change that was tried."""

    change: str
    settings: str
    level: float
    p: float | None = None  # of "the loss is not lower", one-sided; None: no result yet

    @property
    def accepted(self) -> bool:
        return self.p is not None and self.p <= self.level


def share(t: int) -> float:
    """Return g_t, the share of a budget that the t-th change after its start may spend."""
    return 0.07720838 * math.log(max(t, 2)) / (t * math.exp(math.sqrt(math.log(t))))


def next_level(accepted: Sequence[bool], w0: float = W0) -> float:
    """Return the level of the change after these.

    >>> [float(f"{next_level(before):.4g}") for before in ([], [False], [True], [False, True, True])]
    [0.001338, 0.000291, 0.001629, 0.003173]
    """
    t = len(accepted) + 1
    times = [i for i, is_accepted in enumerate(accepted, 1) if is_accepted]
    level = w0 * share(t)
    for rank, time in enumerate(times):
        earned = ALPHA if rank else ALPHA - w0
        level += earned * share(t - time)
    return level


def one_sided(difference: Estimate) -> float:
    """Return the p-value of "the difference is not below 0"."""
    if not (difference.se > 0 and difference.df > 0):
        return 1.0
    return float(stats.t.cdf(difference.mean / difference.se, difference.df))


def path_beside(workdir: Path, study: str) -> Path:
    """Return the ledger of a study's additions: beside their directories."""
    return workdir.resolve().parent / f"{study}.ledger.csv"


def read_ledger(path: Path) -> list[Entry]:
    """Return the entries of a ledger, in their order; raises UserError if it is damaged."""
    try:
        rows = list(csv.DictReader(io.StringIO(read_bytes(path).decode(), newline="")))
    except FileNotFoundError:
        return []
    try:
        return [
            Entry(
                csv_text(row["change"]),
                csv_text(row["settings"]),
                float(row["level"]),
                float(row["p"]) if row["p"] else None,
            )
            for row in rows
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is no ledger with the columns {', '.join(Entry._fields)}: {error}; restore it"
        ) from None


def _write(path: Path, entries: Sequence[Entry]) -> None:
    rows = [entry._asdict() | {"accepted": entry.accepted} for entry in entries]
    write_text(path, csv_table([*Entry._fields, "accepted"], rows))


def register(path: Path, change: str, settings: Sequence[str]) -> Entry:
    """Enter a change that starts, with its level; or return its entry if it is resumed.

    Raises UserError if the ledger has a change of this name with other settings.
    """
    text = " ".join(sorted(settings))
    make_folder(path.parent)
    with lock(path.parent, timeout=PATIENCE):
        entries = read_ledger(path)
        for entry in entries:
            if entry.change == change and entry.settings != text:
                raise UserError(
                    f"--add: {path} has {change} with {entry.settings}; give this change another name"
                )
            if entry.change == change:
                return entry
        entry = Entry(change, text, next_level([entry.accepted for entry in entries]))
        _write(path, [*entries, entry])
    return entry


def finish(path: Path, change: str, difference: Estimate | None) -> None:
    """Enter the result of a change; None, as of a change that diverged: it is not accepted."""
    p = one_sided(difference) if difference else 1.0
    with lock(path.parent, timeout=PATIENCE):
        entries = read_ledger(path)
        _write(path, [e._replace(p=p) if e.change == change else e for e in entries])


def describe(path: Path, change: str) -> str:
    """Return the verdict on a change, and of how many; "" if the ledger does not have it."""
    entries = read_ledger(path)
    for entry in entries:
        if entry.change == change:
            n_accepted = sum(other.accepted for other in entries)
            what = "no result yet" if entry.p is None else "not accepted"
            if entry.accepted:
                what = "accepted"
            tried = f"{len(entries)} tried, {n_accepted} accepted"
            return f"{what} at level {entry.level:.2g}; {tried}"
    return ""
