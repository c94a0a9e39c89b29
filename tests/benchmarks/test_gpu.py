"""The parts of benchmarks/gpu.py that run without a GPU."""

import jax
import pytest

from benchmarks import gpu


def test_a_failing_part_is_reported_and_the_next_one_runs(tmp_path, capsys):
    parts = {"command": lambda: {"result": gpu.run("benchmarks.absent")}, "works": lambda: {"result": "fast"}}
    rows = gpu.run_parts(parts, tmp_path / "gpu.json")
    assert [(row["what"], row["failed"]) for row in rows] == [("command", True), ("works", False)]
    assert "No module named benchmarks.absent" in rows[0]["result"]
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
    assert "jax sees no GPU; on a machine with a GPU run: pip install -e" in capsys.readouterr().err
