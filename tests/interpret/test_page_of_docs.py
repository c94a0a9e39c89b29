"""docs/inspect.md: its table lists every intermediate, and its examples run."""

import re

import pytest
from running import ROOT
from tiny import redrawn, tiny

import lm
from lm.data.tokenizers import ByteTokenizer
from lm.interpret import names
from lm.trained_model import TrainedModel

PAGE = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")


def tiny_run():
    config = tiny(model={"n_layers": 3, "vocab_size": 256}, train={"seq_len": 32})
    return TrainedModel(None, 0, config, redrawn(config.model), ByteTokenizer())


def test_the_table_lists_all_names_and_their_axes():
    listed = {}
    for first, axes in re.findall(r"^\| (`.*?) \| (\w+) \|", PAGE, re.MULTILINE):
        listed |= dict.fromkeys(re.findall("`(.*?)`", first), axes)
    found = {re.sub(r"^layers/\d+", "layers/*", name): axes for name, axes in names(tiny_run()).items()}
    assert listed == found


@pytest.mark.slow
def test_the_examples_run(monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    monkeypatch.setattr(lm, "load", lambda path: tiny_run())
    found = {}
    for block in blocks:
        exec(block, found)
    assert found["weights_HTS"].shape == (4, 6, 6)
    assert all(effect > 0 for effect in found["effects"])
    assert capsys.readouterr().out.count("/residual") == 3
    assert found["logits_TV"].shape == (6, 256)
    assert found["gradient_HTS"].shape == (4, 6, 6)
