"""Several processes that train one model: how they connect, agree on decisions, and end.

jax.distributed connects them; JAX recognizes SLURM, Open MPI, Kubernetes and TPU pods. Process 0 alone writes files and
prints. With one process every function here is trivial.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from lm.errors import TemporaryError, UserError
from lm.files import to_json

HEARTBEAT_SECONDS = 30  # after this time without a heartbeat a process counts as lost, and all others end
GRACE_SECONDS = 10  # how long process 0 waits before it ends, so that the others can print why they end


def connect(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None, multihost: bool
) -> None:
    """Connect to the other processes of the run, if there are any. Call it before anything uses a device.

    Args:
        coordinator_address: HOST:PORT of process 0; None: JAX asks the cluster's environment.
        num_processes: how many processes there are; None: from the environment.
        process_id: the number of this process; None: from the environment.
        multihost: ask the environment even if it is neither SLURM nor mpirun.

    Raises:
        UserError: if the other processes cannot be reached.
    """
    if not (multihost or coordinator_address or has_several_tasks(os.environ)):
        return
    rank = os.environ.get("SLURM_PROCID", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    if int(rank if process_id is None else process_id) == 0:
        print(f"waiting for {f'all {num_processes}' if num_processes else 'the other'} processes", flush=True)
    try:
        jax.distributed.initialize(
            coordinator_address, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the other processes could not be reached: {reason}; outside of SLURM, Open MPI, TPU pods and Kubernetes "
            "(with extra [k8s]) give --coordinator_address HOST:PORT --num_processes N --process_id I"
        ) from None


def has_several_tasks(environment) -> bool:
    """Return whether this process is one of several tasks of a SLURM step or of mpirun.

    >>> has_several_tasks({"OMPI_COMM_WORLD_SIZE": "2"}), has_several_tasks({})
    (True, False)
    """
    slurm = "SLURM_STEP_NODELIST" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1
    return slurm or int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Return whether this is process 0, which writes and prints."""
    return jax.process_index() == 0


def from_first(function: Callable[[], Any]) -> Any:
    """Call a function in process 0 and return its result in all processes.

    Args:
        function: returns anything that JSON can hold.

    Raises:
        UserError: in all processes, if the function raises one.
    """
    if jax.process_count() == 1:
        return function()
    answer = {}
    if is_first():
        try:
            answer["value"] = function()
        except UserError as error:
            answer |= {"problems": error.problems, "temporary": isinstance(error, TemporaryError)}
    answer = json.loads(_broadcast(to_json(answer)))
    if "problems" in answer:
        raise (TemporaryError if answer["temporary"] else UserError)(*answer["problems"])
    return answer["value"]


def _broadcast(text: str) -> str:
    """Return the text of process 0 in all processes."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    data = np.frombuffer(text.encode(), np.uint8)
    length = int(broadcast_one_to_all(np.int32(len(data))))
    padded = data if is_first() else np.zeros(length, np.uint8)
    return bytes(np.asarray(broadcast_one_to_all(padded)).astype(np.uint8)).decode()


def check_equal(what: str, text: str) -> None:
    """Raise UserError in all processes unless they have the same text; `what` names it in the error."""
    if jax.process_count() == 1:
        return
    from jax.experimental.multihost_utils import process_allgather

    same = text == _broadcast(text)
    if not np.all(process_allgather(np.array(same))):
        raise UserError(f"{what} differs between processes; give each process the same files and the same command")


def agreed_to_stop(n_polls: int) -> bool:
    """Return whether a process received SIGTERM and all processes stop here.

    Every process must call this with n_polls = 1, 2, 3, ...: JAX chooses the first number that no process has passed,
    and waits forever for a process that skips it.
    """
    if jax.process_count() == 1:
        return False
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    return reached_preemption_sync_point(n_polls)


def interrupt_as_sigterm(number, _frame) -> None:
    """Handle a signal by sending SIGTERM to this process. JAX notifies all processes of a SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


def leave(code: int) -> None:
    """End this process at once if it is one of several; otherwise do nothing.

    JAX would wait at exit for the other processes, which may not end. Process 0, to which all are connected, waits for
    GRACE_SECONDS: processes that failed in the same way can still print their error.
    """
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        if is_first():
            time.sleep(GRACE_SECONDS)
        os._exit(code)


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Return a context in which an exception in one of several processes is printed and ends that process at once.

    The other processes detect the loss and end as well.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        print(error if isinstance(error, UserError) else traceback.format_exc(), file=sys.stderr)
        print(
            f"process {jax.process_index()} of {jax.process_count()} ends: {type(error).__name__}. The loss of another "
            "process can also cause this error. Rerun the same command with --resume to continue from the last intact "
            "checkpoint, with any number of processes",
            file=sys.stderr,
            flush=True,
        )
        leave(error.code if isinstance(error, UserError) else 1)
        raise
