"""The time of a run by activity: exclusive, complete, over all starts, and waiting only while the
device is idle.
"""

import contextlib
import threading
import time

import numpy as np
import pytest
from running import summary_of

from benchmarks.faults.runs import stopped_at
from lm.training import wall_time
from lm.training.dispatch import Dispatch, pipeline
from lm.training.wall_time import WallTime
from lm.workdir.checkpoints import read_metas


def test_each_second_counts_once_also_in_nested_contexts_and_after_errors(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(wall_time.time, "monotonic", lambda: now[0])
    clock = WallTime({"steps": 100.0})
    now[0] += 1
    with clock.during("steps"):
        now[0] += 2
        with clock.during("data_wait"):
            now[0] += 4
        with contextlib.suppress(OSError), clock.during("saving"):
            now[0] += 8
            raise OSError
        now[0] += 16
    found = {
        "steps": 118.0,
        "evaluation": 0.0,
        "saving": 8.0,
        "compilation": 0.0,
        "data_wait": 4.0,
        "other": 1.0,
    }
    assert clock.seconds() == found
    assert sum(clock.shares().values()) == pytest.approx(1)


class Metrics:
    """What a device returns: ready once it has finished."""

    def __init__(self, finished: threading.Event):
        self.is_ready = finished.is_set

    def __array__(self, dtype=None, copy=None):
        return np.zeros(1)


def test_the_device_waits_for_data_only_once_it_has_no_work():
    finished, idle = threading.Event(), []

    def inputs_of(step: int, n_steps: int) -> int:
        if step == 1:
            time.sleep(0.05)  # the device still works
            finished.set()
            time.sleep(0.05)
        return step

    @contextlib.contextmanager
    def waiting():
        idle.append(finished.is_set())
        yield

    plan = [Dispatch(0, 1), Dispatch(1, 1)]
    program = lambda state, given, n: (state, {"loss": Metrics(finished)})  # noqa: E731
    when = {"pause": lambda dispatch: False, "stop": lambda: False, "waiting": waiting}
    list(pipeline(program, None, plan, inputs_of, **when))
    assert idle == [False, True]  # at the start it has no work either


@pytest.mark.slow
def test_a_resumed_run_adds_to_the_time_of_its_earlier_starts(train, tmp_path):
    with stopped_at(9):
        assert train(tmp_path / "run", "--config.train.steps_per_dispatch=1")[0] == 143
    before = read_metas(tmp_path / "run")[10]["seconds"]
    assert set(before) == set(wall_time.ACTIVITIES)
    code, output = train(tmp_path / "run", "--config.train.steps_per_dispatch=1", "--resume")
    summary = summary_of(tmp_path / "run")
    assert code == 0
    assert summary["wall_seconds"] >= sum(before.values())
    for activity, share in summary["goodput"].items():
        assert share * summary["wall_seconds"] >= before[activity] - 0.1  # rounded
        assert f"{activity.replace('_', ' ')} " in output.partition(" in all starts: ")[2]
