"""Reading checkpoints: logits equal those of transformers, both spellings of config.json, and clear errors.

The expected numbers are in tests/references/huggingface; tests/references/make_huggingface.py wrote them.
"""

import dataclasses
import json
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from huggingface_checkpoints import EXPECTED, checkpoint, edit_tensors

from lm import model, parameters
from lm.errors import UserError
from lm.huggingface.config_files import read_config
from lm.huggingface.families import FAMILIES
from lm.huggingface.safetensors_files import Planned, TensorFiles, write_tensors
from lm.huggingface.weights import load_params

SLOW = ("gpt2 erf gelu", "linear rope", "llama")  # about a second each


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in EXPECTED])
def test_logits_and_greedy_ids_are_those_of_transformers(case, tmp_path):
    directory, expected = checkpoint(tmp_path / "model", case), EXPECTED[case]
    config = read_config(directory)
    params = load_params(directory, config)
    # One call over the continuation that transformers generated: each of its ids must be our likeliest one.
    ids = np.array([expected["ids"] + expected["greedy"][:-1]])
    c = dataclasses.replace(config.model, scan_layers=True)  # compiles faster
    logits = jax.jit(model.logits, static_argnums=1)(params, c, ids)[0, len(expected["ids"]) - 1 :]
    np.testing.assert_allclose(logits[0], expected["logits"], atol=1e-5)
    assert logits.argmax(-1).tolist() == expected["greedy"]


def test_every_family_has_a_stored_checkpoint():
    assert {case["config"]["model_type"] for case in EXPECTED.values()} == FAMILIES.keys()


def test_spellings_of_transformers_4_give_the_same_config(tmp_path):
    new = read_config(checkpoint(tmp_path / "model", "llama3 rope", dtype="bfloat16"))
    rope = dict(EXPECTED["llama3 rope"]["config"]["rope_parameters"])
    theta = rope.pop("rope_theta")
    for kind in ("rope_type", "type"):
        scaling = {name: value for name, value in rope.items() if name != "rope_type"} | {kind: "llama3"}
        old = {"rope_parameters": None, "dtype": None, "torch_dtype": "bfloat16"}
        assert (
            read_config(checkpoint(tmp_path / "model", "llama", **old, rope_theta=theta, rope_scaling=scaling)) == new
        )
    assert (new.model.rope_scaling, new.model.rope_theta, new.model.rope_factor) == ("llama3", 100.0, 4.0)
    assert new.model.param_dtype == "bfloat16"


def test_fields_that_config_json_leaves_out_have_the_defaults_of_the_family(tmp_path):
    left_out = {"head_dim": None, "num_key_value_heads": None, "rms_norm_eps": None, "rope_parameters": None}
    m = read_config(checkpoint(tmp_path, "llama", **left_out)).model
    assert (m.d_head, m.n_kv_heads, m.norm_eps, m.rope_theta, m.tie_embeddings) == (4, 2, 1e-6, 10_000.0, False)
    m = read_config(checkpoint(tmp_path, "gemma2", layer_types=None, tie_word_embeddings=None)).model
    assert (m.window_pattern, m.tie_embeddings) == ((3, 0), True)
    left_out = {"sliding_window": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    m = read_config(checkpoint(tmp_path, "gemma2", **left_out)).model
    assert (m.window_pattern, m.attn_softcap, m.logit_softcap) == ((4096, 0), 50.0, 30.0)
    (tmp_path / "config.json").write_text(json.dumps(EXPECTED["gemma2"]["config"] | left_out))  # null: switched off
    m = read_config(tmp_path).model
    assert (m.window_pattern, m.attn_softcap, m.logit_softcap) == ((0,), None, None)


@pytest.mark.parametrize(("case", "n"), [("llama", 2), ("mistral", 8), ("qwen2", 32), ("qwen3", 32), ("gemma2", 4)])
def test_the_default_number_of_key_heads_is_the_familys_and_null_means_as_many_as_queries(case, n, tmp_path):
    heads = 2 if case == "llama" else 64
    sizes = {"num_attention_heads": heads, "hidden_size": 128, "head_dim": 2}
    assert read_config(checkpoint(tmp_path, case, **sizes, num_key_value_heads=None)).model.n_kv_heads == n
    (tmp_path / "config.json").write_text(json.dumps(EXPECTED[case]["config"] | sizes | {"num_key_value_heads": None}))
    assert read_config(tmp_path).model.n_kv_heads == heads


def test_if_config_json_has_two_entries_for_rope_the_one_that_transformers_prefers_is_read(tmp_path):
    new = {"rope_type": "default", "rope_theta": 500.0}
    old = {"type": "linear", "factor": 2.0}
    m = read_config(checkpoint(tmp_path, rope_parameters=new, rope_scaling=old)).model
    assert (m.rope_scaling, m.rope_theta, m.rope_factor) == ("linear", 10_000.0, 2.0)
    checkpoint(tmp_path, "llama3 rope", original_max_position_embeddings=5)
    assert read_config(tmp_path).model.rope_original_max_positions == 5


def test_the_context_is_the_checkpoints_up_to_a_limit_or_as_given(tmp_path):
    assert read_config(checkpoint(tmp_path)).train.seq_len == 16
    checkpoint(tmp_path, max_position_embeddings=131072)
    assert read_config(tmp_path).train.seq_len == 2048
    assert read_config(tmp_path, seq_len=4096).train.seq_len == 4096


def test_one_file_several_files_and_names_without_prefix_give_the_same_parameters(tmp_path):
    config = read_config(checkpoint(tmp_path / "one"))
    expected = parameters.flat(load_params(tmp_path / "one", config))
    (tmp_path / "several").mkdir()
    with TensorFiles(tmp_path / "one") as files:
        tensors = {name: files.read(name) for name in files.shapes}
    planned = [Planned(name, x.shape, x.dtype) for name, x in tensors.items()]
    names = write_tensors(tmp_path / "several", planned, iter(tensors.values()), shard_bytes=700)
    assert len(names) > 3
    edit_tensors(checkpoint(tmp_path / "short"), lambda tensors: {
        name.removeprefix("model."): x for name, x in tensors.items()
    })  # fmt: skip
    (tmp_path / "several/config.json").write_bytes((tmp_path / "one/config.json").read_bytes())
    for folder in ("several", "short"):
        found = parameters.flat(load_params(tmp_path / folder, config))
        for path, x in expected.items():
            np.testing.assert_array_equal(found[path], x)


def test_a_tied_head_may_be_repeated_but_not_differ(tmp_path):
    directory = checkpoint(tmp_path, "qwen2")
    config = read_config(directory)
    edit_tensors(directory, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "head" not in load_params(directory, config)
    edit_tensors(directory, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    with pytest.raises(UserError, match="differs from the embedding"):
        load_params(directory, config)


def test_gains_of_gemma_are_one_plus_the_stored_ones(tmp_path):
    directory = checkpoint(tmp_path, "gemma2")
    config = read_config(directory, dtype="bfloat16")
    assert (config.model.param_dtype, config.model.compute_dtype) == ("float32", "bfloat16")
    with TensorFiles(directory) as files:
        stored = files.read("model.norm.weight").astype(np.float32)
    np.testing.assert_array_equal(load_params(directory, config)["final_norm"]["scale_D"], 1 + stored)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported are llama"),
        ({"model_type": ["llama"]}, "there is no model_type"),
        ({"model_type": None}, "there is no model_type"),
        ({"hidden_size": None}, "hidden_size is None; expected a positive integer"),
        ({"num_attention_heads": "2"}, "num_attention_heads is 2; expected a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "3 does not divide n_heads = 2"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: 'small' is not a float"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; supported are silu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no factor"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "differs between layers"),
        ({"rope_parameters": [1]}, "rope_parameters is not"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0 is supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; supported are float32"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
        ({"hidden_size": 9, "vocab_size": 0, "rms_norm_eps": []}, "vocab_size is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected a positive integer, at most 1000"),
        ({"head_dim": 3}, "3 is odd, but RoPE rotates pairs of features"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8,
                }
            },
            "4.0 is not less than rope_high_freq_factor = 4.0",
        ),
    ],
)
def test_a_config_that_cannot_be_read_or_expressed_is_refused(fields, message, tmp_path):
    with pytest.raises(UserError) as error:
        read_config(checkpoint(tmp_path, **fields))
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_hostile_sizes_of_windows_and_layers_are_refused_at_once(tmp_path):
    for case, fields in (("gemma2", {"sliding_window": math.inf}), ("gemma2", {"num_hidden_layers": 10**18})):
        with pytest.raises(UserError, match="expected a"):
            read_config(checkpoint(tmp_path, case, layer_types=None, **fields))


def test_learned_positions_cannot_be_extended(tmp_path):
    with pytest.raises(UserError, match="n_positions is 16, but 17 positions are needed"):
        read_config(checkpoint(tmp_path, "gpt2"), seq_len=17)


def test_scaled_attention_of_gpt2_is_refused(tmp_path):
    with pytest.raises(UserError, match="scale_attn_by_inverse_layer_idx is True; only false is supported"):
        read_config(checkpoint(tmp_path, "gpt2", scale_attn_by_inverse_layer_idx=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: x for n, x in t.items() if "norm" not in n}, "are missing: model.layers.0.input_layernorm"),
        (lambda t: t | {"model.layers.0.lora": t["model.norm.weight"]}, "the model uses: model.layers.0.lora"),
        (
            lambda t: t | {"model.norm.weight": t["model.norm.weight"][:3]},
            "model.norm.weight has shape (3,); config.json implies (8,)",
        ),
        (
            lambda t: t | {"model.layers.1.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"].T},
            "has shape (8, 12); config.json implies (12, 8)",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(change, message, tmp_path):
    directory = checkpoint(tmp_path)
    edit_tensors(directory, change)
    with pytest.raises(UserError) as error:
        load_params(directory, read_config(directory))
    assert message in str(error.value)


def test_buffers_of_old_checkpoints_are_ignored(tmp_path):
    directory = checkpoint(tmp_path, "gpt2")
    mask = np.ones((1, 1, 16, 16), ml_dtypes.bfloat16)
    edit_tensors(directory, lambda tensors: tensors | {"transformer.h.0.attn.bias": mask})
    load_params(directory, read_config(directory))


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        read_config(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"is corrupted.*download it again"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model": {}, "train": {}}))
    with pytest.raises(UserError, match="is the directory of a run"):
        read_config(tmp_path)
