"""Connect all processes of a run before JAX does, so that an error can name the missing ones.

`jax.distributed.initialize` aborts with a C++ stack trace if a process is missing, or if the address or an id is wrong.
Therefore each process first opens a TCP connection to process 0, at the address that JAX uses afterwards, and sends its
id. Process 0 sends the same answer to all of them when all have connected or the time limit is reached.

Each message is one line: process 0 sends GREETING, the other process sends [process_id, num_processes], and process 0
answers {"problems", "temporary"}.
"""

import contextlib
import os
import selectors
import socket
import time

from lm.config.values import is_address
from lm.errors import TemporaryError, UserError
from lm.files import COUNT, parse_json, to_json

_BIND = "JAX_COORDINATOR_BIND_ADDRESS"  # where process 0 listens, if set
GREETING = b"lm.train: process 0\n"
REPLY_SECONDS = 10  # time limit for the greeting; added to the timeout, it is the limit for the answer
RETRY_SECONDS = 0.2
MAX_LINE = 2**16  # bytes
MAX_LISTED = 8  # maximum number of ids in an error message


def meet(address: str, num_processes: int, process_id: int, timeout: int) -> None:
    """Wait until all processes of a run have connected to process 0.

    Args:
        address: HOST:PORT of process 0; no other program may use the port.
        num_processes: the number of processes.
        process_id: the id of this process.
        timeout: seconds to wait.

    Raises:
        TemporaryError: the port is in use, or a process did not connect in time.
        UserError: an id is too large or used twice, or `num_processes` differs between processes.
    """
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"--process_id: {process_id} must be less than --num_processes = {num_processes}; ids start at 0"
        )
    for name, given in (("--coordinator_address", address), (_BIND, os.environ.get(_BIND, address))):
        if not is_address(given):
            raise UserError(f"{name}: {given[:200]!r} is not HOST:PORT with a port from 1 to 65535")
    if process_id == 0:
        problem = _wait_for_others(address, num_processes, timeout)
    else:
        problem = _wait_for_first(address, num_processes, process_id, timeout)
    if problem:
        raise problem


# ---- Process 0 -------------------------------------------------------------------------------------------------------


def _wait_for_others(address: str, num_processes: int, timeout: int) -> UserError | None:
    with _listen(address) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        problem = _collect(server, selector, num_processes, timeout)
        answer = {"problems": problem.problems if problem else [], "temporary": isinstance(problem, TemporaryError)}
        for key in list(selector.get_map().values()):
            if key.fileobj is not server:
                with key.fileobj as connection, contextlib.suppress(OSError):
                    connection.sendall(f"{to_json(answer)}\n".encode())
    return problem


def _listen(address: str) -> socket.socket:
    """Listen where JAX listens afterwards: on all interfaces, unless JAX_COORDINATOR_BIND_ADDRESS names one."""
    port = address.rpartition(":")[2]
    host, _, port = os.environ.get(_BIND, f"[::]:{port}").rpartition(":")
    all_interfaces = host == "[::]"
    dual = all_interfaces and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or (":" in host and not all_interfaces) else socket.AF_INET
    try:
        name = "" if all_interfaces else host.strip("[]")
        return socket.create_server((name, int(port)), family=family, dualstack_ipv6=dual, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if getattr(error, "errno", None) else error
        raise TemporaryError(
            f"process 0 cannot listen on port {port} ({reason}); choose another port, end the program that uses it, "
            "or give each process its own --process_id"
        ) from None


def _collect(server: socket.socket, selector, num_processes: int, timeout: int) -> UserError | None:
    """Accept connections until all processes have connected; return the problem, or None."""
    deadline, ids = time.monotonic() + timeout, {}  # process id by connection
    while missing := sorted(set(range(1, num_processes)) - set(ids.values())):
        if time.monotonic() > deadline:
            return TemporaryError(
                f"{_list(missing)} of {num_processes} did not connect to process 0 within {timeout} s "
                "(--connect_timeout); see their output, and check that they can reach --coordinator_address"
            )
        events = selector.select(max(0.0, deadline - time.monotonic()))
        # Handle known connections first: the old connection of a restarted process is then removed before the new one.
        for key, _ in sorted(events, key=lambda event: event[0].fileobj not in ids):
            connection = key.fileobj
            if connection is server:
                _accept(server, selector)
            elif (introduction := _read_introduction(connection)) is None:
                selector.unregister(connection)
                connection.close()
                ids.pop(connection, None)
            elif problem := _check_introduction(*introduction, set(ids.values()), num_processes):
                return problem
            else:
                ids[connection] = introduction[0]
    return None


def _accept(server: socket.socket, selector) -> None:
    connection, _ = server.accept()
    connection.settimeout(REPLY_SECONDS)
    selector.register(connection, selectors.EVENT_READ)
    with contextlib.suppress(OSError):
        connection.sendall(GREETING)


def _read_introduction(connection: socket.socket) -> tuple[int, int] | None:
    """Return (process_id, num_processes); None if the connection was closed or comes from another program."""
    try:
        process_id, count = parse_json(connection.recv(MAX_LINE), [COUNT])
    except (OSError, ValueError):
        return None
    return process_id, count


def _check_introduction(process_id: int, count: int, known: set[int], num_processes: int) -> UserError | None:
    if count != num_processes:
        return UserError(
            f"process {process_id} has --num_processes {count}, and process 0 has {num_processes}; "
            "give all processes the same number"
        )
    if process_id in {0, *known}:
        return UserError(f"two processes have --process_id {process_id}; give each process its own")
    return None


def _list(ids: list[int]) -> str:
    """Format the names of processes.

    >>> _list([3]), _list([1, 2])
    ('process 3', 'processes 1, 2')
    """
    more = f" and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else ""
    return f"process{'es' * (len(ids) > 1)} {', '.join(map(str, ids[:MAX_LISTED]))}{more}"


# ---- The other processes ---------------------------------------------------------------------------------------------


def _wait_for_first(address: str, num_processes: int, process_id: int, timeout: int) -> UserError | None:
    """Connect to process 0 and return the problem in its answer."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), min(timeout, REPLY_SECONDS)) as connection:
                return _ask(connection, num_processes, process_id, timeout)
        except (OSError, OverflowError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
        if time.monotonic() > deadline:
            return TemporaryError(
                f"process {process_id} could not reach process 0 at {address} within {timeout} s (--connect_timeout): "
                f"{reason}; see the output of process 0, and check --coordinator_address"
            )
        time.sleep(RETRY_SECONDS)


def _ask(connection: socket.socket, num_processes: int, process_id: int, timeout: int) -> UserError | None:
    with connection.makefile("rb") as lines:
        if lines.readline(len(GREETING)) != GREETING:
            raise ValueError("another program answers there, or the run has already started")
        connection.sendall(f"{to_json([process_id, num_processes])}\n".encode())
        connection.settimeout(timeout + REPLY_SECONDS)
        line = lines.readline(MAX_LINE)
    if not line:
        raise ConnectionError("process 0 closed the connection")
    answer = parse_json(line, {"problems": [str], "temporary": bool})
    if not answer["problems"]:
        return None
    return (TemporaryError if answer["temporary"] else UserError)(*answer["problems"])
