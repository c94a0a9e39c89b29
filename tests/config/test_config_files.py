"""The configs that ship: they load, have the sizes they claim, fail in one line without data, and train."""

import ast
import json

import numpy as np
import pytest
from running import ROOT

from lm import parameters
from lm.config import Config, flatten, to_dict
from lm.config.loading import load
from lm.train import main

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
# What makes a config small enough for 20 steps here; everything else stays as it is.
SMALL = {
    "model.d_model": 32,
    "model.n_heads": 2,
    "model.n_layers": 1,
    "model.d_ff": 64,
    "train.steps": 20,
    "train.batch_size": 4,
    "train.micro_batch_size": 2,
    "train.seq_len": 31,
    "train.steps_per_dispatch": 5,
    "optimizer.warmup_steps": 2,
    "eval.every": 10,
    "eval.sample_tokens": 5,
    "log.every": 10,
    "log.tensorboard": "false",
}


def arguments(name: str, **overrides) -> list[str]:
    return [f"--config={ROOT / 'configs' / name}.py", *(f"--config.{key}={value}" for key, value in overrides.items())]


@pytest.mark.parametrize(
    ("name", "vocab_size", "count"),
    [
        ("cmu_15780", 32_074, 9_892_554),
        ("cs336_tinystories", 10_000, 22_696_448),
        ("gpt2_124m", 50_257, 124_439_808),
    ],
)
def test_a_config_has_the_published_number_of_parameters(name, vocab_size, count):
    config = parameters.resolve(load(str(ROOT / "configs" / f"{name}.py"), []), vocab_size)
    assert parameters.count(parameters.parameter_table(config.model)) == count


@pytest.mark.parametrize("name", ["cs336_tinystories", "gpt2_124m"])
def test_without_its_data_a_config_fails_in_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(arguments(name)) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "config.data.source" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains_on_a_stand_in(name, train_in, tmp_path):
    keys = dict(SMALL)
    if name == "gpt2_124m":
        ids = np.random.default_rng(0).integers(0, 50_257, 3000).astype(np.uint16)
        (tmp_path / "shards").mkdir()
        ids[:2000].tofile(tmp_path / "shards" / "train.bin")
        ids[2000:].tofile(tmp_path / "shards" / "val.bin")
        keys["data.source"] = f"tokens:{tmp_path / 'shards'}"
    else:
        text = "".join(f"once upon a time there were {n} bears and {n * n} trees.\n" for n in range(120))
        (tmp_path / "text.txt").write_text(text)
        keys["data.source"] = f"text:{tmp_path / 'text.txt'}"
    if name == "cs336_tinystories":
        keys |= {"data.tokenizer": "bpe:300", "data.splits": "(0.8,0.2,0.0)"}
    if name == "cmu_15780":
        keys["data.stride"] = 32
    summary, lines = train_in(tmp_path, arguments(name, **keys))
    assert summary["status"] == "finished"
    assert summary["steps"] == 20
    losses = [line["loss"] for line in lines]
    assert all(np.isfinite(losses))
    # Random ids teach nothing; where there is a text, the model learns some of it.
    assert name == "gpt2_124m" or losses[-1] < losses[0]


@pytest.fixture
def train_in(monkeypatch):
    """train_in(directory, arguments) runs lm.train there, in this process; returns its summary and metrics."""

    def run(directory, arguments):
        monkeypatch.chdir(directory)
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        assert main([*arguments, "--workdir=run"]) == 0
        lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
        return json.loads((directory / "run" / "summary.json").read_text()), lines

    return run


def assignments(code: ast.Module) -> list[tuple[str, object]]:
    """The keys that a config file sets, with their values, in order."""
    nodes = [node for node in ast.walk(code) if isinstance(node, ast.Assign)]
    keys = [(ast.unparse(target), node.value) for node in nodes for target in node.targets]
    return [(key.removeprefix("config."), ast.literal_eval(value)) for key, value in keys if key != "config"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_states_once_what_differs_from_the_defaults_and_nothing_else(name):
    code = ast.parse((ROOT / "configs" / f"{name}.py").read_text())
    assert f"python -m lm.train --config configs/{name}.py\n" in ast.get_docstring(code)
    stated, defaults = assignments(code), flatten(to_dict(Config()))
    assert len(dict(stated)) == len(stated) > 5
    assert [key for key, value in stated if defaults[key] == value] == []
