"""Agreement with transformers, which loads what we export and computes what we compute. Skipped
without torch.
"""

import functools
import os

import jax
import numpy as np
import pytest
from huggingface_checkpoints import EXPECTED, RANDOM, checkpoint, drawn
from models_with_code import MODELS
from tiny import redrawn, tiny

import lm
from lm import model
from lm.command_line import exchange
from lm.data import tokenizers
from lm.huggingface import writing
from lm.huggingface.config_files import read_config, read_fields
from lm.huggingface.safetensors_files import write_tensors
from lm.huggingface.weights import load_params
from lm.huggingface.writing import write_checkpoint
from lm.system.errors import UserError
from lm.trained_model import TrainedModel

pytestmark = pytest.mark.slow  # the fast suite compares with stored logits (test_importing.py)


@pytest.fixture(autouse=True, scope="module")
def libraries(tmp_path_factory):
    """Import what takes ten seconds only when a test runs."""
    global torch, transformers
    # where it copies code before it runs it
    os.environ.setdefault("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    torch = pytest.importorskip("torch", reason="needs torch and transformers (extra [bench])")
    transformers = pytest.importorskip(
        "transformers", reason="needs torch and transformers (extra [bench])"
    )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def load(directory):
    """Return the model that transformers loads from a directory; no tensor may be missing or left
    over.
    """
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True, trust_remote_code=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], (kind, report[kind])
    return theirs.eval()


def their_logits(theirs, ids):
    with torch.no_grad():
        return theirs(torch.tensor(ids), use_cache=False).logits.numpy()


logits = jax.jit(model.logits, static_argnums=1)


@pytest.mark.parametrize("case", EXPECTED)
def test_transformers_loads_what_was_imported_and_exported_as_the_same_model(case, tmp_path):
    """test_importing.py compares our logits and greedy ids with those that transformers computed
    from these files.
    """
    directory, expected = checkpoint(tmp_path / "from", case), EXPECTED[case]
    config = read_config(directory)
    (tmp_path / "to").mkdir()
    write_checkpoint(tmp_path / "to", config, load_params(directory, config))
    first, again = load(directory), load(tmp_path / "to")
    before, after = first.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    logits = their_logits(first, [expected["ids"]])
    np.testing.assert_allclose(logits[0, -1], expected["logits"], atol=1e-5)
    np.testing.assert_allclose(their_logits(again, [expected["ids"]]), logits, atol=1e-5)


@pytest.mark.parametrize("family", RANDOM)
def test_transformers_computes_the_logits_of_exported_models(family, tmp_path, monkeypatch):
    monkeypatch.setattr(
        writing, "write_tensors", functools.partial(write_tensors, shard_bytes=2000)
    )
    ids = np.random.default_rng(0).integers(0, 19, (2, 8))
    for seed in range(12):
        config = tiny(model=drawn(family, seed) | {"scan_layers": True})
        params = redrawn(config.model)
        (directory := tmp_path / str(seed)).mkdir()
        write_checkpoint(directory, config, params)
        assert read_fields(directory)["model_type"] == family
        theirs = their_logits(load(directory), ids)
        np.testing.assert_allclose(
            theirs, logits(params, config.model, ids), atol=1e-4, err_msg=str(drawn(family, seed))
        )


def test_transformers_loads_exported_tokenizers(tmp_path):
    text, config = "the  cat\nsat — on “it”", tiny(model={"vocab_size": 300})
    for spec in ("byte", "char", "word", "bpe:300"):
        ours = tokenizers.make(spec, [text])
        (directory := tmp_path / spec).mkdir()
        write_checkpoint(directory, config, redrawn(config.model), ours)
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert (ids, theirs.decode(ids)) == (ours.encode(text).tolist(), text)
        assert theirs.eos_token_id == ours.end_of_text


def test_check_finds_no_difference_and_names_the_layer_of_one(tmp_path, capsys):
    checkpoint(tmp_path)
    assert exchange.compare(str(tmp_path), None, "best", 1e-3)
    assert "at all positions" in capsys.readouterr().out
    run, tokens = lm.load(tmp_path), np.array([[1, 2, 3]])
    run.params["layers"]["ffn"]["w_up_DF"] *= np.array([1.1, 1.0]).reshape(2, 1, 1)
    ours = exchange.our_activations(run, tokens)
    theirs = exchange.their_activations(tmp_path, tokens)
    assert list(ours) == list(theirs) == ["embeddings", "layer 0", "layer 1", "logits"]
    assert not exchange.report(ours, theirs, 1e-3)
    assert capsys.readouterr().out.endswith("it arises in: layer 0\n")


def test_check_refuses_what_transformers_cannot_load(tmp_path):
    checkpoint(tmp_path, "gpt2", n_head=3)
    with pytest.raises(UserError):
        exchange.compare(str(tmp_path), None, "best", 1e-3)


# ---- Models that are exported with their code ----------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_exported_code_computes_our_logits_with_and_without_a_cache_and_padding(name, tmp_path):
    config = tiny(model=MODELS[name])
    params = redrawn(config.model)
    write_checkpoint(tmp_path, config, params, code=True)
    theirs = load(tmp_path)
    ids = np.random.default_rng(0).integers(0, 19, (2, 8))
    ours_BTV = logits(params, config.model, ids)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    close(their_logits(theirs, ids), ours_BTV)
    ids = torch.tensor(ids)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(ids)], dim=1)
    padded[1, 2:10] = ids[1]  # the other text ends at 11
    mask[1] = torch.tensor([0, 0] + [1] * 8 + [0])
    with torch.no_grad():
        cache = None
        parts = []
        for start, end in [(0, 6), (6, 7), (7, 10), (10, 11)]:
            out = theirs(padded[:, start:end], mask[:, :end], cache=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits)
    logits_BTV = torch.cat(parts, dim=1).numpy()
    close(logits_BTV[0, 3:], ours_BTV[0])
    close(logits_BTV[1, 2:10], ours_BTV[1])


@pytest.mark.parametrize(
    "name", ["the defaults", "pair 5", "pair 6", "RG-LRU in two of three layers"]
)
def test_exported_code_generates_the_same_with_and_without_a_cache(name, tmp_path):
    config = tiny(model=MODELS[name])
    write_checkpoint(tmp_path, config, redrawn(config.model), code=True)
    theirs = load(tmp_path)
    prompts = torch.tensor([[0, 0, 4, 5], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for options in ({}, {"num_beams": 3}):
        generate = functools.partial(
            theirs.generate,
            prompts,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        assert torch.equal(generate(use_cache=True), generate(use_cache=False))


def test_exported_code_loads_in_bfloat16_and_has_a_loss_with_gradients(tmp_path):
    config = tiny(model=MODELS["pair 0"] | {"param_dtype": "bfloat16"})
    write_checkpoint(tmp_path, config, redrawn(config.model), code=True)
    theirs = load(tmp_path)
    assert {p.dtype for p in theirs.parameters()} == {torch.bfloat16}
    ids = torch.tensor([[1, 2, 3, 4]])
    out = theirs(ids, labels=ids)
    targets = ids[0, 1:]
    log_p = torch.log_softmax(out.logits[0, :-1], dim=-1)
    expected = -log_p[torch.arange(3), targets].mean()
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    unread = [name for name, p in theirs.named_parameters() if p.grad is None]
    assert not unread


@pytest.mark.parametrize("name", ["the defaults", "loops", "token shift"])
def test_check_compares_a_run_with_its_exported_code(name, tmp_path, capsys, monkeypatch):
    config = tiny(model=MODELS[name])
    params = redrawn(config.model)
    write_checkpoint(tmp_path, config, params, code=True)
    run = TrainedModel("run", 0, config, params, None)
    monkeypatch.setattr(exchange, "load", lambda *_: run)
    assert exchange.compare(str(tmp_path), "run", "best", 1e-4)
    table = capsys.readouterr().out
    assert "layer 3" in table
    assert "WARNING" not in table
    run.params["layers"]["ffn"]["w_up_DF"] *= 1.1
    assert not exchange.compare(str(tmp_path), "run", "best", 1e-4)
    assert "it arises in: layer 0" in capsys.readouterr().out
