"""Agreement with transformers, which loads what we export and computes what we compute. Skipped without torch."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from huggingface_checkpoints import RANDOM, checkpoint, drawn
from tiny import redrawn, tiny

from lm import exchange, model
from lm.data import tokenizers
from lm.errors import UserError
from lm.huggingface.config_files import export_fields, read_config, read_fields
from lm.huggingface.tokenizer_files import write_tokenizer
from lm.huggingface.weights import load_params
from lm.huggingface.writing import write_checkpoint

pytestmark = pytest.mark.slow  # the fast suite compares with stored logits (test_importing.py)


@pytest.fixture(autouse=True, scope="module")
def libraries():
    """Import what takes ten seconds only when a test runs."""
    global torch, transformers
    torch = pytest.importorskip("torch", reason="needs torch and transformers (extra [bench])")
    transformers = pytest.importorskip("transformers", reason="needs torch and transformers (extra [bench])")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


SIZES = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
WIDE = SIZES | {"head_dim": 16}  # not hidden_size / num_attention_heads
GPT2 = {
    "vocab_size": 53, "n_positions": 40, "n_embd": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.2,
    "layer_norm_epsilon": 1e-3, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "tie_word_embeddings": True}
CONFIGS = {
    "gpt2": GPT2,
    "llama": WIDE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "mistral": WIDE | {"sliding_window": 5},
    "qwen2": WIDE | SLIDING,
    "qwen3": WIDE | SLIDING | {"attention_bias": True},
    "gemma2": WIDE | {"query_pre_attn_scalar": 24, "sliding_window": 7},
    "gemma2, untied": SIZES | {"tie_word_embeddings": False, "attn_logit_softcapping": None},
    "olmo2": WIDE | {"tie_word_embeddings": True},
}


def build(name, directory):
    """Return a random model of transformers, saved in a directory."""
    model_type, fields = name.partition(",")[0], CONFIGS[name]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter_name, p in theirs.named_parameters():
        if p.ndim == 1:  # gains of Gemma 2 are stored minus 1; multiples of 1/256 survive 1 + w
            gain = "bias" not in parameter_name and model_type != "gemma2"
            torch.nn.init.normal_(p, float(gain), 0.3)
            p.data = (p.data * 256).round() / 256
    theirs.save_pretrained(directory, max_shard_size="20KB")
    return theirs.eval()


def load(directory):
    """Return the model that transformers loads from a directory; no tensor may be missing or left over."""
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], (kind, report[kind])
    return theirs.eval()


def their_logits(theirs, ids):
    with torch.no_grad():
        return theirs(torch.tensor(ids), use_cache=False).logits.numpy()


logits = jax.jit(model.logits, static_argnums=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_imported_model_computes_the_same_and_returns_unchanged(name, tmp_path):
    theirs = build(name, tmp_path / "from")
    config = read_config(tmp_path / "from")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers=True))
    params = load_params(tmp_path / "from", config)
    ids = np.random.default_rng(0).integers(0, 53, (2, 24))
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    attended = torch.ones(ids.shape, dtype=torch.int64)
    continued = theirs.generate(torch.tensor(ids), attention_mask=attended, **options).numpy()
    found = np.asarray(logits(params, config.model, continued[:, :-1]))
    np.testing.assert_allclose(found, their_logits(theirs, continued[:, :-1]), atol=1e-4)
    np.testing.assert_array_equal(found[:, 23:].argmax(-1), continued[:, 24:])
    (tmp_path / "to").mkdir()
    write_checkpoint(tmp_path / "to", config, params)
    again = load(tmp_path / "to")
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("family", RANDOM)
def test_transformers_computes_the_logits_of_exported_models(family, tmp_path):
    ids = np.random.default_rng(0).integers(0, 19, (2, 8))
    for seed in range(12):
        config = tiny(model=drawn(family, seed) | {"scan_layers": True})
        params = redrawn(config.model)
        (directory := tmp_path / str(seed)).mkdir()
        write_checkpoint(directory, config, params, shard_bytes=2000)
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
        write_tokenizer(directory, ours, seq_len=8, keep=[])
        (directory / "config.json").write_text(json.dumps(export_fields(config)[1]))
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert (ids, theirs.decode(ids)) == (ours.encode(text).tolist(), text)
        assert theirs.eos_token_id == ours.end_of_text


def test_check_finds_no_difference_and_names_the_layer_of_one(tmp_path, capsys):
    checkpoint(tmp_path)
    assert exchange.compare(str(tmp_path), text=[1, 2, 3])
    assert "at all positions" in capsys.readouterr().out
    config = read_config(tmp_path)
    tokens = np.array([[1, 2, 3]])
    params = load_params(tmp_path, config)
    params["layers"]["ffn"]["w_up_DF"][0] *= 1.1
    ours = exchange.our_activations(params, config.model, tokens)
    theirs = exchange.their_activations(tmp_path, tokens)
    assert list(ours) == list(theirs) == ["embeddings", "layer 0", "layer 1", "logits"]
    lines = []
    assert not exchange.report(ours, theirs, 1e-3, lines.append)
    assert lines[-1].endswith("it arises in: layer 0")


def test_check_refuses_what_transformers_cannot_load(tmp_path):
    build("gpt2", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"n_head": 5}))
    with pytest.raises(UserError):
        exchange.compare(str(tmp_path))
