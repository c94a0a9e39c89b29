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


def run_of(**keys):
    config = tiny(model={"n_layers": 3, "vocab_size": 256} | keys, train={"seq_len": 32})
    return TrainedModel(None, 0, config, redrawn(config.model), ByteTokenizer())


def test_the_table_lists_all_names_and_their_axes():
    listed = {}
    for first, axes in re.findall(r"^\| (`.*?) \| (\w+) \|", PAGE, re.MULTILINE):
        listed |= dict.fromkeys(re.findall("`(.*?)`", first), axes)
    found = {
        re.sub(r"^layers/\d+", "layers/*", name): axes for name, axes in names(run_of()).items()
    }
    assert listed == found


@pytest.mark.parametrize(
    ("placement", "norms"),
    [
        ("parallel", {"norm"}),
        ("sandwich", {"attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"}),
        ("output", {"attention_post_norm", "ffn_post_norm"}),
        ("none", set()),
    ],
)
def test_norms_have_the_names_of_their_placement(placement, norms):
    found = names(run_of(norm_placement=placement))
    assert {
        name.split("/")[2] for name in found if re.match(r"layers/\d+/\w*norm/output", name)
    } == norms


@pytest.mark.slow
def test_the_examples_run(monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    monkeypatch.setattr(lm, "load", lambda path: run_of())
    found = {}
    for block in blocks:
        exec(block, found)
    assert found["weights_HTS"].shape == (4, 6, 6)
    assert all(effect > 0 for effect in found["effects"])
    assert capsys.readouterr().out.count("/residual") == 3
    assert found["logits_TV"].shape == (6, 256)
    assert found["gradient_HTS"].shape == (4, 6, 6)
