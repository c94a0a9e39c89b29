import pytest

from benchmarks.faults.runs import Bench


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """A `Bench` of the campaign."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # restored afterwards: Bench sets it
    return Bench(tmp_path / "bench")
