"""The parts of benchmarks/gpu.py that run without a GPU."""

import json

import jax
import pytest

from benchmarks import gpu


def test_a_failing_part_is_reported_and_the_next_one_runs(tmp_path, capsys):
    parts = {"lists": lambda: {"result": [1] / [2]}, "works": lambda: {"result": "fast"},
             "command": lambda: gpu.run("benchmarks.absent")}  # fmt: skip
    rows = gpu.run_parts(parts, tmp_path / "gpu.json")
    assert [(row["what"], row["failed"]) for row in rows] == [("lists", True), ("works", False), ("command", True)]
    assert rows[0]["result"] == "FAILED: TypeError: unsupported operand type(s) for /: 'list' and 'list'"
    assert "No module named benchmarks.absent" in rows[2]["result"]
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == rows
    assert "works: fast" in capsys.readouterr().out


def test_the_largest_batch_is_the_first_that_fits_in_memory():
    tried = []

    def train(batch):
        tried.append(batch)
        if batch > 48:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    assert gpu.largest_batch((128, 64, 48, 32), train) == 48
    assert tried == [128, 64, 48]
    with pytest.raises(RuntimeError, match="out of memory at every batch size of 128, 64"):
        gpu.largest_batch((128, 64), train)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "jax is not installed or sees no GPU" in capsys.readouterr().err
