"""The files in configs/: they have the sizes they claim, report missing data in one line, and
train.
"""

from runpy import run_path

import numpy as np
import pytest
from running import ROOT, metrics_of, summary_of

from lm import parameters
from lm.command_line.loading import load
from lm.train import main
from lm.training import memory

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
# Overrides that make a config small enough for a test; all other keys stay as they are.
SMALL = {
    "model.d_model": 32, "model.n_heads": 2, "model.n_layers": 1, "model.d_ff": 64, "train.steps": 20,
    "train.batch_size": 4, "train.micro_batch_size": 2, "train.seq_len": 31, "train.steps_per_dispatch": 5,
    "eval.every": 10, "eval.sample_tokens": 5, "log.every": 10, "log.tensorboard": "false",
}  # fmt: skip


def arguments(name: str, **overrides) -> list[str]:
    return [
        f"--config={ROOT / 'configs' / name}.py",
        *(f"--config.{key}={value}" for key, value in overrides.items()),
    ]


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
def test_a_config_without_its_data_is_refused_in_one_line(name, tmp_path, monkeypatch, command):
    # some configs may not fit on this machine
    monkeypatch.setattr(memory, "device_memory", lambda device: None)
    code, output = command(main, *arguments(name))
    assert (code, output.count("\n"), "config.data.source" in output) == (2, 1, True), output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains_on_other_data(name, command, tmp_path):
    keys = dict(SMALL)
    if name == "gpt2_124m":
        ids = np.random.default_rng(0).integers(0, 50_257, 3000).astype(np.uint16)
        (tmp_path / "shards").mkdir()
        ids[:2000].tofile(tmp_path / "shards" / "train.bin")
        ids[2000:].tofile(tmp_path / "shards" / "val.bin")
        keys["data.source"] = f"tokens:{tmp_path / 'shards'}"
    else:
        text = "".join(
            f"once upon a time there were {n} bears and {n * n} trees.\n" for n in range(120)
        )
        (tmp_path / "text.txt").write_text(text)
        keys["data.source"] = f"text:{tmp_path / 'text.txt'}"
    if name == "cs336_tinystories":
        keys |= {"data.tokenizer": "bpe:300", "data.splits": "(0.8,0.2,0.0)"}
    if name == "mixture":  # whose own sources may have to be downloaded
        source = keys.pop("data.source")
        keys["data.mixture"] = repr((("plays", source, 0.7), ("docs", source, 0.3)))
    if name == "cmu_15780":
        keys["data.stride"] = 32
    code, output = command(main, *arguments(name, **keys), "--workdir=run")
    assert code == 0, output
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("finished", 20)
    losses = [line["loss"] for line in metrics_of(tmp_path / "run")]
    assert all(np.isfinite(losses))
    # There is nothing to learn from random ids; on text the loss falls.
    assert name == "gpt2_124m" or losses[-1] < losses[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_header_of_a_config_states_its_command_cost_and_result(name):
    header = run_path(str(ROOT / "configs" / f"{name}.py"))["__doc__"]
    assert f"    python -m lm.train --config configs/{name}.py\n" in header
    assert "\nCost: " in header
    assert "\nResult" in header
