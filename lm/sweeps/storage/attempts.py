"""Count how often a process died while it trained a group of runs: killed for lack of memory, for example.

Without the count, every start of a sweep would begin with the same group and die again. The count is in the directory
of the group's checkpoints. It is written before the group starts, and removed unless the process dies.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lm.errors import UserError
from lm.files import to_json, write_text
from lm.sweeps.storage.records import read_attempts
from lm.workdir.saved_run import newest_checkpoint

MAX_DEATHS = 3  # a group with so many counts as failed


class ProcessDied(Exception):
    """MAX_DEATHS processes died while they trained the same runs."""


def n_deaths(directory: Path) -> int:
    """Return how many processes have died while they trained the runs of a directory.

    A process that trains them now is counted. Deaths before the newest checkpoint are not: the runs make progress.
    """
    try:
        found = read_attempts(directory / "attempts.json")
    except (FileNotFoundError, UserError):  # none, or a damaged count
        return 0
    return found["attempts"] if newest_checkpoint(directory) == found["step"] else 0


@contextlib.contextmanager
def attempt(directory: Path) -> Iterator[None]:
    """Count a death if this process dies in the block; raises ProcessDied if there were MAX_DEATHS before."""
    if (deaths := n_deaths(directory)) >= MAX_DEATHS:
        raise ProcessDied(f"{deaths} processes died while they trained runs of this program; do they fit in memory?")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "attempts.json"
    write_text(path, to_json({"attempts": deaths + 1, "step": newest_checkpoint(directory)}) + "\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
