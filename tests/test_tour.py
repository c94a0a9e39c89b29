"""docs/tour.ipynb: it runs from a clean state, and the outputs in the repository are small and of
one run.
"""

import json
import re

import pytest
from running import ROOT

NOTEBOOK = ROOT / "docs" / "tour.ipynb"
MAX_BYTES = 300_000


def code_cells() -> list[dict]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def figures(cells) -> list[int]:
    """Return how many pictures each cell shows."""
    return [
        sum("image/png" in output.get("data", {}) for output in cell["outputs"]) for cell in cells
    ]


def test_the_outputs_are_those_of_one_run_from_top_to_bottom():
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {
        (output["output_type"], output.get("name")) for cell in cells for output in cell["outputs"]
    }
    assert kinds == {("display_data", None), ("stream", "stdout")}


def test_the_notebook_is_small_and_names_no_directory_of_a_machine():
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    texts = ["".join(output.get("text", "")) for cell in code_cells() for output in cell["outputs"]]
    assert any(texts)
    assert not [
        text for text in texts if re.search(r"(?<!\w)/(tmp|home|root|work|usr|var|Users)/", text)
    ]


@pytest.mark.slow
def test_the_notebook_runs_from_a_clean_state(tmp_path, monkeypatch):
    """With empty caches, in the directory where Jupyter would start it."""
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()  # raises if a cell does
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert figures(cells) == figures(code_cells())
    assert len(nbformat.writes(notebook)) < MAX_BYTES
