"""Signals that end a run save its state first."""

import os
import signal

import jax
import pytest

from lm.training.signals import Signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_are_noted_and_handled_as_before_afterwards(name):
    number, lines = getattr(signal, name), []
    # pytest may run under nohup, which ignores SIGHUP
    before = signal.signal(number, signal.default_int_handler)
    with Signals(lines.append) as signals:
        assert not signals.to_stop()
        os.kill(os.getpid(), number)
        assert signals.to_stop()
    assert signals.received == number
    assert [line.partition(":")[0] for line in lines] == [name]
    assert signal.signal(number, before) == signal.default_int_handler


def test_a_process_under_nohup_ignores_sighup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(print) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.to_stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_of_the_compiler_after_ctrl_c_is_an_interruption():
    lines = []

    def fail(*signals):
        with Signals(lines.append):
            for number in signals:
                signal.raise_signal(number)
            raise jax.errors.JaxRuntimeError("INTERNAL: ptxas exited with non-zero error code 2")

    with pytest.raises(KeyboardInterrupt):
        fail(signal.SIGINT)
    assert (
        lines[-1]
        == "stopped by an error: JaxRuntimeError: INTERNAL: ptxas exited with non-zero error code 2"
    )
    for signals in ((), (signal.SIGTERM,)):
        with pytest.raises(jax.errors.JaxRuntimeError):
            fail(*signals)
