"""The runner without training: rounds of tuning, groups that fail or die, and other processes."""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import tiny

from lm.data import Corpus, Split
from lm.sweeps import runner as module
from lm.sweeps.plan import load_sweep
from lm.sweeps.record import read_failures
from lm.sweeps.results import Run, append_runs, read_runs
from lm.sweeps.runner import Key, _Runner
from lm.sweeps.tuning import LEARNING_RATE
from lm.system.errors import UserError

RATES, SEEDS, TUNING_SEEDS = (1e-3, 2e-3, 4e-3), tuple(range(16)), (100, 101)
BEST = {"rms": 0.0015, "layer": 0.009}  # the second is beyond the edge of its list


class Norm:
    """A stand-in for a variant, named by its norm."""

    corpus, warm_starts, tokens = None, {}, 640

    def __init__(self, norm, cell="", rates=RATES):
        about = {
            "arm": norm,
            "n_points": len(rates),
            "lists": {LEARNING_RATE: rates},
            "seeds": SEEDS,
            "tuning_seeds": TUNING_SEEDS,
        }
        self.norm, self.plan = norm, SimpleNamespace(**about, cell=cell)

    def run_config(self, point, seed):
        return tiny(
            optimizer={"learning_rate": point[0]}, train={"seed": seed}, model={"norm": self.norm}
        )


class Fake:
    """A stand-in for StackedRuns: the loss is a parabola in log2 of the rate, and `trained` has the
    configs.
    """

    trained = []

    def __init__(self, configs, corpus, directory, **options):
        self.configs = configs

    def train(self, signals):
        self.trained.extend(self.configs)
        return [result(config) for config in self.configs]


def result(config) -> dict:
    loss = 2 + 0.1 * math.log2(config.optimizer.learning_rate / BEST[config.model.norm]) ** 2
    return {
        "status": "finished",
        "diverged_step": None,
        "steps": 10,
        "val_loss": loss,
        "test_loss": loss,
    }


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(module, "StackedRuns", Fake)
    monkeypatch.setattr(Fake, "trained", [])
    return Fake


def start(workdir, names=("rms", "layer"), lines=None, cells=("",)) -> _Runner:
    """Return the runner of a new process; with several cells, each name is a variant of its own
    cell.
    """
    variants = dict(
        zip(names, map(Norm, names, cells if len(cells) > 1 else cells * len(names)), strict=True)
    )
    about = {"tune": {LEARNING_RATE: list(RATES)}, "seeds": SEEDS, "tuning_seeds": TUNING_SEEDS}
    about["data"] = {"unigram": {"validation": 9.0}}
    record = {
        "tune": [LEARNING_RATE],
        "variants": dict.fromkeys(names, about),
        "cells": list(cells),
    }
    record["starts"] = [{"processor": "", "git": {"commit": "abc", "dirty": True}}]
    return _Runner(
        variants,
        record,
        workdir,
        2,
        ([] if lines is None else lines).append,
        SimpleNamespace(received=0),
    )


def points(workdir, phase, name) -> set:
    return {
        run.point[LEARNING_RATE]
        for run in read_runs(workdir)
        if (run.phase, run.variant) == (phase, name)
    }


def test_lists_are_extended_and_the_final_runs_train_at_the_vertex(tmp_path, fake):
    lines = []
    assert start(tmp_path, lines=lines).run() == 0
    assert points(tmp_path, "tuning", "rms") == set(RATES)
    assert points(tmp_path, "final", "rms") == {0.0015}
    assert points(tmp_path, "tuning", "layer") == {*RATES, 0.008, 0.016}
    assert points(tmp_path, "final", "layer") == {0.009}
    assert len(fake.trained) == len(read_runs(tmp_path)) == 2 * (3 + 5) + 2 * 16
    assert "layer: tuned to learning_rate 0.009 (best tried: learning_rate 0.008)" in lines
    edges = [line for line in lines if "at the edge" in line]
    assert [(line.split(":")[0], line.split()[-1]) for line in edges] == [
        ("layer", "0.008"),
        ("layer", "0.016"),
    ]
    assert "0.004" in edges[0]  # the best rate of the declared list
    assert {run.commit for run in read_runs(tmp_path)} == {"abc with uncommitted changes"}
    lines.clear()
    assert start(tmp_path, lines=lines).run() == 0  # nothing is left to train
    assert len(fake.trained) == 48
    assert not any("at the edge" in line for line in lines)


def test_a_cell_is_finished_before_the_next_one_begins(tmp_path, fake):
    start(tmp_path, cells=("plays", "docs")).run()
    order = [run.variant for run in read_runs(tmp_path)]
    assert order == ["rms"] * order.count("rms") + ["layer"] * order.count("layer")


def test_a_group_of_arms_is_finished_before_the_next_one_begins(tmp_path, fake):
    """With known shapes, so that the points of an arm do not depend on the others."""
    runner = start(tmp_path)
    runner.record["shapes"] = {"": 0.2}
    runner.groups = (("layer",), ("rms",))
    runner.run()
    order = [run.variant for run in read_runs(tmp_path)]
    assert order == ["layer"] * order.count("layer") + ["rms"] * order.count("rms")


def test_groups_that_lack_an_arm_are_refused(tmp_path, monkeypatch):
    """Or a sweep would say that it is finished without it."""
    plan = load_sweep("configs/sweeps/norms.py", "full")
    arms = tuple(v.arm for v in plan.variants.values())
    variants = SimpleNamespace(keys=list, values=list)
    monkeypatch.setattr(module, "resolve_variants", lambda *_: variants)
    monkeypatch.setattr(module, "describe_variants", lambda *_: "")
    monkeypatch.setattr(module, "refuse_idle_changes", lambda *_: set())
    for groups, shapes, said in (
        ((arms[:-1],), {"": 0.2}, "each arm once"),
        ((arms, arms[:1]), {"": 0.2}, "each arm once"),
        ((arms,), {}, "the shape of each cell"),
    ):
        wrong = dataclasses.replace(plan, groups=groups, shapes=shapes)
        with pytest.raises(ValueError, match=said):
            module.run_sweep(wrong, tmp_path, 1)


def test_a_lost_line_is_trained_again_and_nothing_else(tmp_path, fake):
    start(tmp_path).run()
    path = tmp_path / "runs.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for lost in range(0, len(lines), 7):
        path.write_text("".join(lines[:lost] + lines[lost + 1 :]))
        fake.trained.clear()
        assert start(tmp_path).run() == 0
        assert len(fake.trained) == 1
        assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)


def test_two_processes_divide_the_runs(tmp_path, fake, monkeypatch):
    """The second one starts, and finishes everything, while the first trains its second group."""
    train, second = Fake.train, []

    def train_beside(self, signals):
        if len(fake.trained) == 2 * jax.device_count() and not second:
            second.append(None)  # not again
            second.append(start(tmp_path))
            waiting = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=stop)
            monkeypatch.setattr(module, "time", waiting)  # of the runner alone: a lock waits, too
            with contextlib.suppress(StopIteration):
                second[1].run()
        return train(self, signals)

    def stop(seconds):
        raise StopIteration  # it waits for the group of the first one

    monkeypatch.setattr(Fake, "train", train_beside)
    assert start(tmp_path).run() == 0
    assert len(second) == 2
    keys = [run.key for run in read_runs(tmp_path)]
    assert len(fake.trained) == len(keys) == 48  # no run was trained twice


def test_the_time_left_follows_from_the_groups_that_all_processes_have_finished(
    tmp_path, fake, monkeypatch
):
    """Each of four groups takes a minute; another process finishes the last one during the first."""
    train, lines, now, size = Fake.train, [], [0.0], 2 * jax.device_count()
    keys = [Key("final", "rms", (1e-3,), seed) for seed in range(4 * size)]

    def a_minute(self, signals):
        if not now[0]:
            append_runs(
                tmp_path,
                [
                    Run(*key[:2], {LEARNING_RATE: 1e-3}, key[3], "finished")
                    for key in keys[3 * size :]
                ],
            )
        now[0] += 60
        return train(self, signals)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Fake, "train", a_minute)
    start(tmp_path, lines=lines).train(keys)
    assert lines == [
        f"final 1/4: {size} runs of rms",
        # 2 of 4 groups in 60 s
        f"final 2/4: {size} runs of rms, 1.00 minutes left for all final runs",
        # 3 of 4 groups in 120 s
        f"final 3/4: {size} runs of rms, 40.0 seconds left for all final runs",
    ]


@pytest.mark.parametrize("phase", ["tuning", "final"])
def test_a_group_that_fails_does_not_stop_the_others(tmp_path, fake, monkeypatch, phase):
    train = Fake.train

    def failing(self, signals):
        if self.configs[0].model.norm == "layer" and (self.configs[0].train.seed >= 100) == (
            phase == "tuning"
        ):
            raise RuntimeError("out of memory")
        return train(self, signals)

    monkeypatch.setattr(Fake, "train", failing)
    lines, first = [], start(tmp_path)
    first.say = lines.append
    assert first.run() == 1
    n_failed = len(first.failed)
    assert n_failed == sum("failed: RuntimeError: out of memory" in line for line in lines) > 0
    assert read_failures(tmp_path) == {"layer": "RuntimeError: out of memory"}
    assert points(tmp_path, "final", "rms")
    assert not points(tmp_path, "final", "layer")
    monkeypatch.setattr(Fake, "train", train)
    assert start(tmp_path).run() == 0
    assert read_failures(tmp_path) == {}
    assert points(tmp_path, "final", "layer") == {0.009}


def test_runs_in_which_processes_die_come_last_and_fail_in_the_end(tmp_path, monkeypatch):
    """All runs of "layer" kill the process that trains them; each start of the sweep is another
    process.
    """

    class Killed(BaseException):
        pass

    class Deadly(Fake):
        def train(self, signals):
            order.append((self.configs[0].model.norm, self.configs[0].train.seed))
            if self.configs[0].model.norm == "layer":
                raise Killed
            return [result(config) for config in self.configs]

    monkeypatch.setattr(module, "StackedRuns", Deadly)
    # a killed process removes no file
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    keys = [
        Key("final", name, (1e-3,), seed)
        for name, seeds in (("layer", SEEDS[:1]), ("rms", SEEDS))
        for seed in seeds
    ]
    starts, size = [], 2 * jax.device_count()
    for _ in range(4):
        order, lines = [], []
        sweep = start(tmp_path, lines=lines)
        with contextlib.suppress(Killed):
            sweep.train(keys)
        starts.append(order)
    rms = [("rms", seed) for seed in range(0, len(SEEDS), size)]
    assert starts == [[("layer", 0)], [*rms, ("layer", 0)], [("layer", 0)], []]
    error = "RuntimeError: 3 processes died while they trained these runs; do they fit in memory?"
    assert any(error in line for line in lines)
    assert "3 processes died" in read_failures(tmp_path)["layer"]
    assert not list(tmp_path.glob("unfinished/*"))  # the next start tries again


@pytest.mark.slow
def test_a_loss_below_the_entropy_of_the_text_fails_its_runs_alone(tmp_path):
    """Two untrained variants evaluate the same tokens; the source of the text of "layer" gives a
    loss of 50.
    """

    class Untrained(Norm):
        def __init__(self, norm, nats):
            super().__init__(norm, (1e-3,))
            tokens = np.arange(50).astype(np.uint16) % 19
            splits = {name: Split(name, tokens, 50, 50, surprisal=lambda ids: np.full(len(ids), nats))
                      for name in ("train", "validation", "test")}  # fmt: skip
            self.corpus = Corpus("text", splits, None, "")

        def run_config(self, point, seed):
            return tiny(train={"steps": 0, "seed": seed}, model={"norm": self.norm, "n_layers": 1})

    sweep = start(tmp_path)
    sweep.variants = {"layer": Untrained("layer", 50.0), "rms": Untrained("rms", 0.1)}
    sweep.train([Key("final", name, (1e-3,), 0) for name in sweep.variants])
    assert [run.variant for run in read_runs(tmp_path)] == ["rms"]
    assert "BelowEntropy: the validation loss is " in read_failures(tmp_path)["layer"]


def test_a_linked_lock_of_a_group_is_an_error_and_not_another_process(tmp_path):
    (tmp_path / ".claims" / "group").mkdir(parents=True)
    (tmp_path / ".claims" / "group" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not a file but a link"), start(tmp_path)._claim("group"):
        pass


def test_runs_of_other_points_are_kept_and_not_used(tmp_path, fake):
    """Final runs at a point that the tuning does not choose, as after a change of the tuning runs."""
    start(tmp_path).run()
    (some, *_) = [run for run in read_runs(tmp_path) if run.phase == "final"]
    append_runs(tmp_path, [type(some)(**vars(some) | {"point": {LEARNING_RATE: 0.5}})])
    before = len(fake.trained)
    assert start(tmp_path).run() == 0
    assert len(fake.trained) == before
