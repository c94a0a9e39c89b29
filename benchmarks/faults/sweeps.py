"""Sweeps that are killed, and sweeps whose files are damaged."""

import dataclasses
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.damage import WAYS, damage, files_below
from benchmarks.faults.judge import Outcome, Trial
from benchmarks.faults.runs import ROOT, Bench, call, judge_after_kill, judge_and_undo, shuffled
from lm.sweeps.results import read_runs

SWEEP = ROOT / "tests" / "configs" / "tiny_sweep.py"
N_KILLS = 3
# of a run, because they differ when it is trained again
LEFT_OUT = {
    "seconds": 0,
    "tokens_per_second": None,
}


def damaged_for_report(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of a finished sweep in every way, and analyze it as lm.report does."""
    yield from bench.damaged_and_read("report", _finished(bench), draw, _analyzed)


def damaged_files(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage files of a finished sweep, and rerun it."""
    whole = _finished(bench)
    for file in shuffled(files_below(whole), draw):
        name = file.relative_to(whole)
        way = draw.choice(WAYS)
        with bench.copy(whole) as workdir:
            damage(workdir / name, way, draw)
            yield judge_and_undo(
                f"{name} {way}, then rerun",
                lambda workdir=workdir: bench.run(*_program(workdir)),
                lambda _, workdir=workdir: changes(workdir, whole),
                lambda file=file, path=workdir / name: shutil.copyfile(file, path),
                names=(file.name,),
            )


def killed(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Kill a sweep at random moments with SIGKILL until it has finished, and compare its results."""
    whole = _finished(bench)
    workdir = bench.base / "sweep_killed"
    for number in range(N_KILLS):
        shutil.rmtree(workdir, ignore_errors=True)
        bench.kill("workdir", draw.random() * 6, *_program(workdir))
        fault = f"kill {number} of a sweep"
        outcome = bench.run(*_program(workdir))
        yield judge_after_kill(fault, outcome, lambda: changes(workdir, whole))


def changes(workdir: Path, expected: Path) -> list[str]:
    """Return how the finished runs of two sweeps differ, without times and provenance."""
    ours = _runs(workdir)
    theirs = _runs(expected)
    if ours.keys() != theirs.keys():
        return ["other runs"]
    return [f"the run {key} differs" for key in ours if ours[key] != theirs[key]]


def _runs(workdir: Path) -> dict:
    return {run.key: dataclasses.replace(run, **LEFT_OUT) for run in read_runs(workdir)}


def _finished(bench: Bench) -> Path:
    """Return the directory of a finished sweep; the first call runs it."""
    whole = bench.base / "sweep"
    if not whole.exists():
        assert bench.run(*_program(whole)).code == 0
    return whole


def _program(workdir: Path) -> tuple[str, ...]:
    return ("-m", "lm.sweep", f"--config={SWEEP}", f"--workdir={workdir}")


def _analyzed(workdir: Path) -> tuple[Outcome, str]:
    """Analyze a sweep as lm.report does; return the outcome, the answers and the warnings."""
    from lm.report import read_finished
    from lm.system.errors import with_exit_code

    texts = []

    @with_exit_code
    def analyzing(_) -> int:
        analysis = read_finished(workdir)
        texts.append(f"{analysis.claims} {analysis.warnings} {analysis.failed} {analysis.variants}")
        return 0

    return call(analyzing, []), "".join(texts)
