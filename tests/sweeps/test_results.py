"""runs.jsonl and runs.csv: what is written is read back, and a damaged line costs its run alone."""

import csv
import dataclasses
import io
import os

import pytest

from lm.sweeps.report import to_csv
from lm.sweeps.results import (
    RUNS,
    Run,
    append_runs,
    drop_damaged_lines,
    read_runs,
    runs_from_csv,
    runs_to_csv,
)
from lm.system.errors import UserError

POINT = {"optimizer.learning_rate": 0.0113, "optimizer.clip_norm": None, "optimizer.nesterov": True}
WHERE = {
    "processor": 'a "fast", one',
    "device": "cpu",
    "commit": "0123abc with uncommitted changes",
}
CURVE = ((50, 2.5), (100, 2.25))
FINISHED = Run(
    "final",
    "SwiGLU, 64",
    POINT,
    7,
    "finished",
    None,
    100,
    6400,
    2.25,
    2.5,
    CURVE,
    1.5,
    12.5,
    2,
    **WHERE,
)
LOST = {"status": "diverged", "diverged_step": 60, "steps": 59, "val_loss": None, "test_loss": None}
DIVERGED = dataclasses.replace(FINISHED, phase="tuning", seed=8, curve=CURVE[:1], **LOST)
OTHER = dataclasses.replace(FINISHED, seed=9)


@pytest.fixture
def workdir(tmp_path):
    append_runs(tmp_path, [FINISHED, DIVERGED])
    append_runs(tmp_path, [OTHER])
    return tmp_path


def lines(workdir) -> list[bytes]:
    return (workdir / RUNS).read_bytes().splitlines(keepends=True)


def test_what_is_written_is_read_back(workdir):
    warnings = []
    assert read_runs(workdir, warnings.append) == [FINISHED, DIVERGED, OTHER]
    assert not warnings
    assert read_runs(workdir / "nothing") == []


def test_other_programs_read_the_table(workdir):
    """Tuned values are columns by config key, and no column is taken for a date."""
    pandas = pytest.importorskip("pandas")
    table = pandas.read_json(workdir / RUNS, lines=True)
    assert table["optimizer.learning_rate"].tolist() == pytest.approx([0.0113] * 3)
    assert table["curve"][0] == [[50, 2.5], [100, 2.25]]
    assert table["diverged_step"].dropna().tolist() == [60]
    assert table["test_loss"].isna().tolist() == [False, True, False]


def test_a_damaged_line_costs_its_run_alone(workdir):
    """Everything but the damaged line survives; it is moved aside when the sweep starts again."""
    before = lines(workdir)
    line = before[1]
    for damaged in (
        line[: len(line) // 2] + b"\n", b"\n", b"\xff\xfe\n", b"3\n", line.replace(b'"checksum"', b'"check"'),
        line.replace(b"2.5", b"2.6"), line.replace(b'"seed": 8', b'"seed": 5'),
    ):  # fmt: skip
        (workdir / RUNS).write_bytes(before[0] + damaged + before[2])
        warnings = []
        assert read_runs(workdir, warnings.append) == [FINISHED, OTHER], damaged
        assert len(warnings) == 1
        assert f"{workdir / RUNS}, line 2: " in warnings[0]
    drop_damaged_lines(workdir)
    assert lines(workdir) == [before[0], before[2]]
    assert (workdir / f"{RUNS}.damaged").read_bytes() == damaged


def test_a_line_that_a_killed_process_left_unfinished_does_not_damage_the_next(workdir):
    before = lines(workdir)
    (workdir / RUNS).write_bytes(b"".join(before[:2]) + before[2][:40])
    append_runs(workdir, [OTHER])
    assert read_runs(workdir, lambda warning: None) == [FINISHED, DIVERGED, OTHER]


def test_a_run_that_two_processes_trained_counts_once(workdir):
    append_runs(workdir, [FINISHED])
    assert read_runs(workdir) == [FINISHED, DIVERGED, OTHER]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_refused(tmp_path, kind):
    if kind == "link":
        (tmp_path / "elsewhere").write_text("kept")
        (tmp_path / RUNS).symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(tmp_path / RUNS)
    for use in (read_runs, lambda workdir: append_runs(workdir, [FINISHED]), drop_damaged_lines):
        with pytest.raises((UserError, OSError), match=f"{RUNS}|seekable"):
            use(tmp_path)
    assert kind == "pipe" or (tmp_path / "elsewhere").read_text() == "kept"


def test_a_table_of_runs_is_read_back_without_the_curves(tmp_path):
    runs = [FINISHED, DIVERGED]
    assert "sources" not in runs_to_csv(runs)  # of a mixture only
    runs.append(dataclasses.replace(OTHER, sources={"web": 2.5, "code": 1.25}))
    (tmp_path / "runs.csv").write_text(runs_to_csv(runs))
    assert runs_from_csv(tmp_path / "runs.csv") == [
        dataclasses.replace(run, curve=()) for run in runs
    ]


def test_no_cell_of_a_table_is_a_formula(tmp_path):
    """A spreadsheet computes what begins with =, +, - or @, and such formulas can send what is
    beside them.
    """
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\uff1d1", "'=1", "''", "it's", 'a,"b']
    runs = [
        dataclasses.replace(FINISHED, variant=name, point={"optimizer.name": name}, curve=())
        for name in names
    ]
    (tmp_path / "runs.csv").write_text(runs_to_csv(runs))
    assert runs_from_csv(tmp_path / "runs.csv") == runs
    for text in (runs_to_csv(runs), to_csv([{"variant": name, "mean": -0.25} for name in names])):
        cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
        assert not [cell for cell in cells if cell[:1] in "=+@\t\uff1d" and cell]
        assert {cell for cell in cells if cell[:1] == "-"} <= {"-0.25"}


def test_another_table_is_refused(tmp_path):
    for text in ("a,b\n1,2\n", "phase,variant,seed\nfinal,x,one\n", "phase\n\0\n"):
        (tmp_path / "runs.csv").write_text(text)
        with pytest.raises(UserError, match=r"runs\.csv is not a table of runs"):
            runs_from_csv(tmp_path / "runs.csv")
