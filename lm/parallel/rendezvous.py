"""Connect all processes of a run before JAX does, so that an error can name the missing ones.

`jax.distributed.initialize` aborts with a C++ stack trace if a process is missing, or if the
address or an id is wrong. Therefore each process first sends the line "process_id num_processes" to
process 0, at the address that JAX uses afterwards. Process 0 answers all of them when all have
connected or the time is over: "0", or an exit code and a message.
"""

import contextlib
import os
import socket
import time

from lm.config.values import is_address, short
from lm.system.errors import TemporaryError, UserError
from lm.system.text_tables import some

CONNECT_SECONDS = 10  # time limit to connect, and to send a line
RETRY_SECONDS = 0.2


def meet(address: str, num_processes: int, process_id: int, timeout: int) -> None:
    """Wait until all processes of a run have connected to process 0.

    Args:
        address: HOST:PORT of process 0; no other program may use the port.
        timeout: seconds to wait.

    Raises:
        TemporaryError: the port is in use, or a process did not connect in time.
        UserError: the id is too large, or `num_processes` differs between processes.
    """
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"--process_id: {process_id} must be less than --num_processes = {num_processes}; ids "
            "start at 0"
        )
    if not is_address(address):
        raise UserError(
            f"--coordinator_address: {short(address)} is not HOST:PORT with a port from 1 to 65535"
        )
    host, _, port = address.rpartition(":")
    if process_id == 0:
        _collect(int(port), num_processes, timeout)
    else:
        _report(host.strip("[]"), int(port), num_processes, process_id, timeout)


def _collect(port: int, n: int, timeout: float) -> None:
    """Wait for all other processes; a problem is sent to those that have connected, and raised."""
    deadline = time.monotonic() + timeout
    # by process id; a restarted process replaces its connection
    waiting: dict[int, socket.socket] = {}
    answer = "1 process 0 was interrupted"
    with _listen(port) as server, contextlib.ExitStack() as opened:
        try:
            while missing := sorted({*range(1, n)} - {*waiting}):
                if time.monotonic() > deadline:
                    ids = some([*map(str, missing)], limit=8)
                    raise TemporaryError(
                        f"process{'es' * (len(missing) > 1)} {ids} of {n} did not connect to "
                        f"process 0 within {timeout} s (--connect_timeout); see their output, and "
                        "check that they can reach --coordinator_address and that each process has "
                        "its own --process_id"
                    )
                server.settimeout(max(0.01, deadline - time.monotonic()))
                # else the time is over, or this is another program
                with contextlib.suppress(OSError, ValueError):
                    connection = opened.enter_context(server.accept()[0])
                    connection.settimeout(CONNECT_SECONDS)
                    i, count = map(int, connection.recv(100).split())
                    waiting[i] = connection
                    if count != n:
                        raise UserError(
                            f"process {i} has --num_processes {count}, and process 0 has {n}; give "
                            "all the same number"
                        )
            answer = "0"
        except UserError as error:
            answer = f"{error.code} {error}"
            raise
        finally:
            for connection in waiting.values():
                with contextlib.suppress(OSError):
                    connection.sendall(f"{answer}\n".encode())


def _listen(port: int) -> socket.socket:
    """Listen where JAX listens afterwards: on all interfaces, IPv6 and IPv4."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise TemporaryError(
            f"process 0 cannot listen on port {port} ({reason}); choose another port, end the "
            "program that uses it, or give each process its own --process_id"
        ) from None


def _report(host: str, port: int, n: int, process_id: int, timeout: float) -> None:
    """Connect to process 0, and raise the problem in its answer."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            seconds = min(timeout, CONNECT_SECONDS)
            with socket.create_connection((host, port), seconds) as connection:
                connection.sendall(f"{process_id} {n}\n".encode())
                connection.settimeout(timeout + CONNECT_SECONDS)
                code, _, message = connection.makefile("r").readline().strip().partition(" ")
            if code == "0":
                return
            if code in ("1", "2"):
                raise (TemporaryError if code == "1" else UserError)(message)
            reason: object = "another program answers there, or the run has already started"
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
        if time.monotonic() > deadline:
            raise TemporaryError(
                f"process {process_id} could not reach process 0 at {host}:{port} within {timeout} "
                f"s (--connect_timeout): {reason}; see the output of process 0, and check "
                "--coordinator_address"
            )
        time.sleep(RETRY_SECONDS)
