"""Sweeps that are killed, and sweeps whose files are damaged."""

import dataclasses
import itertools
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.damage import WAYS, damage, files_below
from benchmarks.faults.judge import Outcome, Trial, judge
from benchmarks.faults.runs import ROOT, Bench, call
from benchmarks.faults.workdirs import shuffled
from lm.sweeps.results import read_runs

SWEEP = ROOT / "tests" / "configs" / "tiny_sweep.py"
N_KILLS = 3
LEFT_OUT = {"seconds": 0, "tokens_per_second": None}  # of a run, because they differ when it is trained again


def damaged_for_report(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of a finished sweep in every way, and analyze it as lm.report does."""
    whole = _finished(bench)
    _, expected = _analyzed(whole)
    for file, way in shuffled(itertools.product(files_below(whole), WAYS), draw):
        name = file.relative_to(whole)
        with bench.copy(whole) as workdir:
            damage(workdir / name, way, draw)
            outcome, found = _analyzed(workdir)
            changed = [] if found == expected else ["another report"]
            yield judge(f"{name} {way}, then a report", outcome, changed, names=(file.name, str(workdir)))


def damaged_files(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage files of a finished sweep, and rerun it."""
    whole = _finished(bench)
    for file in shuffled(files_below(whole), draw):
        name, way = file.relative_to(whole), draw.choice(WAYS)
        with bench.copy(whole) as workdir:
            kept = (workdir / name).read_bytes()
            damage(workdir / name, way, draw)
            outcome, lost = _rerun(bench, workdir), []
            found = changes(workdir, whole) if outcome.code == 0 else []
            if outcome.code in (1, 2):
                (workdir / name).write_bytes(kept)
                again = _rerun(bench, workdir)
                lost = [again.last_line] if again.code else changes(workdir, whole)
            yield judge(f"{name} {way}, then rerun", outcome, found, lost, names=(file.name,))


def killed(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Kill a sweep at random moments with SIGKILL until it has finished, and compare its results."""
    whole = _finished(bench)
    workdir = bench.base / "sweep_killed"
    for number in range(N_KILLS):
        shutil.rmtree(workdir, ignore_errors=True)
        program = ["-m", "lm.sweep", f"--config={SWEEP}", f"--workdir={workdir}"]
        with bench.process(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            for line in process.stdout:
                if line.startswith("workdir"):
                    time.sleep(draw.random() * 6)
                    break
            process.send_signal(signal.SIGKILL)
        outcome = _rerun(bench, workdir)
        yield judge(f"kill {number} of a sweep", outcome, changes(workdir, whole) if outcome.code == 0 else [])


def changes(workdir: Path, expected: Path) -> list[str]:
    """Return how the finished runs of two sweeps differ, without times and provenance."""
    ours, theirs = _runs(workdir), _runs(expected)
    if ours.keys() != theirs.keys():
        return ["other runs"]
    return [f"the run {key} differs" for key in ours if ours[key] != theirs[key]]


def _runs(workdir: Path) -> dict:
    return {run.key: dataclasses.replace(run, **LEFT_OUT) for run in read_runs(workdir)}


def _finished(bench: Bench) -> Path:
    """Return the directory of a finished sweep; the first call runs it."""
    whole = bench.base / "sweep"
    if not whole.exists():
        assert _rerun(bench, whole).code == 0
    return whole


def _rerun(bench: Bench, workdir: Path) -> Outcome:
    program = ["-m", "lm.sweep", f"--config={SWEEP}", f"--workdir={workdir}"]
    process = bench.process(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=3600)
    return Outcome(process.returncode, output)


def _analyzed(workdir: Path) -> tuple[Outcome, str]:
    """Analyze a sweep as lm.report does; return the outcome, and the answers and warnings of the report."""
    from lm.errors import with_exit_code
    from lm.report import read_finished

    found = []

    @with_exit_code
    def analyzing(_) -> int:
        analysis = read_finished(workdir)
        found.append(f"{analysis.claims} {analysis.warnings} {analysis.failed} {analysis.variants}")
        return 0

    return call(analyzing, []), "".join(found)
