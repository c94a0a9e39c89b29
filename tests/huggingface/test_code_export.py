"""Models that are exported with their code in PyTorch: no key is lost, and what is written has the
equations of the config alone.

The modelling file is compared with logits that PyTorch computed with it
(tests/references/make_code_export.py), and where torch is installed with PyTorch itself.
"""

import ast
import dataclasses
import hashlib
import json
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from models_with_code import MODELS
from running import ROOT
from tiny import redrawn, tiny

from lm import model, parameters
from lm.command_line import exchange
from lm.config import ModelConfig
from lm.hf import main
from lm.huggingface import code_export
from lm.huggingface.code_export import WITH_ANY_VALUE, WITH_VALUES
from lm.huggingface.families import WITHOUT_EFFECT
from lm.huggingface.safetensors_files import TensorFiles
from lm.huggingface.specialized import names_of_keys
from lm.huggingface.writing import write_checkpoint
from lm.system.errors import UserError

STORED = json.loads((ROOT / "tests/references/code_export.json").read_text())
KEYS = {field.name: field for field in dataclasses.fields(ModelConfig)}
# Keys that the template reads under another name, or as part of another one.
PART_OF = {
    "residual_multiplier": "branches",
    "loops": "applied_layers",
    "loop_layers": "applied_layers",
    "parametrization": "logit_divisor",
}
# most of the ideas; the rest is slow
FAST = ("the defaults", "pair 0", "pair 6", "loops")
logits = jax.jit(model.logits, static_argnums=1)


def code_of(name: str) -> str:
    return code_export.modeling_file(tiny(model=MODELS[name]))[0]


# ---- Keys ----------------------------------------------------------------------------------------


def test_every_key_is_translated_or_without_effect_or_refused_if_it_is_changed():
    template = names_of_keys(code_export.TEMPLATE.read_text())
    same_function = {"norm_algorithm"}
    for key, field in KEYS.items():
        declared = [key in keys for keys in (WITH_ANY_VALUE, WITH_VALUES, WITHOUT_EFFECT)]
        if key.startswith("mup_base"):
            continue  # part of attn_scale and logit_divisor
        if not any(declared):
            value = not field.default if isinstance(field.default, bool) else 3
            c = dataclasses.replace(tiny().model, **{key: value})
            assert any(text.startswith(f"config.model.{key}: ") for text in code_export.problems(c))
            continue
        assert sum(declared) == 1, f"{key} is in several tables of code_export.py"
        if key not in WITHOUT_EFFECT | same_function:
            assert PART_OF.get(key, key) in template, f"modeling.py does not read {key}"
        if key in WITH_VALUES:
            assert set(WITH_VALUES[key]) <= {*field.metadata["choices"]}
    assert not (WITH_ANY_VALUE | WITH_VALUES.keys()) - KEYS.keys()


def test_every_choice_of_every_key_is_in_a_model_that_is_compared_or_refused():
    compared = {(key, value) for keys in MODELS.values() for key, value in keys.items()}
    compared |= {("mixers", mixer) for keys in MODELS.values() for mixer in keys.get("mixers", ())}
    for key in KEYS.keys() - WITHOUT_EFFECT:
        for choice in KEYS[key].metadata["choices"] or ():
            if choice in (KEYS[key].default, *np.atleast_1d(KEYS[key].default)):
                continue
            if choice not in WITH_VALUES.get(key, ()):
                value = (choice,) if isinstance(KEYS[key].default, tuple) else choice
                config = tiny(model={"norm": "layer", key: value})
                with pytest.raises(UserError, match=rf"config.model.{key}: \(?{choice}"):
                    code_export.export(config)
            elif (key, choice) != ("norm_algorithm", "chan"):
                assert (key, choice) in compared
    changed = {key for key, _ in compared} - {"scan_layers"}
    numbers = {"rope_theta", "rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast"}
    numbers |= {"rope_beta_slow", "rope_amplitude", "norm_eps", "experts_per_token"}
    sizes = {"d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size", "max_positions"}
    assert not WITH_ANY_VALUE - changed - numbers - sizes


@dataclasses.dataclass(frozen=True)
class Changed(ModelConfig):
    """A schema with keys that somebody added, which the template does not know."""

    gate: bool = False
    mix: float = 1.0


def test_keys_and_choices_that_somebody_added_are_refused_unless_they_have_their_defaults():
    config = tiny()

    def with_keys(**keys):
        c = Changed(**dataclasses.asdict(config.model) | keys)
        return dataclasses.replace(config, model=c)

    code_export.export(with_keys())
    with pytest.raises(UserError) as error:
        code_export.export(with_keys(gate=True, mix=2.0, activation="mish"))
    assert len(error.value.problems) == 4
    for problem in ("gate: true", "mix: 2.0", "activation: mish"):
        assert f"config.model.{problem}" in str(error.value)


def test_a_parameter_that_the_code_does_not_have_is_refused(monkeypatch):
    table = parameters.parameter_table
    gate = parameters.Parameter((16, 4, 4), "DHK", "weight", "D").stacked(range(2))
    more = {"layers/attention/w_g_DHK": gate}
    monkeypatch.setattr(
        parameters, "parameter_table", lambda c: parameters.Table("", table(c) | more)
    )
    with pytest.raises(UserError, match="no parameter layers/attention/w_g_DHK"):
        code_export.export(tiny())


# ---- The modelling file --------------------------------------------------------------------------


def test_the_code_of_the_default_model_has_its_equations_and_nothing_else():
    code = code_of("the defaults")
    assert (
        """
    def forward(self, x_BTD, here):
        h_BTD = self.attention_norm(x_BTD)
        y_BTD = self.attention(here.at("attention"), h_BTD)
        x_BTD = x_BTD + y_BTD
        h_BTD = self.ffn_norm(x_BTD)
        y_BTD = self.ffn(here.at("ffn"), h_BTD)
        x_BTD = x_BTD + y_BTD
        return x_BTD
"""
        in code
    )
    for idea in ("Mlp", "Experts", "RgLru", "convolution", "sink", "bias", "first_values", "math"):
        assert idea not in code, idea
    both = code_of("pair 4")  # token shift is off, the scalars are on
    assert "self.residual_scale * x_BTD" in both
    assert "shift" not in both


@pytest.mark.parametrize("names", [FAST, pytest.param(tuple(MODELS), marks=pytest.mark.slow)])
def test_the_code_of_a_model_is_clean_and_decides_nothing_about_the_config(names, tmp_path):
    for number, name in enumerate(names):
        code = code_of(name)
        (tmp_path / f"code_{number}.py").write_text(code)
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.If):
                names = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
                assert names != {"c"}, (name, ast.unparse(node.test))
    for command in (["check", "--select", "E,F"], ["format", "--check"]):
        arguments = [*command, "--isolated", "--line-length", "100", "--no-cache", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_weights_are_written_as_they_are(tmp_path):
    config = tiny(model={"mixers": ("latent", "attention"), "param_dtype": "bfloat16"})
    params = redrawn(config.model)
    write_checkpoint(tmp_path, config, params, code=True)
    layers = params["layers"]
    expected = {
        "embedding": params["embedding"],
        "head.w_DV": params["head"]["w_DV"],
        "layers.1.ffn.w_up_DF": layers["ffn"]["w_up_DF"][1],
        "layers.0.attention.w_down_DC": layers["latent"]["w_down_DC"][0],
        "layers.1.attention.w_q_DHK": layers["attention"]["w_q_DHK"][0],
    }
    with TensorFiles(tmp_path) as files:
        assert len(files.shapes) == 3 + 2 * 3 + 2 * 2 + 6 + 4
        for name, value in expected.items():
            assert files.read(name).dtype == value.dtype
            np.testing.assert_array_equal(files.read(name), value)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in MODELS]
)
def test_the_model_computes_the_stored_logits_of_its_code(name):
    digest = hashlib.sha256(code_of(name).encode()).hexdigest()[:16]
    advice = "the code differs from what PyTorch ran: tests/references/make_code_export.py"
    assert digest == STORED[name]["code"], advice
    config = tiny(model=MODELS[name])
    ids = np.random.default_rng(0).integers(0, 19, (1, 8))
    ours_V = logits(redrawn(config.model), config.model, ids)[0, -1]
    np.testing.assert_allclose(ours_V, STORED[name]["logits"], rtol=1e-5, atol=1e-4)


# ---- The command ---------------------------------------------------------------------------------


def test_the_command_exports_a_model_that_no_family_has_or_says_what_the_code_lacks(
    train, tmp_path, command, monkeypatch
):
    workdir = tmp_path / "run"
    code, output = train(workdir, "--config.model.query_scale=learned", "--config.train.steps=1")
    assert code == 0, output
    export = ("export", "--workdir", workdir, "--output", tmp_path / "out")
    code, output = command(main, *export)
    assert (code, "--code" in output) == (2, True), output
    with monkeypatch.context() as patch:
        patch.setitem(WITH_VALUES, "query_scale", ("none", "log_n"))
        code, output = command(main, *export, "--code")
    assert (code, "config.model.query_scale: learned" in output) == (2, True), output
    assert not (tmp_path / "out").exists()
    code, output = command(main, *export, "--code")
    assert (code, "lm.hf check" in output) == (0, True), output
    assert "query_scale = learned" in (tmp_path / "out/README.md").read_text()
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert fields["auto_map"]["AutoModelForCausalLM"] == "modeling_lm.LanguageModel"
    code, output = command(main, "import", tmp_path / "out", "--workdir", tmp_path / "again")
    assert (code, "use the run that it came from" in output) == (2, True), output


def test_check_runs_no_code_but_its_own(tmp_path):
    config = tiny()
    write_checkpoint(tmp_path, config, redrawn(config.model), code=True)
    run = types.SimpleNamespace(config=config, path="run")
    exchange.require_own_code(tmp_path, run)
    fields = tmp_path / "config.json"
    fields.write_text(fields.read_text().replace("modeling_lm.", "other."))
    with pytest.raises(UserError, match="is not the code of run"):
        exchange.require_own_code(tmp_path, run)
    fields.write_text(fields.read_text().replace("other.", "modeling_lm."))
    with (tmp_path / "modeling_lm.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(UserError, match="is not the code of run"):
        exchange.require_own_code(tmp_path, run)
