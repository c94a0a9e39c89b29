"""Reading checkpoints: logits equal those of transformers, both spellings of config.json, and clear
errors.

The expected numbers are in tests/references/huggingface; tests/references/make_huggingface.py wrote
them.
"""

import contextlib
import dataclasses
import json
import math
import os

import jax
import ml_dtypes
import numpy as np
import pytest
from huggingface_checkpoints import EXPECTED, FOLDER, checkpoint, edit_tensors, planned

from lm import model, parameters
from lm.data.tokenizers import CharTokenizer
from lm.huggingface.config_files import read_config
from lm.huggingface.families import FAMILIES
from lm.huggingface.safetensors_files import TensorFiles, write_tensors
from lm.huggingface.tokenizer_files import load_tokenizer, read_settings, to_tokenizer_json
from lm.huggingface.weights import load_params
from lm.system.errors import UserError

SLOW = ("gpt2 erf gelu", "linear rope", "llama")  # about a second each


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in EXPECTED]
)
def test_logits_and_greedy_ids_are_those_of_transformers(case, tmp_path):
    directory, expected = checkpoint(tmp_path / "model", case), EXPECTED[case]
    config = read_config(directory)
    params = load_params(directory, config)
    # One call over the continuation that transformers generated: each of its ids must be our
    # likeliest one.
    ids = np.array([expected["ids"] + expected["greedy"][:-1]])
    c = dataclasses.replace(config.model, scan_layers=True)  # compiles faster
    logits = jax.jit(model.logits, static_argnums=1)(params, c, ids)[0, len(expected["ids"]) - 1 :]
    np.testing.assert_allclose(logits[0], expected["logits"], atol=1e-5)
    assert logits.argmax(-1).tolist() == expected["greedy"]


FIELDS = json.loads((FOLDER.with_name("huggingface_fields.json")).read_text())


@pytest.mark.parametrize("family", FIELDS["changes"])
def test_no_field_that_changes_what_transformers_computes_is_ignored(family, tmp_path):
    """It is refused, or it gives another model. Without logits, it changes the cache of
    transformers only: refused.
    """
    case = FIELDS["cases"][family]
    before = read_config(checkpoint(tmp_path, case)).model
    for name, value, logits in FIELDS["changes"][family]:
        directory, is_read = checkpoint(tmp_path, case, **{name: value}), False
        with contextlib.suppress(UserError):
            is_read = read_config(directory).model != before
            assert is_read, f"{name}: {value!r} is ignored"
        assert not (is_read and logits is None), f"{name}: {value!r} must be refused"


@pytest.mark.slow
@pytest.mark.parametrize("family", FIELDS["changes"])
def test_fields_that_are_read_have_the_effect_that_they_have_in_transformers(family, tmp_path):
    case = FIELDS["cases"][family]
    ids, tried = np.array([EXPECTED[case]["ids"]]), 0
    for name, value, expected in FIELDS["changes"][family]:
        directory = checkpoint(tmp_path, case, **{name: value})
        try:
            config = read_config(directory)
        except UserError:
            continue
        logits = jax.jit(model.logits, static_argnums=1)(
            load_params(directory, config), config.model, ids
        )[0, -1]
        np.testing.assert_allclose(
            logits, expected, rtol=0, atol=1e-4, err_msg=f"{name}: {value!r}"
        )
        tried += 1
    assert tried > 1


def test_every_family_has_a_stored_checkpoint():
    assert {case["config"]["model_type"] for case in EXPECTED.values()} == FAMILIES.keys()


def test_spellings_of_transformers_4_give_the_same_config(tmp_path):
    new = read_config(checkpoint(tmp_path / "model", "llama3 rope", dtype="bfloat16"))
    rope = dict(EXPECTED["llama3 rope"]["config"]["rope_parameters"])
    theta = rope.pop("rope_theta")
    for kind in ("rope_type", "type"):
        scaling = {name: value for name, value in rope.items() if name != "rope_type"} | {
            kind: "llama3"
        }
        old = {"rope_parameters": None, "dtype": None, "torch_dtype": "bfloat16"}
        assert (
            read_config(
                checkpoint(
                    tmp_path / "model", "llama", **old, rope_theta=theta, rope_scaling=scaling
                )
            )
            == new
        )
    assert (new.model.rope_scaling, new.model.rope_theta, new.model.rope_factor) == (
        "llama3",
        100.0,
        4.0,
    )
    assert new.model.param_dtype == "bfloat16"


YARN = {
    name: x
    for name, x in EXPECTED["yarn rope"]["config"]["rope_parameters"].items()
    if name != "rope_theta"
}
# the fields of transformers 4 that stand for the rope_parameters of a stored checkpoint
OLD_ROPE = {
    "yarn rope": {"rope_theta": 50.0, "rope_scaling": YARN},
    "gemma3_text": {
        "rope_theta": 50.0, "rope_local_base_freq": 20.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "olmo3": {"rope_theta": 50.0, "rope_scaling": YARN},
    "smollm3": {"rope_theta": 2e6},
    "phi3": {"rope_theta": 50.0, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_emb_base": 50.0, "rotary_pct": 0.5},
}  # fmt: skip


def test_parameters_of_rope_are_read_from_their_old_fields(tmp_path):
    for case, old in OLD_ROPE.items():
        new = read_config(checkpoint(tmp_path, case))
        assert read_config(checkpoint(tmp_path, case, rope_parameters=None, **old)) == new
    new = read_config(checkpoint(tmp_path, "qwen3_moe"))
    assert (
        read_config(checkpoint(tmp_path, "qwen3_moe", num_local_experts=None, num_experts=3)) == new
    )


def test_fields_that_config_json_leaves_out_have_the_defaults_of_the_family(tmp_path):
    left_out = {
        "head_dim": None,
        "num_key_value_heads": None,
        "rms_norm_eps": None,
        "rope_parameters": None,
    }
    m = read_config(checkpoint(tmp_path, "llama", **left_out)).model
    assert (m.d_head, m.n_kv_heads, m.norm_eps, m.rope_theta, m.tie_embeddings) == (
        4,
        2,
        1e-6,
        10_000.0,
        False,
    )
    m = read_config(
        checkpoint(tmp_path, "gemma2", layer_types=None, tie_word_embeddings=None)
    ).model
    assert (m.window_pattern, m.tie_embeddings) == ((3, 0), True)
    m = read_config(
        checkpoint(tmp_path, "gemma3_text", layer_types=None, sliding_window_pattern=2)
    ).model
    assert (m.window_pattern, m.attn_softcap, m.logit_softcap) == ((3, 0), None, None)
    m = read_config(
        checkpoint(tmp_path, "smollm3", no_rope_layers=None, no_rope_layer_interval=2)
    ).model
    assert (m.rope_pattern, m.window_pattern) == ((1, 0), (0,))
    left_out = {
        "sliding_window": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    m = read_config(checkpoint(tmp_path, "gemma2", **left_out)).model
    assert (m.window_pattern, m.attn_softcap, m.logit_softcap) == ((4096, 0), 50.0, 30.0)
    # null: switched off
    (tmp_path / "config.json").write_text(json.dumps(EXPECTED["gemma2"]["config"] | left_out))
    m = read_config(tmp_path).model
    assert (m.window_pattern, m.attn_softcap, m.logit_softcap) == ((0,), None, None)


def test_the_default_number_of_key_heads_is_the_familys_and_null_means_as_many_as_queries(tmp_path):
    defaults = {
        "llama": 64,
        "mistral": 8,
        "qwen2": 32,
        "qwen3": 32,
        "gemma2": 4,
        "gemma": 16,
        "starcoder2": 2,
    }
    for case, n in defaults.items():
        sizes = {"num_attention_heads": 64, "hidden_size": 128, "head_dim": 2}
        assert (
            read_config(
                checkpoint(tmp_path, case, **sizes, num_key_value_heads=None)
            ).model.n_kv_heads
            == n
        )
        null = EXPECTED[case]["config"] | sizes | {"num_key_value_heads": None}
        (tmp_path / "config.json").write_text(json.dumps(null))
        assert read_config(tmp_path).model.n_kv_heads == 64


def test_if_config_json_has_two_entries_for_rope_the_one_that_transformers_prefers_is_read(
    tmp_path,
):
    new = {"rope_type": "default", "rope_theta": 500.0}
    old = {"type": "linear", "factor": 2.0}
    m = read_config(checkpoint(tmp_path, rope_parameters=new, rope_scaling=old)).model
    assert (m.rope_scaling, m.rope_theta, m.rope_factor) == ("linear", 10_000.0, 2.0)
    checkpoint(tmp_path, "llama3 rope", original_max_position_embeddings=5)
    assert read_config(tmp_path).model.rope_original_max_positions == 5


def test_the_context_is_the_checkpoints_up_to_a_limit_or_as_given(tmp_path):
    assert read_config(checkpoint(tmp_path)).train.seq_len == 16
    assert read_config(checkpoint(tmp_path, max_position_embeddings=131072)).train.seq_len == 2048
    assert read_config(tmp_path, seq_len=4096).train.seq_len == 4096


def test_one_file_several_files_and_names_without_prefix_give_the_same_parameters(tmp_path):
    config = read_config(checkpoint(tmp_path / "one"))
    expected = parameters.flat(load_params(tmp_path / "one", config))
    (tmp_path / "several").mkdir()
    with TensorFiles(tmp_path / "one") as files:
        tensors = {name: files.read(name) for name in files.shapes}
    names = write_tensors(tmp_path / "several", planned(tensors), shard_bytes=700)
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
    edit_tensors(
        directory,
        lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
    )
    assert "head" not in load_params(directory, config)
    edit_tensors(
        directory, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}
    )
    with pytest.raises(UserError, match="differs from the embedding"):
        load_params(directory, config)


def test_gains_of_gemma_are_one_plus_the_stored_ones(tmp_path):
    directory = checkpoint(tmp_path, "gemma2")
    config = read_config(directory, dtype="bfloat16")
    assert (config.model.param_dtype, config.model.compute_dtype) == ("float32", "bfloat16")
    with TensorFiles(directory) as files:
        stored = files.read("model.norm.weight").astype(np.float32)
    np.testing.assert_array_equal(
        load_params(directory, config)["final_norm"]["scale_D"], 1 + stored
    )


REFUSED = {
    "model_type is 'mamba'; supported are llama": {"model_type": "mamba"},
    "model_type is \"['llama']\"; supported": {"model_type": ["llama"]},
    "hidden_size is None; expected a positive integer": {"hidden_size": None},
    "num_attention_heads is 2; expected a positive integer": {"num_attention_heads": "2"},
    "num_attention_heads is 0": {"num_attention_heads": 0},
    "3 does not divide n_heads = 2": {"num_key_value_heads": 3},
    "rms_norm_eps: 'small' is not a float": {"rms_norm_eps": "small"},
    "hidden_act is 'mish'; supported are silu": {"hidden_act": "mish"},
    "rope_type is 'longrope'": {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
    "have mscale, truncate": {"rope_parameters": YARN | {"mscale": 1.0, "truncate": False}},
    "no factor": {"rope_parameters": {"rope_type": "linear"}},
    "differs between layers": {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
    "rope_parameters is not": {"rope_parameters": [1]},
    "partial_rotary_factor is 0.5; only 1.0 is supported": {"partial_rotary_factor": 0.5},
    "quantization_config": {"quantization_config": {"bits": 4}},
    "dtype is 'float8_e4m3fn'; supported are float32": {"dtype": "float8_e4m3fn"},
    "max_position_embeddings is 'many'": {"max_position_embeddings": "many"},
    "vocab_size is 0": {"hidden_size": 9, "vocab_size": 0, "rms_norm_eps": []},
    "num_hidden_layers is 1000000000; expected a positive integer, at most 1000": {
        "num_hidden_layers": 10**9
    },
    "3 is odd, but RoPE rotates pairs of features": {"head_dim": 3},
    "4.0 is not less than rope_high_freq_factor = 4.0": {
        "rope_parameters": EXPECTED["llama3 rope"]["config"]["rope_parameters"]
        | {"low_freq_factor": 4.0}
    },
}


def test_a_config_that_cannot_be_read_or_expressed_is_refused(tmp_path):
    for message, fields in REFUSED.items():
        with pytest.raises(UserError) as error:
            read_config(checkpoint(tmp_path, **fields))
        assert message in str(error.value)
        assert str(tmp_path) in str(error.value)
    for fields in ({"sliding_window": math.inf}, {"num_hidden_layers": 10**18}):
        with pytest.raises(UserError, match="expected a"):
            read_config(checkpoint(tmp_path, "gemma2", layer_types=None, **fields))
    for family, size in (("mistral", 0), ("gemma2", 0), ("phi3", -1), ("mistral", True)):
        with pytest.raises(
            UserError, match=f"sliding_window is {size}; expected a positive integer, or null"
        ):
            read_config(checkpoint(tmp_path, family, sliding_window=size))
    for name, value in {
        "mlp_only_layers": [1],
        "intermediate_size": 13,
        "decoder_sparse_step": 2,
    }.items():
        with pytest.raises(UserError, match=f"{name} is .*only"):
            read_config(checkpoint(tmp_path, "qwen3_moe", **{name: value}))
    with pytest.raises(
        UserError, match="scale_attn_by_inverse_layer_idx is True; only false is supported"
    ):
        read_config(checkpoint(tmp_path, "gpt2", scale_attn_by_inverse_layer_idx=True))
    dynamic = checkpoint(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(
        UserError, match="max_position_embeddings is 16, but 17 positions are needed"
    ):
        read_config(dynamic, seq_len=17)
    with pytest.raises(UserError, match="n_positions is 16, but 17 positions are needed"):
        read_config(checkpoint(tmp_path, "gpt2"), seq_len=17)


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    norm, up = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    changes = {
        "are missing: model.layers.0.input_layernorm": lambda t: {
            n: x for n, x in t.items() if "norm" not in n
        },
        "the model uses: model.layers.0.lora": lambda t: t | {"model.layers.0.lora": t[norm]},
        f"{norm} has shape (3,); config.json implies (8,)": lambda t: t | {norm: t[norm][:3]},
        "has shape (8, 12); config.json implies (12, 8)": lambda t: t | {up: t[up].T},
    }
    for message, change in changes.items():
        edit_tensors(checkpoint(tmp_path), change)
        with pytest.raises(UserError) as error:
            load_params(tmp_path, read_config(tmp_path))
        assert message in str(error.value)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    """As that of Gemma 3 1B, which is read without its last token."""
    config = read_config(checkpoint(tmp_path))
    n = config.model.vocab_size
    spec = json.loads(to_tokenizer_json(CharTokenizer(map(chr, range(97, 97 + n)))))
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"added_tokens": [{"id": n, "content": "<image_soft_token>", "special": True} | off]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | added))
    with pytest.raises(UserError, match=f"has ids up to {n}, .* delete .* from its added_tokens"):
        load_tokenizer(tmp_path, config)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(tmp_path, config).vocab_size == n


def test_buffers_of_old_checkpoints_are_ignored(tmp_path):
    directory = checkpoint(tmp_path, "gpt2")
    mask = np.ones((1, 1, 16, 16), ml_dtypes.bfloat16)
    edit_tensors(directory, lambda tensors: tensors | {"transformer.h.0.attn.bias": mask})
    load_params(directory, read_config(directory))


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    contents = {
        "has no config": None,
        "is corrupted.*download it again": "{",
        "directory of a run": '{"model": {}, "train": {}}',
    }
    for message, text in contents.items():
        if text:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_config(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        read_config(tmp_path / "nothing")


# ---- Files that others may have made -------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]
)
def test_links_out_of_the_directory_pipes_and_huge_files_are_refused(name, tmp_path):
    def read(directory):
        config = read_config(directory)
        load_tokenizer(directory, config)
        read_settings(directory)
        load_params(directory, config)

    (tmp_path / "private").write_text("{}")
    directory = checkpoint(tmp_path / "model")
    path = directory / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match=rf"{name} is a link that leads out of the directory"):
        read(directory)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(UserError, match=rf"{name} is missing"):
        read(directory)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=rf"{name} is not a file"):
        read(directory)
    path.unlink()
    if name != "model.safetensors":
        with open(path, "wb") as file:
            file.truncate(2**30)  # without blocks on the disk
        with pytest.raises(UserError, match=rf"{name} has 1,073,741,824 bytes, more than the"):
            read(directory)


def test_a_snapshot_in_the_cache_of_huggingface_hub_is_read(tmp_path):
    """There each file is a link to ../../blobs/HASH."""
    snapshot, blobs = (
        checkpoint(tmp_path / "models--a--b/snapshots/0a1b"),
        tmp_path / "models--a--b/blobs",
    )
    blobs.mkdir()
    for i, path in enumerate(list(snapshot.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(f"../../blobs/{i}")
    load_params(snapshot, read_config(snapshot))
