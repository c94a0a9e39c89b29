"""Several processes that train as one: how they find each other, agree, and end. With one process nothing happens.

jax.distributed connects them; JAX itself recognizes SLURM, Open MPI, Kubernetes and TPU pods. What only one may do
(write files, talk) the first process does.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import jax
import numpy as np

from lm.errors import Passing, UserError
from lm.files import to_json

HEARTBEAT_SECONDS = 30  # a process that is silent for this long is gone, and all others end
SECONDS_TO_SPEAK = 10


def start(coordinator_address: str | None, num_processes: int | None, process_id: int | None, asked: bool) -> None:
    """Connect to the other processes: by these arguments, or as the cluster's environment tells, if asked or found.

    Raises UserError if they cannot be found.
    """
    given = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    if not (asked or coordinator_address or detected(os.environ)):
        return
    rank = os.environ.get("SLURM_PROCID", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    if int(rank if process_id is None else process_id) == 0:
        print(f"waiting for {f'all {num_processes}' if num_processes else 'the other'} processes", flush=True)
    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the other processes could not be reached: {reason}; outside of SLURM, Open MPI, TPU pods and Kubernetes "
            "(with extra [k8s]) give --coordinator_address HOST:PORT --num_processes N --process_id I"
        ) from None


def detected(environment) -> bool:
    """Whether this is one of several tasks of a SLURM step or of mpirun."""
    slurm = "SLURM_STEP_NODELIST" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1
    return slurm or int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process is the one that writes and talks."""
    return jax.process_index() == 0


def from_first(function: Callable):
    """What the function returns in the first process (anything JSON can hold), in all; its UserError too."""
    if jax.process_count() == 1:
        return function()
    answer = {}
    if is_first():
        try:
            answer["value"] = function()
        except UserError as error:
            answer |= {"problems": error.problems, "passing": isinstance(error, Passing)}
    answer = json.loads(_broadcast(to_json(answer)))
    if "problems" in answer:
        raise (Passing if answer["passing"] else UserError)(*answer["problems"])
    return answer["value"]


def _broadcast(text: str) -> str:
    """The first process's text, in all."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    data = np.frombuffer(text.encode(), np.uint8)
    length = int(broadcast_one_to_all(np.int32(len(data))))
    padded = data if is_first() else np.zeros(length, np.uint8)
    return bytes(np.asarray(broadcast_one_to_all(padded)).astype(np.uint8)).decode()


def check_equal(what: str, text: str) -> None:
    """Raises UserError in all processes if they do not have the same text; `what` names it."""
    if jax.process_count() == 1:
        return
    from jax.experimental.multihost_utils import process_allgather

    same = text == _broadcast(text)
    if not np.all(process_allgather(np.array(same))):
        raise UserError(f"{what} is not the same in all processes; give each the same files and the same command")


def asked_to_stop(count: int) -> bool:
    """Whether any process had SIGTERM and this is where all stop. All must ask, with count = 1, 2, 3, ...: JAX chooses
    the number after the largest that any has come to, and would wait for ever for one that is left out.
    """
    if jax.process_count() == 1:
        return False
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    return reached_preemption_sync_point(count)


def pass_on(number, _frame) -> None:
    """A handler that turns a signal into the SIGTERM that JAX tells all processes of."""
    os.kill(os.getpid(), signal.SIGTERM)


def leave(code: int) -> None:
    """End this one of several processes at once: the others may not have what ended it, and JAX would wait for them.
    The first, which all are connected to, goes last: those that found the same can still say so.
    """
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        if is_first():
            time.sleep(SECONDS_TO_SPEAK)
        os._exit(code)


@contextlib.contextmanager
def ending_together():
    """An error of this one of several processes ends it at once."""
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        print(error if isinstance(error, UserError) else traceback.format_exc(), file=sys.stderr)
        print(
            f"process {jax.process_index()} of {jax.process_count()} stops: {type(error).__name__}. If another process "
            "is gone, this is how it shows. The same command with --resume goes on from the last whole checkpoint, "
            "with as many processes, fewer or more",
            file=sys.stderr,
            flush=True,
        )
        leave(error.code if isinstance(error, UserError) else 1)
        raise
