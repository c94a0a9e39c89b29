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


def test_errors_other_than_out_of_memory_are_raised():
    def train(batch):
        raise RuntimeError("losses differ")

    with pytest.raises(RuntimeError, match="losses differ"):
        gpu.largest_batch((2, 1), train)


ROW = {"attention": "cudnn", "tokens_per_second": 123_456.7, "mfu": 0.5, "mfu_full_square": 0.55}
ROW |= {"ratio": {"wall": {"median": 1.2, "low": 1.1, "high": 1.3}}}


def test_the_summary_of_a_comparison():
    expected = "123,457 tokens/s, 50.0% MFU (55.0% with masked scores); torch / ours **1.20** (1.10 to 1.30)"
    assert gpu.describe(ROW) == expected
    unknown_device = ROW | {"mfu": None, "mfu_full_square": None}
    assert gpu.describe(unknown_device) == "123,457 tokens/s; torch / ours **1.20** (1.10 to 1.30)"


def test_another_attention_than_cudnn_is_an_error():
    with pytest.raises(RuntimeError, match="attention was einsum, not cudnn's"):
        gpu.describe(ROW | {"attention": "einsum"})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "jax is not installed or sees no GPU" in capsys.readouterr().err
