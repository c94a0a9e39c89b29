"""Exchange of results and errors through the key-value store. The processes of a test run one after
the other.
"""

import contextlib
import hashlib
import itertools
import types

import jax
import pytest

from lm.parallel import processes
from lm.system import errors
from lm.system.errors import TemporaryError, UserError


class Store(dict):
    """A key-value store with the interface of JAX's."""

    key_value_set = dict.__setitem__

    def blocking_key_value_get(self, key, timeout_in_ms):
        if key not in self:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        return self[key]

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.items() if key.startswith(prefix)]


@pytest.fixture
def process(monkeypatch):
    """Return process(i, function, *args), which calls the function as process i of three. Each i is
    used once.
    """
    service = types.SimpleNamespace(client=Store(), num_processes=3)
    monkeypatch.setattr(processes, "_coordination", lambda: service)
    monkeypatch.setattr(jax, "process_count", lambda: 3)

    def process(i, function, *args):
        service.process_id = i
        monkeypatch.setattr(jax, "process_index", lambda: i)
        monkeypatch.setattr(processes, "_exchanges", itertools.count())
        return function(*args)

    return process


def fail(error):
    raise error


def test_all_processes_get_the_result_of_the_first(process):
    first = process(0, processes.from_first, lambda a: {"a": (a, None)}, 1)
    other = process(1, processes.from_first, fail, AssertionError("called in process 1"))
    assert first == other == {"a": [1, None]}


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (UserError("one", "two"), UserError, "one\ntwo$"),
        (TemporaryError("one", "two"), TemporaryError, "one\ntwo$"),
        (OSError(28, "No space left on device", "runs/a"), TemporaryError, ".*No space left"),
        (KeyError("defect"), TemporaryError, ".*defect"),
        (KeyboardInterrupt(), TemporaryError, "interrupted"),
        (None, TemporaryError, "TypeError"),  # the result is not JSON
    ],
)
def test_an_exception_in_process_0_ends_the_processes_that_wait_for_it(
    process, monkeypatch, error, kind, message
):
    monkeypatch.setattr(processes.os, "_exit", lambda code: None)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0)
    arguments = (fail, error) if error else (object,)
    with contextlib.suppress(KeyError, TypeError):  # in this test the process is not ended
        process(0, errors.with_exit_code(processes.from_first), *arguments)
    with pytest.raises(kind, match=f"^process 0 ended: {message}") as raised:
        process(1, processes.from_first, fail, AssertionError("called in process 1"))
    assert type(raised.value) is kind


def test_a_defect_in_one_of_several_processes_is_printed_and_ends_it(process, monkeypatch, capsys):
    """Otherwise Python would wait at exit for the other processes, which wait for this one."""
    ended = []
    monkeypatch.setattr(processes.os, "_exit", ended.append)
    with pytest.raises(KeyError):  # in this test the process is not ended
        process(1, errors.with_exit_code(lambda: {}["key"]))
    assert ended == [1]
    assert "KeyError: 'key'" in capsys.readouterr().err


def test_a_process_without_devices_ends(process, monkeypatch):
    """After an error of --platform, jax.process_count() would raise an error too."""

    def process_count():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    ended = []
    monkeypatch.setattr(processes.os, "_exit", ended.append)
    monkeypatch.setattr(jax, "process_count", process_count)
    assert process(1, errors.with_exit_code(lambda: fail(UserError("--platform gpu: ...")))) == 2
    assert ended == [2]


def test_processes_with_different_texts_are_named(process):
    for i, text in ((1, "a"), (2, "b")):
        processes._store().key_value_set(f"lm/0/{i}", hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(UserError, match="the data differs between processes 0 and 2; ") as first:
        process(0, processes.check_equal, "the data", "a")
    with pytest.raises(UserError) as other:
        process(1, processes.check_equal, "the data", "a")
    assert other.value.problems == first.value.problems


def test_a_process_that_does_not_respond_is_named(process, monkeypatch):
    monkeypatch.setattr(processes, "WAIT_HOURS", 1e-6)
    with pytest.raises(TemporaryError, match="process 1 did not respond within 1e-06 hours"):
        process(0, processes.check_equal, "the data", "a")


def test_a_lost_connection_is_a_temporary_error(process, monkeypatch):
    unavailable = jax.errors.JaxRuntimeError(
        "UNAVAILABLE: failed to connect to all addresses\nmore"
    )
    monkeypatch.setattr(Store, "blocking_key_value_get", lambda *_: fail(unavailable))
    with pytest.raises(
        TemporaryError, match=r"the connection to process 0 was lost: .*UNAVAILABLE.*addresses$"
    ):
        process(1, processes.from_first, fail)
