"""Judge what a command did after a fault. The package's docstring defines the verdicts."""

from collections.abc import Sequence
from typing import NamedTuple

VERDICTS = ("survived", "lost", "silent", "traceback")
DOCUMENTED = (0, 1, 2)  # exit codes without a signal and with a finite loss


class Outcome(NamedTuple):
    """The outcome of a command: its exit code (None after an uncaught exception) and its output."""

    code: int | None
    output: str

    @property
    def last_line(self) -> str:
        return (self.output.strip().splitlines() or ["(no output)"])[-1]


class Trial(NamedTuple):
    """One injected fault: its description, the verdict, and the reason unless it was survived."""

    fault: str
    verdict: str
    reason: str = ""


def judge(
    fault: str,
    outcome: Outcome,
    differences: Sequence[str] = (),
    losses: Sequence[str] = (),
    names: Sequence[str] = ("",),
) -> Trial:
    """Return the verdict on a command that ran after a fault.

    Args:
        differences: how its result differs from that of an undisturbed command; empty if it is the
            same.
        losses: intact things that were deleted or changed.
        names: an error must contain one of these, such as the name of the damaged file.
    """
    if outcome.code not in DOCUMENTED or "Traceback (most recent call last)" in outcome.output:
        return Trial(fault, "traceback", f"exit code {outcome.code}: {outcome.output[-1000:]}")
    if losses:
        return Trial(fault, "lost", losses[0])
    if outcome.code == 0 and differences:
        return Trial(fault, "lost" if "WARNING" in outcome.output else "silent", differences[0])
    if outcome.code and not any(name in outcome.output for name in names):
        return Trial(
            fault, "traceback", f"the error names none of {', '.join(names)}: {outcome.last_line}"
        )
    return Trial(fault, "survived")
