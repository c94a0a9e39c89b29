"""Agreement with transformers, which loads what we export and computes what we compute. Skipped without torch."""

import json

import jax
import numpy as np
import pytest
from tiny import redrawn, tiny

from lm import model
from lm.data import tokenizers
from lm.errors import UserError
from lm.exchange import checking
from lm.huggingface.config_files import read_config
from lm.huggingface.weights import load_params
from lm.huggingface.writing import write_checkpoint

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
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
CONFIGS = {
    "gpt2": ("gpt2", GPT2),
    "gpt2, erf gelu, untied": (
        "gpt2", GPT2 | {"n_inner": 50, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "llama": ("llama", WIDE),
    "llama, tied, biases": (
        "llama", WIDE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "llama, llama3 rope": ("llama", SIZES | {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", SIZES | {"rope_parameters": LINEAR}),
    "mistral": ("mistral", WIDE | {"sliding_window": 5}),
    "qwen2": ("qwen2", SIZES),
    "qwen2, tied, sliding": ("qwen2", WIDE | SLIDING | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", WIDE | {"attention_bias": True}),
    "qwen3, tied, sliding": ("qwen3", WIDE | SLIDING | {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", WIDE | {"query_pre_attn_scalar": 24, "sliding_window": 7}),
    "gemma2, untied": ("gemma2", SIZES | {"tie_word_embeddings": False, "attn_logit_softcapping": None}),
    "olmo2": ("olmo2", SIZES),
    "olmo2, tied": ("olmo2", WIDE | {"tie_word_embeddings": True}),
}  # fmt: skip


def build(name, directory):
    """Return a random model of transformers, saved in a directory."""
    model_type, fields = CONFIGS[name]
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


# Variants of a family take 3 s each.
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "," in n else n for n in CONFIGS])
def test_an_imported_model_computes_the_same_and_returns_unchanged(name, tmp_path):
    theirs = build(name, tmp_path / "from")
    config = read_config(tmp_path / "from")
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


OURS = {
    "gpt2 without biases": {
        "norm": "layer", "ffn": "mlp", "activation": "gelu", "positions": "learned", "n_kv_heads": 4,
        "norm_bias": False, "norm_eps": 1e-3,
    },
    "llama, adjacent": {"d_head": 6, "norm_eps": 1e-3},
    "llama, linear rope": {"rope_scaling": "linear", "rope_factor": 2.0, "tie_embeddings": True},
    "qwen3, adjacent": {"qk_norm": True, "d_head": 8, "window_pattern": (3, 0)},
    "gemma2": {
        "norm_placement": "sandwich", "attn_softcap": 5.0, "logit_softcap": 3.0, "embed_scale": 4.0,
        "window_pattern": (0, 3), "activation": "gelu_tanh",
    },
    "olmo2, adjacent": {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "all_heads"},
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_transformers_computes_the_logits_of_an_exported_model(name, tmp_path):
    config = tiny(model=OURS[name])
    params = redrawn(config.model)
    write_checkpoint(tmp_path, config, params, shard_bytes=2000)
    ids = np.random.default_rng(0).integers(0, 19, (2, 8))
    expected = logits(params, config.model, ids)
    np.testing.assert_allclose(their_logits(load(tmp_path), ids), expected, atol=1e-4)


@pytest.mark.parametrize("spec", ["byte", "char", "word", "bpe:300"])
def test_transformers_loads_an_exported_tokenizer(spec, tmp_path):
    text = "the  cat\nsat — on “it”"
    ours = tokenizers.make(spec, [text])
    config = tiny(model={"vocab_size": 300})
    write_checkpoint(tmp_path, config, redrawn(config.model), ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ids == ours.encode(text).tolist()
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.end_of_text


def test_check_finds_no_difference_and_names_the_layer_of_one(tmp_path, capsys):
    build("llama", tmp_path)
    assert checking.compare(str(tmp_path), ids=[1, 2, 3])
    assert "at all positions" in capsys.readouterr().out
    config = read_config(tmp_path)
    tokens = np.array([[1, 2, 3]])
    params = load_params(tmp_path, config)
    params["layers"]["ffn"]["w_up_DF"][1] *= 1.1
    ours = checking.our_activations(params, config.model, tokens)
    theirs = checking.their_activations(tmp_path, tokens)
    assert list(ours) == list(theirs) == ["embeddings", "layer 0", "layer 1", "layer 2", "logits"]
    lines = []
    assert not checking.report(ours, theirs, 1e-3, lines.append)
    assert lines[-1].endswith("it arises in: layer 1")


def test_check_refuses_what_transformers_cannot_load(tmp_path):
    build("gpt2", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"n_head": 5}))
    with pytest.raises(UserError):
        checking.compare(str(tmp_path))
