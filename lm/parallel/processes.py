"""Several processes that train one model: how they connect, agree on decisions, and end.

jax.distributed connects them; JAX recognizes SLURM, Open MPI, Kubernetes and TPU pods. Process 0
alone writes files and prints. With one process there is nothing to connect, to agree on or to wait
for.

Processes exchange small texts through the key-value store of JAX's coordination service.
Collectives on devices would fail if one process is late: Gloo, on CPUs, waits 30 s.
"""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from lm.parallel import rendezvous
from lm.system.errors import TemporaryError, UserError, first_line, keep_stdout_to_python
from lm.system.files import to_json
from lm.system.text_tables import say

# After this time without a heartbeat a process counts as lost, and all others end.
HEARTBEAT_SECONDS = 30
# Process 0 waits so long before it exits, so that the others can print their error.
GRACE_SECONDS = 10
WAIT_HOURS = 12  # how long a process waits for another one, which may be tokenizing a text
POLL_SECONDS = 1
QUIET_SECONDS = 10  # process 0 prints which process it waits for after this time
_FAILURES = "lm/failures/"  # prefix in the key-value store of the errors of processes that exited
_exchanges = itertools.count()  # numbers the exchanges; all processes make them in the same order


# ---- Connecting ----------------------------------------------------------------------------------


def connect(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    multihost: bool,
    timeout: int,
) -> None:
    """Connect to the run's other processes, if any. Call it before anything uses a device.

    Args:
        coordinator_address: HOST:PORT of process 0; None: JAX asks the cluster's environment.
        num_processes: how many processes there are; None: from the environment.
        process_id: the number of this process; None: from the environment.
        multihost: ask the environment even if it is neither SLURM nor mpirun.
        timeout: seconds to wait for the other processes.

    Raises:
        UserError: the processes were started with wrong addresses, ids or numbers.
        TemporaryError: a process is missing, or the port is taken.
    """
    if not (multihost or coordinator_address or has_several_tasks(os.environ)):
        return
    address, n, i = _find_cluster(coordinator_address, num_processes, process_id, timeout)
    if i == 0:
        say(f"waiting for {n} processes at {address}, at most {timeout} s (--connect_timeout)")
    rendezvous.meet(address, n, i, timeout)
    keep_stdout_to_python()
    try:
        jax.distributed.initialize(
            address,
            n,
            i,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise TemporaryError(
            f"the other processes could not be reached: {first_line(error)}"
        ) from None


def _find_cluster(
    address: str | None, num_processes: int | None, process_id: int | None, timeout: int
) -> tuple[str, int, int]:
    """Return the address of process 0, the number of processes, and this one's, or UserError.

    JAX has no public function for what `jax.distributed.initialize` finds in the environment.
    """
    from jax._src.clusters import ClusterEnv

    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    cluster: tuple = (None,)
    reason = "JAX recognizes no cluster here"
    try:
        cluster = ClusterEnv.auto_detect_unset_distributed_params(
            address, num_processes, process_id, None, None, timeout
        )
    except Exception as error:  # each cluster raises its own exceptions
        reason = first_line(error)
    if None in cluster[:3]:
        raise UserError(
            f"the other processes were not found: {reason}; outside of SLURM, Open MPI, TPU pods "
            "and Kubernetes (with extra [k8s]) give --coordinator_address HOST:PORT "
            "--num_processes N --process_id I"
        )
    return cluster[:3]


def has_several_tasks(environment) -> bool:
    """Return whether this process is one of several tasks of a SLURM step or of mpirun.

    >>> has_several_tasks({"OMPI_COMM_WORLD_SIZE": "2"}), has_several_tasks({})
    (True, False)
    """
    # of the step: a shell of salloc -n4 is one task
    slurm = int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    return slurm or int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Return whether this is process 0, which writes and prints."""
    return jax.process_index() == 0


# ---- Agreeing ------------------------------------------------------------------------------------


def from_first(function: Callable, *args, **kwargs) -> Any:
    """Call function(*args, **kwargs) in process 0 only; return its result, as JSON, in all.

    Raises:
        UserError, TemporaryError: in the other processes, if process 0 ends with an error (see
            `leave`).
    """
    if jax.process_count() == 1:
        return function(*args, **kwargs)
    key = f"lm/{next(_exchanges)}"
    if is_first():
        _store().key_value_set(key, to_json(function(*args, **kwargs)))
    return json.loads(_wait_for(key, 0))  # in process 0 too, with the same types


def gather(text: str) -> list[str]:
    """Wait for all processes, and return the list of their texts in each of them."""
    if jax.process_count() == 1:
        return [text]
    key = f"lm/{next(_exchanges)}"
    _store().key_value_set(f"{key}/{jax.process_index()}", text)
    return from_first(lambda: [_wait_for(f"{key}/{i}", i) for i in range(jax.process_count())])


def check_equal(what: str, text: str) -> None:
    """Wait for all processes; raise UserError in all if their texts differ (`what` names them)."""
    digests = gather(hashlib.sha256(text.encode()).hexdigest())
    if different := [i for i, digest in enumerate(digests) if digest != digests[0]]:
        raise UserError(
            f"{what} differs between processes 0 and {', '.join(map(str, different))}; give each "
            "process the same files and the same command"
        )


def _store():
    return _coordination().client


def _coordination():
    """Return JAX's record of the coordination service: client, process_id, num_processes.

    This is a private interface of JAX. The public ones do not suffice: collectives fail if a
    process is 30 s late, and `jax.process_count()` raises an error if there is no device.
    """
    from jax._src.distributed import global_state

    return global_state


def _wait_for(key: str, sender: int) -> str:
    """Return the text that another process stores, or raise the error with which one exited."""
    began = time.monotonic()
    printed = not is_first()
    while (waited := time.monotonic() - began) < WAIT_HOURS * 3600:
        try:
            # Wait in short calls, so that Python can handle Ctrl-C between them.
            return _store().blocking_key_value_get(key, POLL_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise TemporaryError(
                    f"the connection to process 0 was lost: {first_line(error)}"
                ) from None
        for process, text in _store().key_value_dir_get(_FAILURES):
            failure = json.loads(text)
            kind = UserError if failure["code"] == UserError.code else TemporaryError
            raise kind(f"process {process.rpartition('/')[2]} ended: {failure['message']}")
        if not printed and waited > QUIET_SECONDS:
            say(f"waiting for process {sender}, at most {WAIT_HOURS} hours")
            printed = True
    raise TemporaryError(
        f"process {sender} did not respond within {WAIT_HOURS} hours; see its output"
    )


def agreed_to_stop(n_polls: int) -> bool:
    """Return whether a process received SIGTERM and all processes stop here.

    Every process must call this with n_polls = 1, 2, 3, ...: JAX chooses the first number that no
    process has passed, and waits forever for a process that skips it.
    """
    if jax.process_count() == 1:
        return False
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    return reached_preemption_sync_point(n_polls)


# ---- Ending --------------------------------------------------------------------------------------


def interrupt_as_sigterm(number, _frame) -> None:
    """Handle a signal by sending SIGTERM to this process. JAX notifies all processes of a SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


def are_several() -> bool:
    """Return whether this process is connected to others."""
    return _coordination().client is not None and _coordination().num_processes > 1


def leave(code: int, message: str) -> None:
    """End this process at once if it is one of several; otherwise do nothing.

    A normal exit would wait for the other processes, which may not exit. Processes that wait for
    this one exit with its code and message. All are connected to process 0, which waits for
    GRACE_SECONDS so that they can print the message.
    """
    if are_several():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            failure = {"code": code, "message": message}
            _store().key_value_set(f"{_FAILURES}{_coordination().process_id}", to_json(failure))
        if _coordination().process_id == 0:
            time.sleep(GRACE_SECONDS)
        os._exit(code)


def leave_after(error: Exception) -> None:
    """Print an exception and end this process at once, if it is one of several."""
    if not are_several():
        return
    say(str(error) if isinstance(error, UserError) else traceback.format_exc(), sys.stderr)
    say(
        f"process {_coordination().process_id} of {_coordination().num_processes} ends: "
        f"{type(error).__name__}. The loss of another process can also cause this error. Rerun "
        "the same command with --resume to continue from the last intact checkpoint, with any "
        "number of processes",
        sys.stderr,
    )
    leave(error.code if isinstance(error, UserError) else 1, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Print an exception of one of several processes, and end that process at once.

    The other processes detect the loss and end as well.
    """
    try:
        yield
    except Exception as error:
        leave_after(error)
        raise
