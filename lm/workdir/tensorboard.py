"""TensorBoard event files, written without a thread: an error such as a full disk reaches the
caller.
"""

import sys
import time
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 30


class EventFile:
    """A file of scalars in workdir/tensorboard. (tensorboardX's SummaryWriter hangs if its thread
    cannot write.)

    Readers ignore what earlier files have of the steps from `first_step` on.
    """

    def __init__(self, workdir: Path, first_step: int):
        # tensorboardX imports torch if it is installed, which takes seconds and is not used here.
        hidden: dict[str, Any] = {"torch": None} if "torch" not in sys.modules else {}
        sys.modules.update(hidden)
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.summary import scalar
        finally:
            for name in hidden:
                del sys.modules[name]

        self._event = Event
        self._scalar = scalar
        folder = workdir / "tensorboard"
        resumed = folder.exists()
        folder.mkdir(exist_ok=True)
        # Files are named by the second: a start within the same one would overwrite the file before
        # it.
        self._file = EventsWriter(str(folder / "events"), f".from-{first_step:09}")
        if resumed:
            session = SessionLog(status=SessionLog.START)
            self._file.write_event(
                Event(wall_time=time.time(), step=first_step, session_log=session)
            )
        self._flushed = 0.0

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Add numbers by their tags."""
        now = time.time()
        for tag, value in scalars.items():
            self._file.write_event(
                self._event(wall_time=now, step=step, summary=self._scalar(tag, value))
            )
        if now - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        self._file.close()
