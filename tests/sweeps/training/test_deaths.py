"""Processes of a sweep that die or fail: how other processes, later starts and the report handle it."""

import contextlib
from pathlib import Path

import jax
import pytest
import synthetic_sweep
from tiny import tiny

from lm.sweeps import Budget, Sweep
from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.design.spec import SweepPlan
from lm.sweeps.storage.attempts import MAX_DEATHS
from lm.sweeps.storage.results import Results
from lm.sweeps.training import runner

RECORD = {"starts": [{"host": "", "processor": "", "git": None}]}
PLAN = SweepPlan("name", "", "full", Sweep(baseline="plain"), Budget(tuning_seeds=2, seeds=5), {}, {}, {})


class NoSignals:
    received = 0


class Variant:
    """A stand-in for a variant, named by its norm."""

    warm_starts, corpus = {}, None

    def __init__(self, norm):
        self.norm = norm

    def run_config(self, rate, seed):
        return tiny(optimizer={"learning_rate": rate}, train={"seed": seed}, model={"norm": self.norm})


def start(workdir, variants, lines) -> runner._Runner:
    """Return the runner of a new process."""
    return runner._Runner(PLAN, variants, RECORD, Results(workdir), 2, lines.append, NoSignals)


def test_runs_that_another_process_has_given_up_are_not_trained(tmp_path, monkeypatch):
    """Both processes start; one is the fourth to train runs of "layer" and removes the count, the other waits."""
    trained = []

    class Runs:
        def __init__(self, configs, corpus, directory, **options):
            self.configs = configs
            trained.append(configs[0].model.norm)

        def train(self, signals):
            about = ("phase", "variant", "learning_rate", "seed")
            result = synthetic_sweep.run("final", "plain", 1e-3, 0, 2.0)
            return [{key: value for key, value in result.items() if key not in about} for _ in self.configs]

    monkeypatch.setattr(runner, "StackedRuns", Runs)
    variants, size = {name: Variant(name) for name in ("layer", "rms")}, 2 * jax.device_count()
    keys = [(name, 1e-3, seed) for name in variants for seed in range(2 * size)]
    first, second = (start(tmp_path, variants, []) for _ in range(2))
    count = first.directory("final", keys[:size]) / "attempts.json"
    count.parent.mkdir(parents=True)
    count.write_text('{"attempts": 3, "step": null}')
    for process in (first, second):
        assert process.train("final", keys) == 2
    assert trained == ["rms", "rms"]
    assert start(tmp_path, variants, []).train("final", keys) == 0  # a later start tries again


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("error", "most"), [(Killed(), MAX_DEATHS), (MemoryError("too many runs"), 5)])
def test_a_sweep_whose_speeds_cannot_be_measured_is_finished(tmp_path, monkeypatch, error, most):
    """Each start is another process, and a report is written after the first. After MAX_DEATHS none is tried again."""
    measured, lines = [], []

    def measure(pairs, baseline, together):
        measured.append(together)
        raise error

    monkeypatch.setattr(runner, "measure_variants", measure)
    if isinstance(error, Killed):
        monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a killed process removes no file
    workdir = synthetic_sweep.write(tmp_path / "sweep", *synthetic_sweep.sweep())
    (workdir / "speeds.json").rename(tmp_path / "speeds.json")
    for _ in range(5):
        with contextlib.suppress(Killed):
            start(workdir, {}, lines).measure_speeds()
        (reason,) = [text for text in analyze(workdir).warnings if text.startswith("the throughput is not measured")]
    assert len(measured) == most
    assert ("3 processes died" if most == MAX_DEATHS else "MemoryError: too many runs") in reason
    assert lines[-1].startswith("WARNING: the throughput is not measured (")
    assert lines[-1].endswith("rerun to try again") == (most != MAX_DEATHS)
    (tmp_path / "speeds.json").rename(workdir / "speeds.json")
    assert not analyze(workdir).warnings
