"""Writing checkpoints: what is read back is the same model, and models without an equivalent are refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from huggingface_checkpoints import EXPECTED, checkpoint
from tiny import redrawn, tiny

from lm import model, parameters
from lm.config import ModelConfig
from lm.data import tokenizers
from lm.errors import UserError
from lm.huggingface.config_files import WITHOUT_EFFECT, export_fields, normalized, read_config
from lm.huggingface.families import FAMILIES, USUAL
from lm.huggingface.safetensors_files import TensorFiles
from lm.huggingface.weights import load_params
from lm.huggingface.writing import write_checkpoint

GPT2 = {
    "norm": "layer", "ffn": "mlp", "activation": "gelu_tanh", "positions": "learned", "n_kv_heads": 4,
    "attn_bias": True, "ffn_bias": True, "tie_embeddings": True,
}  # fmt: skip
WITHOUT_BIASES = {"attn_bias": False, "ffn_bias": False, "norm_bias": False}
OURS = {
    "gpt2": GPT2,
    "gpt2 without biases, untied": GPT2 | WITHOUT_BIASES | {"tie_embeddings": False},
    "llama": {"d_head": 6, "norm_eps": 1e-3},
    "llama, rope halves": {"rope_pairing": "halves", "attn_bias": True, "ffn_bias": True, "tie_embeddings": True},
    "llama, llama3 rope": {"rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_max_positions": 8},
    "llama, linear rope": {"rope_scaling": "linear", "rope_factor": 2.0},
    "mistral": {"window_pattern": (3,), "activation": "sigmoid"},
    "qwen2": {"attn_bias": True, "attn_out_bias": False},
    "qwen3": {"qk_norm": True, "window_pattern": (3, 0), "activation": "gelu"},
    "gemma2": {
        "norm_placement": "sandwich", "attn_softcap": 5.0, "logit_softcap": 3.0, "embed_scale": 4.0,
        "window_pattern": (0, 3), "tie_embeddings": True, "activation": "gelu_tanh",
    },
    "olmo2": {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "all_heads"},
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_an_exported_model_is_read_back_as_the_same_model(name, tmp_path):
    config = tiny(model=OURS[name])
    params = redrawn(config.model)
    write_checkpoint(tmp_path, config, params)
    family, _ = export_fields(config)
    assert family.model_type == name.split(" ")[0].strip(",")
    found = read_config(tmp_path)
    differences = dict(normalized(config.model).items() ^ normalized(found.model).items())
    assert differences.keys() <= ({*WITHOUT_BIASES, "attn_out_bias"} if "without biases" in name else set())
    assert found.train.seq_len == config.train.seq_len
    again = tmp_path / "again"
    again.mkdir()
    write_checkpoint(again, found, load_params(tmp_path, found))
    with TensorFiles(tmp_path) as one, TensorFiles(again) as two:
        assert one.shapes == two.shapes
        for tensor in one.shapes:
            # Gains of Gemma are stored minus 1, which rounds those below 1/2 or above 2.
            np.testing.assert_allclose(one.read(tensor), two.read(tensor), rtol=0, atol=1.2e-7 * (name == "gemma2"))


@pytest.mark.parametrize("name", ["gpt2 without biases, untied", "llama"])
@pytest.mark.slow
def test_permuted_features_and_zero_biases_do_not_change_the_logits(name, tmp_path):
    config = tiny(model=OURS[name] | {"scan_layers": True})
    params = redrawn(config.model)
    write_checkpoint(tmp_path, config, params)
    found = read_config(tmp_path)
    ids = np.random.default_rng(0).integers(0, 19, (2, 8))
    logits = jax.jit(model.logits, static_argnums=1)
    expected = logits(params, config.model, ids)
    c = dataclasses.replace(found.model, scan_layers=True)
    assert (c.rope_pairing, c.attn_bias) == (("halves", False) if name == "llama" else ("adjacent", True))
    np.testing.assert_allclose(logits(load_params(tmp_path, found), c, ids), expected, atol=1e-5)


MUP = {"parametrization": "mup", "mup_base_d_model": 5, "mup_base_d_head": 3}
FOLDED = {
    "llama": MUP,
    "llama, biases": {"attn_scale": 0.3, "embed_scale": 3.0, "attn_bias": True},
    "qwen3": MUP | {"qk_norm": True, "tie_embeddings": True},
    "gpt2": GPT2 | MUP,
}


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.slow
def test_factors_that_a_family_lacks_are_multiplied_into_weights(name, tmp_path):
    config = tiny(model=FOLDED[name] | {"scan_layers": True})
    params = redrawn(config.model)
    write_checkpoint(tmp_path, config, params)
    found = read_config(tmp_path)
    assert (found.model.parametrization, found.model.attn_scale, found.model.embed_scale) == ("standard", None, 1.0)
    ids = np.random.default_rng(0).integers(0, 19, (2, 8))
    logits = jax.jit(model.logits, static_argnums=1)
    c = dataclasses.replace(found.model, scan_layers=True)
    expected = logits(params, config.model, ids)
    np.testing.assert_allclose(logits(load_params(tmp_path, found), c, ids), expected, atol=1e-5)


@pytest.mark.parametrize("case", EXPECTED)
def test_an_imported_checkpoint_is_exported_with_identical_weights(case, tmp_path):
    directory = checkpoint(tmp_path / "from", case)
    config = read_config(directory)
    (tmp_path / "to").mkdir()
    write_checkpoint(tmp_path / "to", config, load_params(directory, config))
    assert read_config(tmp_path / "to").model == config.model
    with TensorFiles(directory) as one, TensorFiles(tmp_path / "to") as two:
        assert one.shapes == two.shapes
        for tensor in one.shapes:
            np.testing.assert_array_equal(one.read(tensor).astype(np.float32), two.read(tensor))


def test_bfloat16_weights_keep_their_dtype_and_bits(tmp_path):
    directory = checkpoint(tmp_path / "from", dtype="bfloat16")
    config = read_config(directory)
    (tmp_path / "to").mkdir()
    write_checkpoint(tmp_path / "to", config, load_params(directory, config))
    with TensorFiles(directory) as one, TensorFiles(tmp_path / "to") as two:
        for tensor in one.shapes:
            assert two.read(tensor).dtype == one.read(tensor).dtype
            np.testing.assert_array_equal(one.read(tensor), two.read(tensor))


@pytest.mark.parametrize(
    ("keys", "reasons"),
    [
        ({"norm_placement": "post"}, ["norm_placement: post"]),
        ({"embed_scale": 2.0, "tie_embeddings": True}, ["embed_scale: 2.0; llama has 1.0"]),
        ({"ffn": "mlp", "positions": "none"}, ["ffn: mlp; llama has glu", "positions: none; llama has rope"]),
        (GPT2 | {"norm_algorithm": "running_mean"}, ["norm_algorithm: running_mean; gpt2 has two_pass"]),
        (GPT2 | {"n_kv_heads": 2}, ["n_head for both"]),
        (GPT2 | {"d_head": 6}, ["d_head: 6; gpt2 has d_model / n_heads"]),
        ({"rope_width": 2}, ["rope_width: 2; llama has none"]),
        ({"window_pattern": (3, 0)}, ["window_pattern: (3, 0); llama has (0,)"]),
        ({"qk_norm": True, "window_pattern": (3, 2)}, ["windows of several sizes (2, 3)"]),
        ({"d_model": 18, "d_head": 4, "attn_bias": True}, ["18 is not divisible by n_heads, as llama requires"]),
        ({"head_bias": True}, ["head_bias: true; llama has false"]),
        (OURS["gemma2"] | {"embed_scale": 1.0}, ["embed_scale: 1.0 is not sqrt(d_model)"]),
        (OURS["gemma2"] | {"attn_scale": 0.3}, ["0.3 is not 1 / sqrt(n) of an integer n"]),
    ],
)  # fmt: skip
def test_models_without_an_equivalent_are_refused_with_all_reasons(keys, reasons):
    with pytest.raises(UserError, match="no supported family") as error:
        export_fields(tiny(model=keys))
    assert len(error.value.problems) == 1 + len(reasons)
    for reason in reasons:
        assert reason in str(error.value)


@dataclasses.dataclass(frozen=True)
class Changed(ModelConfig):
    """A schema with keys that somebody added, as docs/changing-the-model.md describes, but no family knows."""

    attn_gate: bool = False
    mix: float = 1.0


def changed(**keys):
    config = tiny()
    return dataclasses.replace(config, model=Changed(**dataclasses.asdict(config.model) | keys))


@pytest.mark.parametrize(
    ("config", "reasons"),
    [
        (changed(), []),
        (changed(attn_gate=True, mix=2.0), ["attn_gate: true; llama has false", "mix: 2.0; llama has 1.0"]),
        (tiny(model={"activation": "mish"}), ["activation: mish"]),  # one more function and choice of the schema
    ],
)
def test_keys_and_activations_that_no_family_knows_are_refused(config, reasons):
    if not reasons:
        export_fields(config)
        return
    with pytest.raises(UserError, match="no supported family") as error:
        export_fields(config)
    assert len(error.value.problems) == 1 + len(reasons)
    assert all(reason in str(error.value) for reason in reasons)


def test_a_parameter_that_no_tensor_claims_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    table = parameters.parameter_table
    gate = {"layers/attention/w_g_DHK": parameters.Parameter((2, 16, 4, 4), "NDHK", "weight", 1)}
    monkeypatch.setattr(parameters, "parameter_table", lambda c: parameters.Table("", table(c) | gate))
    config = tiny()
    with pytest.raises(UserError, match="llama has no tensor for layers/attention/w_g_DHK"):
        write_checkpoint(tmp_path, config, redrawn(config.model))
    assert not list(tmp_path.iterdir())


def test_every_family_decides_about_every_key_of_the_model():
    """A new key must be added to a family, to USUAL or to WITHOUT_EFFECT: it may change what is computed."""
    for family in FAMILIES.values():
        keys = {*family.fields, *(key for conversion in family.conversions for key in conversion.keys)}
        decided = keys | USUAL.keys() | WITHOUT_EFFECT | {"d_head"}
        assert decided == {field.name for field in dataclasses.fields(ModelConfig)}, family.model_type
    assert not USUAL.keys() & WITHOUT_EFFECT


def test_every_parameter_of_a_model_is_in_a_tensor():
    for keys in OURS.values():
        config = tiny(model=keys)
        family, _ = export_fields(config)
        held = {path for tensor in family.tensors for path in tensor.paths}
        assert parameters.parameter_table(config.model).keys() <= held


TEXT = "The café’s  2 dogs\n\tran — “so far”! 日本語 😀 e\u0301 don't x-ray"


@pytest.mark.parametrize("spec", ["byte", "char", "word", "bpe:300"])
def test_an_exported_tokenizer_gives_the_same_ids_and_text(spec, tmp_path):
    from tokenizers import Tokenizer

    ours = tokenizers.make(spec, [TEXT])
    config = tiny(model={"vocab_size": 300})
    files = write_checkpoint(tmp_path, config, redrawn(config.model), ours)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = theirs.encode(TEXT, add_special_tokens=False).ids
    assert ids == ours.encode(TEXT).tolist()
    assert theirs.decode(ids, skip_special_tokens=False) == TEXT
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"} <= set(files)
    end_of_text = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert end_of_text == ours.end_of_text == json.loads((tmp_path / "config.json").read_text())["eos_token_id"]


def test_an_unknown_character_becomes_unk_as_in_our_tokenizer(tmp_path):
    from tokenizers import Tokenizer

    from lm.huggingface.tokenizer_files import to_tokenizer_json

    for ours in (tokenizers.CharTokenizer("hello", unk=True), tokenizers.WordTokenizer(["hello"], unk=True)):
        theirs = Tokenizer.from_str(to_tokenizer_json(ours))
        assert theirs.encode("hello yell").ids == ours.encode("hello yell").tolist()
