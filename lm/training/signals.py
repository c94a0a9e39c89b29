"""Handle SIGTERM and Ctrl-C: a run saves its state and stops."""

import contextlib
import os
import signal
from collections.abc import Callable

import jax

from lm.parallel import processes


class Signals:
    """A context in which SIGTERM and Ctrl-C are recorded and do not end the process; a second Ctrl-C ends it at once.

    Attributes:
        received: the number of the recorded signal, or None.
    """

    def __init__(self, say: Callable[[str], None]):
        self.received: int | None = None
        self._say, self._handlers_before, self._n_polls = say, {}, 0

    def __enter__(self) -> "Signals":
        if jax.process_count() > 1:  # JAX handles SIGTERM and notifies all processes
            self._handlers_before[signal.SIGINT] = signal.signal(signal.SIGINT, processes.interrupt_as_sigterm)
            return self
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers_before[number] = signal.signal(number, self._note)
        return self

    def to_stop(self) -> bool:
        """Return whether to stop here, between two dispatches or batches. All processes of a run get the same answer.

        Every process must poll equally often: see `processes.agreed_to_stop`.
        """
        self._n_polls += 1
        if self.received is None and processes.agreed_to_stop(self._n_polls):
            self.received = signal.SIGTERM
            self._say("SIGTERM: saving, then stopping")
        return self.received is not None

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _note(self, number, _frame) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.received = number
        again = "; press Ctrl-C to stop at once" if number == signal.SIGTERM else "; press Ctrl-C again to stop at once"
        with contextlib.suppress(RuntimeError):  # the signal came while this very stream was being written to
            self._say(f"{signal.Signals(number).name}: saving, then stopping{again}")
