"""Shared parts of the comparisons, and the tables in docs/performance.md."""

import argparse
import json
import re
import sys

import pytest

from benchmarks import compare, generation, shapes, startup, train_speed

TABLES = {
    "train_speed": train_speed.table,
    "train_speed_16": train_speed.table,
    "startup": startup.table,
    "generation": generation.table,
}


def test_published_tables_show_the_recorded_results():
    page = compare.PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        results = json.loads((compare.RESULTS / f"{name}.json").read_text())
        where = compare.where_and_when(results["machine"])
        found = compare.table_between_marks(name).search(page)
        assert found[0] == f"<!-- {name} -->\n{table(results['rows'])}\n\n{where}\n<!-- end -->"


def test_each_command_of_the_page_has_marks_for_its_table():
    page = compare.PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    commands = re.findall(r"python3 -m benchmarks\.(\w+) (.*--publish)", page)
    names = [name[1] if (name := re.search(r"--name (\w+)", options)) else module for module, options in commands]
    assert sorted(names) == sorted(TABLES)
    assert re.findall(r"<!-- (?!end)(\w+) -->", page) == names, "in the order of the tables"


@pytest.fixture
def everything_installed(monkeypatch):
    monkeypatch.setattr(compare, "require", lambda *packages, prog: None)


def test_only_publishing_writes_and_it_replaces_the_table_of_that_name(tmp_path, monkeypatch, everything_installed):
    page = tmp_path / "performance.md"
    before = "above\n<!-- a -->\nold a\n<!-- end -->\n<!-- b -->\nold b\n<!-- end -->\nbelow\n"
    page.write_text(before)
    monkeypatch.setattr(compare, "PAGE", page)
    monkeypatch.setattr(compare, "RESULTS", tmp_path / "results")

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["compared.py", *options, "--name", "b"])
        a = compare.parse_arguments(compare.argument_parser("compared", "Compare."))
        compare.publish(a, [{"x": 1}], r"new \1 b")

    run()
    assert (page.read_text(), list(tmp_path.iterdir())) == (before, [page])
    run("--json", str(tmp_path / "mine.json"))
    assert json.loads((tmp_path / "mine.json").read_text())["rows"] == [{"x": 1}]
    run("--publish")
    results = json.loads((tmp_path / "results" / "b.json").read_text())
    new = f"new \\1 b\n\n{compare.where_and_when(results['machine'])}"
    assert page.read_text() == before.replace("old b", new)
    assert results["rows"] == [{"x": 1}]
    assert results["command"] == "python -m benchmarks.compared --publish --name b"


def test_a_table_without_marks_is_refused_before_anything_is_measured(monkeypatch, capsys, everything_installed):
    monkeypatch.setattr(sys, "argv", ["compared.py", "--publish", "--name", "unknown"])
    with pytest.raises(SystemExit, match="2"):
        compare.parse_arguments(compare.argument_parser("compared", "Compare."))
    assert "docs/performance.md has no marks for this table: <!-- unknown -->" in capsys.readouterr().err


@pytest.mark.parametrize("module", [train_speed, startup, generation])
def test_missing_pytorch_is_reported_at_once(module, monkeypatch, capsys):
    """One line with the remedy, exit code 2, and no result, instead of a traceback after measuring."""
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["x", "S"] if module is train_speed else ["x"])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "torch and transformers" in err
    assert "pip install -e '.[bench]'" in err


def test_a_failed_worker_is_reported_with_its_error(tmp_path):
    worker = compare.Worker({"side": "neither", "workdir": str(tmp_path)})
    with pytest.raises(RuntimeError, match=r"a worker process failed: (.|\n)*KeyError: 'neither'"):
        worker.ask(run=1)
    worker.close()


def test_rounds_alternate_in_order():
    calls = []
    results = compare.alternate(3, lambda: calls.append("a") or len(calls), lambda: calls.append("b") or len(calls))
    assert "".join(calls) == "abbaab"
    assert results == ([1, 4, 5], [2, 3, 6])
    three = compare.alternate(2, *(lambda c=c: calls.append(c) or len(calls) for c in "xyz"))
    assert "".join(calls[6:]) == "xyzzyx"
    assert three == ([7, 12], [8, 11], [9, 10])


def test_the_ratio_is_taken_round_by_round():
    """Drift that slows both sides of a round alike cancels."""
    drift = [1.0, 3.0, 2.0]
    found = compare.ratio(drift, [2 * d for d in drift])
    assert found == {"median": 2.0, "low": 2.0, "high": 2.0, "quartiles": [2.0, 2.0], "rounds": 3}


def test_a_shape_can_name_its_dtype():
    a = argparse.Namespace(dtype="float32", peer_dtype=None)
    cases = [train_speed.case(text, a) for text in ("G", "G@4:bfloat16")]
    found = [(name, one.dtype, one.peer_dtype) for name, one in cases]
    assert found == [("G", "float32", "float32"), ("G@4", "bfloat16", "bfloat16")]
    a.peer_dtype = "float32"
    assert train_speed.case("G:bfloat16", a)[1].peer_dtype == "float32"
    with pytest.raises(ValueError, match="unknown dtype in 'G:float8'; use one of float32, bfloat16"):
        train_speed.case("G:float8", a)


def test_the_flops_of_a_step_are_those_of_the_recorded_results():
    rows = json.loads((compare.RESULTS / "train_speed.json").read_text())["rows"]
    for row in rows:
        config = shapes.config_of(row["shape"], "unread", row["overrides"])
        assert train_speed.flops_per_step(config, full_square=False) == pytest.approx(row["flops_per_step"])
        assert train_speed.flops_per_step(config, full_square=True) > row["flops_per_step"]
