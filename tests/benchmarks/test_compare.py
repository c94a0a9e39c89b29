"""Shared parts of the comparisons, the tables in docs/performance.md, and the examples in
docstrings.
"""

import argparse
import doctest
import json
import re
import sys

import pytest

from benchmarks import compare, generation, page, shapes, startup, train_speed
from benchmarks.calibration import __main__ as calibration
from lm.system.errors import UserError

TABLES = {"train_speed": train_speed.table, "train_speed_16": train_speed.table, "startup": startup.table,
          "generation": generation.table}  # fmt: skip


def test_examples_in_docstrings():
    for module in (compare, shapes, calibration):
        failed, tried = doctest.testmod(module)
        assert (failed, tried > 0) == (0, True), module


def test_published_tables_show_the_recorded_results_under_their_commands():
    text = compare.PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    commands = re.findall(r"python3 -m benchmarks\.(\w+) (.*--publish)", text)
    names = [
        name[1] if (name := re.search(r"--name (\w+)", options)) else module
        for module, options in commands
    ]
    assert re.findall(r"<!-- (?!end)(\w+) -->", text) == names == list(TABLES), (
        "in the order of the tables"
    )
    for name, table in TABLES.items():
        results = json.loads((compare.RESULTS / f"{name}.json").read_text())
        where = compare.where_and_when(results["machine"])
        assert page.marked(compare.PAGE, name)[1] == f"{table(results['rows'])}\n\n{where}\n"


def test_only_publishing_writes_and_it_replaces_the_table_of_that_name(tmp_path, monkeypatch):
    path = tmp_path / "performance.md"
    before = "above\n<!-- a -->\nold a\n<!-- end -->\n<!-- b -->\nold b\n<!-- end -->\nbelow\n"
    path.write_text(before)
    # of torch and transformers
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(compare, "PAGE", path)
    monkeypatch.setattr(compare, "RESULTS", tmp_path / "results")

    def run(*options, name="b"):
        monkeypatch.setattr(sys, "argv", ["compared.py", *options, "--name", name])
        a = compare.parse_arguments(compare.argument_parser("compared", "Compare."))
        compare.publish(a, [{"x": 1}], r"new \1 b")

    run()
    assert (path.read_text(), list(tmp_path.iterdir())) == (before, [path])
    run("--json", str(tmp_path / "mine.json"))
    assert json.loads((tmp_path / "mine.json").read_text())["rows"] == [{"x": 1}]
    run("--publish")
    results = json.loads((tmp_path / "results" / "b.json").read_text())
    new = f"new \\1 b\n\n{compare.where_and_when(results['machine'])}"
    assert path.read_text() == before.replace("old b", new)
    assert results["command"] == "python -m benchmarks.compared --publish --name b"
    with pytest.raises(UserError, match="has no lines <!-- unknown -->"):
        run("--publish", name="unknown")


def test_missing_pytorch_is_reported_at_once(monkeypatch, capsys):
    """One line with the remedy, exit code 2, and no result, instead of a traceback after measuring."""
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    for module in (train_speed, startup, generation):
        monkeypatch.setattr(sys, "argv", ["x", "S"] if module is train_speed else ["x"])
        assert module.main() == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), "pip install -e '.[bench]'" in err) == ("", 1, True)


def test_the_comparison_of_training_speed_from_end_to_end(tmp_path, monkeypatch):
    """It checks that both sides compute the same losses."""
    pytest.importorskip("torch", reason="the extra [bench] is not installed")
    pytest.importorskip("transformers", reason="the extra [bench] is not installed")
    options = ["--rounds", "1", "--seconds", "0.1", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["train_speed.py", "tiny", *options])
    assert train_speed.main() == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["ratio"]["cpu"]["rounds"] == 1


def test_a_failed_worker_is_reported_with_its_error(tmp_path):
    worker = compare.Worker({"side": "neither", "workdir": str(tmp_path)})
    with pytest.raises(RuntimeError, match=r"a worker process failed: (.|\n)*KeyError: 'neither'"):
        worker.ask(run=1)
    worker.close()


def test_a_command_is_timed_to_its_end_or_to_a_line_of_its_output():
    busy = (
        "import os, time\nwhile time.process_time() < 0.3: pass\nprint(os.environ['HELLO'], "
        "flush=True)\n"
    )
    command = [sys.executable, "-c", busy]
    for code, until in (("", None), ("time.sleep(60)", re.compile("hello").match)):
        found = compare.timed([*command[:2], busy + code], {"HELLO": "hello"}, until)
        assert (found["output"], found["cpu"] >= 0.3, found["peak_bytes"] > 2**20) == (
            ["hello"],
            True,
            True,
        )
    with pytest.raises(RuntimeError, match="KeyError: 'HELLO'"):
        compare.timed(command, {})
    with pytest.raises(RuntimeError, match="hello"):
        compare.timed(command, {"HELLO": "hello"}, lambda line: False)


def test_rounds_alternate_in_order():
    calls = []
    found = compare.alternate(3, *(lambda c=c: calls.append(c) or len(calls) for c in "xyz"))
    assert "".join(calls) == "xyzzyxxyz"
    assert found == ([1, 6, 7], [2, 5, 8], [3, 4, 9])


def test_a_shape_can_name_its_dtype():
    a = argparse.Namespace(dtype="float32", peer_dtype=None)
    cases = [train_speed.case(text, a) for text in ("G", "G@4:bfloat16")]
    found = [(name, one.dtype, one.peer_dtype) for name, one in cases]
    assert found == [("G", "float32", "float32"), ("G@4", "bfloat16", "bfloat16")]
    a.peer_dtype = "float32"
    assert train_speed.case("G:bfloat16", a)[1].peer_dtype == "float32"
    for text in ("G:float8", "X", "G@x", "X@8", "G@0", "G@²", "G@" + "9" * 400, ""):
        with pytest.raises(UserError, match="use one of "):
            train_speed.case(text, a)
