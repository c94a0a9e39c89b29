"""Where the time of a run goes."""

import contextlib
import time
from collections.abc import Iterator

ACTIVITIES = ("steps", "evaluation", "saving", "compilation", "data_wait", "other")


class WallTime:
    """Seconds of a run by activity: its wall time, from the compilation of the first start on.

    Args:
        before: the seconds of earlier starts, from the checkpoint that this start resumes. What a
            killed start did after that checkpoint is not counted.

    >>> clock = WallTime({"steps": 3.0, "evaluation": 1.0})
    >>> [round(share, 2) for share in clock.shares().values()]
    [0.75, 0.25, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, before: dict[str, float]):
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0) | before
        self._activity = "other"
        self._since = time.monotonic()

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time in this context as an activity; a context within it has its own."""
        outer = self._switch(activity)
        try:
            yield
        finally:
            self._switch(outer)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by activity up to now."""
        self._switch(self._activity)
        return dict(self._seconds)

    def shares(self) -> dict[str, float]:
        """Return the share of each activity in the wall time."""
        seconds = self.seconds()
        return {activity: value / sum(seconds.values()) for activity, value in seconds.items()}

    def _switch(self, activity: str) -> str:
        """Begin an activity and return the one before."""
        before = self._activity
        now = time.monotonic()
        self._seconds[before] += now - self._since
        self._activity = activity
        self._since = now
        return before
