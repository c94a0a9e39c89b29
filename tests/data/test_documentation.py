"""The Python examples of docs/data.md run."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from running import ROOT, summary_of

from lm.data.batches import train_batch
from lm.data.shards import open_shards
from lm.train import main


@pytest.fixture
def page():
    return (ROOT / "docs" / "data.md").read_text()


@pytest.fixture
def run(page, tmp_path, monkeypatch):
    """Return run(text), which runs the example with this text in an empty directory and returns its
    names.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(text: str) -> dict:
        (example,) = (
            code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if text in code
        )
        names = {}
        exec(compile(example, "docs/data.md", "exec"), names)
        return names

    return run


def test_the_example_that_shows_a_batch_runs(run, capsys):
    names = run("python_docs")
    expected = train_batch(names["split"], names["config"], 17)["tokens"]
    np.testing.assert_array_equal(names["batch"]["tokens"], expected)
    assert "(4, 65)" in capsys.readouterr().out


def test_the_example_with_an_array_of_ids_trains_with_the_command_below_it(run, page, command):
    run("data/mine")
    shell = re.search(
        r"```bash\n(python3 -m lm.train [^`]*tokens:data/mine.*?)```", page, re.DOTALL
    )
    arguments = shlex.split(shell[1].replace("\\\n", ""))[3:]
    arguments[1] = str(ROOT / arguments[1])
    small = (
        "--config.train.steps=2",
        "--config.model.n_layers=1",
        "--config.log.tensorboard=false",
    )
    code, output = command(main, *arguments, *small, "--workdir=run")
    assert code == 0, output
    assert summary_of(Path("run"))["steps"] == 2


def test_the_example_that_writes_words_gives_token_shards(run, tmp_path, capsys):
    (tmp_path / "input.txt").write_text("To be,\nor not to be: " * 10)
    words = sorted(run("re.findall")["vocabulary"])
    assert capsys.readouterr().out == "7\n"
    tokens = {
        name: split.tokens for name, split in open_shards("data/words", tmp_path).splits.items()
    }
    assert tokens.keys() == {"train", "validation"}
    assert [words[i] for i in tokens["train"][:9]] == [
        "To",
        "be",
        ",",
        "or",
        "not",
        "to",
        "be",
        ":",
        "To",
    ]
    assert len(tokens["train"]) == 56
    assert len(tokens["validation"]) == 24
