"""Show how long an evaluation takes."""

import sys
import time
from collections.abc import Callable

from lm.training.progress import duration

SECONDS_APART = 5  # between two lines


def show_progress(title: str, stream=None, *, clock=time.monotonic) -> Callable[[int, int], None]:
    """Return a function (done, total) that prints the percentage done and the remaining time every few seconds.

    The first call only starts the clock, so the remaining time does not include compilation.

    Args:
        title: what is being evaluated.
        stream: where to write; None: standard error.
        clock: returns seconds; for tests.
    """
    started = shown = None

    def report(done: int, total: int) -> None:
        nonlocal started, shown
        now = clock()
        if started is None:
            started, shown = (done, now), now
        elif now - shown >= SECONDS_APART and done < total:
            left = (total - done) * (now - started[1]) / (done - started[0])
            print(f"{title}: {100 * done / total:.0f} %  ETA {duration(left)}", file=stream or sys.stderr, flush=True)
            shown = now

    return report
