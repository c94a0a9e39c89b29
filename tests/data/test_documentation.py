"""The Python example of docs/data.md runs."""

import re
from pathlib import Path

import numpy as np

from lm.data.batches import train_batch


def test_the_example_that_shows_a_batch_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    example, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(example, "docs/data.md", "exec"), names)
    expected = train_batch(names["split"], names["config"], 17)["tokens"]
    np.testing.assert_array_equal(names["batch"]["tokens"], expected)
    assert "(4, 65)" in capsys.readouterr().out
