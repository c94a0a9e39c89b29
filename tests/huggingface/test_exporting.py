"""Writing checkpoints: what is read back is the same model, and models without an equivalent are
refused.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from huggingface_checkpoints import EXPECTED, RANDOM, checkpoint, drawn
from tiny import redrawn, tiny
from tokenizers import Tokenizer

from lm import model, parameters
from lm.config import ModelConfig
from lm.data import tokenizers
from lm.huggingface.config_files import export_fields, normalized, read_config
from lm.huggingface.families import USUAL
from lm.huggingface.safetensors_files import TensorFiles
from lm.huggingface.tokenizer_files import to_tokenizer_json
from lm.huggingface.weights import load_params
from lm.huggingface.writing import write_checkpoint
from lm.system.errors import UserError

GPT2 = {
    "norm": "layer", "ffn": "mlp", "activation": "gelu_tanh", "positions": "learned", "n_kv_heads": 4,
    "attn_bias": True, "ffn_bias": True, "tie_embeddings": True,
}  # fmt: skip
GEMMA2 = {
    "norm_placement": "sandwich",
    "attn_softcap": 5.0,
    "embed_scale": 4.0,
    "tie_embeddings": True,
}
MUP = {"parametrization": "mup", "mup_base_d_model": 5, "mup_base_d_head": 3}
# which GPT-2 always has; missing ones become zero
BIASES = {
    "attn_bias",
    "attn_out_bias",
    "ffn_bias",
    "norm_bias",
}
logits = jax.jit(model.logits, static_argnums=1)


def written_and_read(config, directory):
    """Return the config and the parameters of an exported and imported model, and the parameters it
    had.
    """
    # JAX would compile a slice for each shape, here and below
    params = jax.device_get(redrawn(config.model))
    directory.mkdir()
    write_checkpoint(directory, config, params)
    found = read_config(directory)
    return found, jax.device_get(load_params(directory, found)), params


def check_logits(config, directory):
    """Check that an exported and imported model computes the same."""
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers=True))
    found, again, params = written_and_read(config, directory)
    ids = np.random.default_rng(0).integers(0, 19, (2, 8))
    c = dataclasses.replace(found.model, scan_layers=True)
    np.testing.assert_allclose(logits(again, c, ids), logits(params, config.model, ids), atol=1e-5)
    return found


@pytest.mark.parametrize("family", RANDOM)
def test_an_exported_model_is_read_back_as_the_same_model(family, tmp_path):
    for seed in range(2):
        config = tiny(model=drawn(family, seed))
        found, again, _ = written_and_read(config, tmp_path / str(seed))
        assert export_fields(config)[0].model_type == family
        differences = dict(normalized(config.model).items() ^ normalized(found.model).items())
        assert differences.keys() <= (BIASES if family == "gpt2" else set())
        assert found.train.seq_len == config.train.seq_len
        (tmp_path / f"{seed} again").mkdir()
        write_checkpoint(tmp_path / f"{seed} again", found, again)
        with (
            TensorFiles(tmp_path / str(seed)) as one,
            TensorFiles(tmp_path / f"{seed} again") as two,
        ):
            assert one.shapes == two.shapes
            for tensor in one.shapes:
                # Gains of Gemma are stored minus 1, which rounds those below 1/2 or above 2.
                atol = 1.2e-7 * (family == "gemma2")
                np.testing.assert_allclose(one.read(tensor), two.read(tensor), rtol=0, atol=atol)


@pytest.mark.slow
def test_permuted_features_zero_biases_and_folded_factors_do_not_change_the_logits(tmp_path):
    without_biases = dict.fromkeys(BIASES - {"attn_out_bias"}, False)
    found = check_logits(
        tiny(model=GPT2 | without_biases | {"tie_embeddings": False}), tmp_path / "gpt2"
    )
    assert found.model.attn_bias
    found = check_logits(tiny(model={"d_head": 6, "norm_eps": 1e-3}), tmp_path / "llama")
    assert found.model.rope_pairing == "halves"
    folded = {
        "llama, mup": MUP,
        "qwen3": {"attn_scale": 0.3, "embed_scale": 3.0, "attn_bias": True, "qk_norm": True},
        "qwen3, mup": MUP | {"qk_norm": True, "tie_embeddings": True},
        "gpt2, mup": GPT2 | MUP,
    }
    for name, keys in folded.items():
        m = check_logits(tiny(model=keys), tmp_path / name).model
        assert (m.parametrization, m.attn_scale, m.embed_scale) == ("standard", None, 1.0)


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float32") for case in EXPECTED), ("llama", "bfloat16")]
)
def test_an_imported_checkpoint_is_exported_with_identical_weights(case, dtype, tmp_path):
    directory, again = checkpoint(tmp_path / "from", case, dtype=dtype), tmp_path / "to"
    config = read_config(directory)
    again.mkdir()
    write_checkpoint(again, config, jax.device_get(load_params(directory, config)))
    assert read_config(again).model == config.model
    with TensorFiles(directory) as one, TensorFiles(again) as two:
        assert one.shapes == two.shapes
        for tensor in one.shapes:
            assert dtype == "float32" or two.read(tensor).dtype == one.read(tensor).dtype
            np.testing.assert_array_equal(one.read(tensor).astype(np.float32), two.read(tensor))


@dataclasses.dataclass(frozen=True)
class Changed(ModelConfig):
    """A schema with keys that somebody added, as docs/changing-the-model.md describes, but no
    family knows.
    """

    gate: bool = False
    mix: float = 1.0


def changed(**keys):
    config = tiny()
    return dataclasses.replace(config, model=Changed(**dataclasses.asdict(config.model) | keys))


REFUSED = [
        ({"norm_placement": "post"}, ["norm_placement: post"]),
        ({"embed_scale": 2.0, "tie_embeddings": True, "qk_norm": True}, ["embed_scale: 2.0; qwen3 has 1.0"]),
        ({"ffn": "mlp", "positions": "none"}, ["ffn: mlp; llama has glu", "positions: none; llama has rope"]),
        (GPT2 | {"norm_algorithm": "running_mean"}, ["norm_algorithm: running_mean; gpt2 has two_pass"]),
        (GPT2 | {"n_kv_heads": 2}, ["n_kv_heads: 2; gpt2 has 4"]),
        (GPT2 | {"d_head": 6}, ["d_head: 6; gpt2 has 4"]),
        ({"rope_width": 2, "attn_bias": True}, ["rope_width: 2; llama has none"]),
        ({"qk_norm": True, "window_pattern": (3, 2)}, ["window_pattern: (3, 2); qwen3 has (3,)"]),
        (GEMMA2 | {"d_model": 18, "d_head": 4, "embed_scale": 18**0.5}, ["18 is not divisible by n_heads, as gemma2"]),
        ({"rope_scaling": "dynamic", "rope_original_max_positions": 4}, ["max_positions: 8 is more"]),
        ({"head_bias": True}, ["head_bias: true; llama has false"]),
        (GEMMA2 | {"embed_scale": 1.0}, ["embed_scale: 1.0; gemma2 has 4.0"]),
        (GEMMA2 | {"attn_scale": 0.3}, ["attn_scale: 0.3; gemma2 has 0.3015"]),
        # one more function and choice of the schema
        ({"activation": "mish"}, ["activation: mish"]),
    ]  # fmt: skip


def test_models_without_an_equivalent_are_refused_with_all_reasons():
    for given, reasons in REFUSED:
        with pytest.raises(UserError, match="no supported family") as error:
            export_fields(tiny(model=given))
        assert len(error.value.problems) == 1 + len(reasons)
        assert all(reason in str(error.value) for reason in reasons)


def test_keys_that_somebody_added_are_refused_unless_they_have_their_defaults(monkeypatch):
    for name in ("gate", "mix"):
        monkeypatch.setitem(USUAL, name, getattr(Changed, name))
    export_fields(changed())
    with pytest.raises(UserError, match="no supported family") as error:
        export_fields(changed(gate=True, mix=2.0))
    assert "gate: true; llama has false" in str(error.value)
    assert "mix: 2.0; llama has 1.0" in str(error.value)


def test_a_parameter_that_no_tensor_claims_is_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
    table = parameters.parameter_table
    gate = {
        "layers/attention/w_g_DHK": parameters.Parameter((16, 4, 4), "DHK", "weight", "D").stacked(
            range(2)
        )
    }
    monkeypatch.setattr(
        parameters, "parameter_table", lambda c: parameters.Table("", table(c) | gate)
    )
    config = tiny()
    with pytest.raises(UserError, match="llama has no tensor for layers/attention/w_g_DHK"):
        write_checkpoint(tmp_path, config, redrawn(config.model))
    assert not list(tmp_path.iterdir())


TEXT = "The café’s  2 dogs\n\tran — “so far”! 日本語 😀 e\u0301 don't x-ray"


def test_exported_tokenizers_give_the_same_ids_and_text(tmp_path):
    config = tiny(model={"vocab_size": 300})
    for spec in ("byte", "char", "word", "bpe:300"):
        ours = tokenizers.make(spec, [TEXT])
        (folder := tmp_path / spec).mkdir()
        files = write_checkpoint(folder, config, redrawn(config.model), ours)
        theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = theirs.encode(TEXT, add_special_tokens=False).ids
        assert (ids, theirs.decode(ids, skip_special_tokens=False)) == (
            ours.encode(TEXT).tolist(),
            TEXT,
        )
        assert {
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "config.json",
        } <= set(files)
        for name in ("generation_config.json", "config.json"):
            assert json.loads((folder / name).read_text())["eos_token_id"] == ours.end_of_text
    for ours in (
        tokenizers.CharTokenizer("hello", unk=True),
        tokenizers.WordTokenizer(["hello"], unk=True),
    ):
        theirs = Tokenizer.from_str(to_tokenizer_json(ours))
        assert theirs.encode("hello yell").ids == ours.encode("hello yell").tolist()
