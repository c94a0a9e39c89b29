"""Handle SIGTERM, Ctrl-C, and SIGHUP of a closed terminal: a run saves its state and stops."""

import contextlib
import os
import signal
from collections.abc import Callable

import jax

from lm.parallel import processes
from lm.system.errors import first_line


class Signals:
    """A context in which signals are recorded and do not end the process, but a second Ctrl-C.

    The signals are SIGTERM, Ctrl-C, and SIGHUP unless the process ignores it, as under nohup.
    """

    def __init__(self, say: Callable[[str], None]):
        self.received: int | None = None  # the number of the recorded signal
        self._say = say
        self._n_polls = 0

    def __enter__(self) -> "Signals":
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        handle = self._note
        if jax.process_count() > 1:  # JAX handles SIGTERM and notifies all processes
            numbers = numbers[1:]
            handle = processes.interrupt_as_sigterm
        self._handlers_before = {number: signal.signal(number, handle) for number in numbers}
        return self

    def to_stop(self) -> bool:
        """Return whether to stop between two dispatches or batches, the same in all processes.

        Every process must poll equally often: see `processes.agreed_to_stop`.
        """
        self._n_polls += 1
        if self.received is None and processes.agreed_to_stop(self._n_polls):
            self.received = signal.SIGTERM
            self._say("SIGTERM: saving, then stopping")
        return self.received is not None

    def __exit__(self, _kind, error, _traceback) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        # Ctrl-C also ends the processes of the compiler, such as NVIDIA's ptxas.
        if self.received == signal.SIGINT and isinstance(error, jax.errors.JaxRuntimeError):
            self._say(f"stopped by an error: {first_line(error)}")
            raise KeyboardInterrupt from error

    def _note(self, number, _frame) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.received = number
        again = "again " if number == signal.SIGINT else ""
        # The signal may come while this very stream is written to.
        with contextlib.suppress(RuntimeError):
            self._say(
                f"{signal.Signals(number).name}: saving, then stopping; press Ctrl-C {again}to "
                "stop at once"
            )
