"""The error in each process names the missing process or the wrong argument. Threads simulate
processes.
"""

import contextlib
import socket
import threading

import pytest
from running import free_ports

from lm.parallel import rendezvous
from lm.parallel.rendezvous import meet
from lm.system.errors import TemporaryError, UserError


def meet_all(
    *processes: tuple[int, int], address: str | None = None, timeout: float = 30
) -> list[UserError | None]:
    """Return what `meet` raises in each process, given as (num_processes, process_id)."""
    address = address or f"localhost:{free_ports(1)[0]}"
    problems = [None] * len(processes)

    def run(i):
        try:
            meet(address, *processes[i], timeout)
        except UserError as error:
            problems[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return problems


def connect(address: str) -> socket.socket:
    """Connect to process 0 as soon as it listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(address.split(":"), 30)


def test_processes_meet_in_any_order():
    assert meet_all((4, 3), (4, 1), (4, 0), (4, 2)) == [None] * 4
    assert meet_all((1, 0)) == [None]


def test_missing_processes_are_named_in_all_others():
    problems = meet_all((4, 2), (4, 0), timeout=0.5)
    for problem in problems:
        assert isinstance(problem, TemporaryError)
        assert (
            "processes 1, 3 of 4 did not connect to process 0 within 0.5 s (--connect_timeout)"
            in str(problem)
        )


def test_an_interrupted_process_0_does_not_let_the_others_go_on(monkeypatch):
    """They would wait in jax.distributed.initialize for a coordinator that never starts."""

    def interrupt(missing):
        if 1 not in missing:  # process 1 has connected
            raise KeyboardInterrupt
        return sorted(missing)

    monkeypatch.setattr(rendezvous, "sorted", interrupt, raising=False)
    address, problems = f"localhost:{free_ports(1)[0]}", []
    waiting = threading.Thread(target=lambda: problems.extend(meet_all((3, 1), address=address)))
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        meet(address, 3, 0, 30)
    waiting.join(60)
    assert "process 0 was interrupted" in str(problems[0])


@pytest.mark.parametrize("host", ["localhost", "nohost.invalid"])
def test_a_process_0_that_cannot_be_reached_is_named(host):
    (problem,) = meet_all((2, 1), address=f"{host}:{free_ports(1)[0]}", timeout=0.3)
    assert isinstance(problem, TemporaryError)
    assert f"process 1 could not reach process 0 at {host}:" in str(problem)
    assert "Connection refused" in str(problem) or host != "localhost"


def test_an_invalid_address_is_refused_at_once():
    for problem in meet_all((2, 0), (2, 1), address="localhost"):
        assert "--coordinator_address: 'localhost' is not HOST:PORT" in str(problem)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(3, 0), (2, 1)], "process 1 has --num_processes 2, and process 0 has 3"),
        ([(3, 3)], "--process_id: 3 must be less than --num_processes = 3"),
        ([(3, -1)], "--process_id: -1 must be less than --num_processes = 3"),
    ],
)
def test_wrong_numbers_end_all_processes(given, message):
    problems = meet_all(*given)
    assert [type(problem) for problem in problems] == [UserError] * len(given)
    assert all(str(problem).startswith(message) for problem in problems)


def test_an_id_that_is_given_twice_ends_all_processes():
    """Either another id is missing, or there is one process too many."""
    problems = meet_all((3, 0), (3, 1), (3, 1), timeout=0.5)
    assert [type(problem) for problem in problems] == [TemporaryError] * 3
    assert "process 2 of 3 did not connect" in str(problems[0])
    assert "--process_id" in str(problems[0])
    (one_too_many,) = filter(None, meet_all((2, 0), (2, 1), (2, 1), timeout=0.5))
    assert "process 1 could not reach process 0" in str(one_too_many)


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        port = other_program.getsockname()[1]
        problems = meet_all((2, 0), (2, 1), address=f"127.0.0.1:{port}", timeout=0.3)
    assert all(isinstance(problem, TemporaryError) for problem in problems)
    assert f"process 0 cannot listen on port {port} (Address already in use)" in str(problems[0])
    assert "process 1 could not reach process 0" in str(problems[1])


def test_connections_of_other_programs_are_ignored():
    address = f"127.0.0.1:{free_ports(1)[0]}"
    first = threading.Thread(target=meet, args=(address, 2, 0, 30))
    first.start()
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"1\n"):
        with connect(address) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
    meet(address, 2, 1, 30)
    first.join(30)
    assert not first.is_alive()
