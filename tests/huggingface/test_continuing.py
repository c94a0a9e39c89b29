"""Checkpoints of Hugging Face in Python, as initial values of training, and as the config of a run."""

import dataclasses
import json
import shutil
import subprocess
import sys
import zlib

import jax
import numpy as np
import pytest
from huggingface_checkpoints import EXPECTED, checkpoint
from running import slow, summary_of

import lm
from lm import parameters
from lm.command_line.loading import load
from lm.data import open_corpus
from lm.data.hf_tokenizer import END_OF_TEXT
from lm.data.tokenizers import CharTokenizer
from lm.hf import main as hf_main
from lm.huggingface.config_files import read_config
from lm.huggingface.tokenizer_files import to_tokenizer_json
from lm.huggingface.weights import load_params
from lm.parallel.mesh import make_mesh
from lm.system.errors import UserError
from lm.train import main as train_main
from lm.training import warm_start as module
from lm.training.warm_start import warm_start
from lm.workdir.saved_run import check_init_from

TEXT = "abcdefghi" * 40


@pytest.fixture
def model_dir(tmp_path):
    """Return the stored Llama with a tokenizer of the letters a to i and an end of text."""
    directory = checkpoint(tmp_path / "llama")
    spec = json.loads(to_tokenizer_json(CharTokenizer("abcdefghi")))
    end = {"id": 9, "content": END_OF_TEXT, "special": True}
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (directory / "tokenizer.json").write_text(json.dumps(spec | {"added_tokens": [end | off]}))
    (tmp_path / "text.txt").write_text(TEXT)
    return directory


def prepared(directory, *overrides: str):
    """Return the resolved config of hf:DIR and its corpus."""
    source, cache = f"text:{directory.parent / 'text.txt'}", str(directory.parent / "cache")
    config = load(
        f"hf:{directory}",
        [f"data.source={source}", f"data.cache_dir={cache}", *overrides],
        note=str,
    )
    return parameters.resolve(config, config.model.vocab_size), open_corpus(config.data, say=str)


def read(directory, *overrides: str):
    """Return the warm start of hf:DIR from DIR, and what was printed."""
    lines = []
    found = warm_start(*prepared(directory, f"init_from={directory}", *overrides), lines.append)
    return found, "\n".join(lines)


# lm.load


def test_a_checkpoint_is_a_trained_model(model_dir):
    run = lm.load(model_dir)
    assert (run.path, run.step, run.seq_len, run.config) == (
        model_dir,
        0,
        16,
        read_config(model_dir),
    )
    assert parameters.flat(run.params)["layers/attention/w_q_DHK"].shape == (2, 8, 2, 6)
    assert run.encode(f"ab{END_OF_TEXT}").tolist() == [0, 1, 9]  # on for imported models
    assert run.with_special_tokens(False).tokenizer.special_tokens == ()


@pytest.mark.slow
def test_the_logits_of_a_checkpoint_are_those_of_transformers(model_dir):
    run, expected = lm.load(model_dir), EXPECTED["llama"]
    np.testing.assert_allclose(run.logits(expected["ids"])[-1], expected["logits"], atol=1e-5)


def test_a_checkpoint_without_tokenizer_has_logits_of_ids_only(tmp_path):
    run = lm.load(checkpoint(tmp_path / "llama"))
    with pytest.raises(UserError, match="this model has no tokenizer"):
        run.generate("abc")


def test_a_damaged_checkpoint_is_an_error_and_has_no_steps(model_dir):
    with pytest.raises(UserError, match="is a checkpoint of Hugging Face, which has no step 3"):
        lm.load(model_dir, 3)
    checkpoint(model_dir, hidden_size=10**6)
    with pytest.raises(UserError, match="has shape"):
        lm.load(model_dir)
    (model_dir / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        lm.load(model_dir)


# config.init_from


def test_all_parameters_are_loaded_bit_for_bit(model_dir):
    found, printed = read(model_dir)
    expected = parameters.flat(load_params(model_dir, read_config(model_dir)))
    assert found.values.keys() == expected.keys()
    assert all(np.array_equal(found.values[path], expected[path]) for path in expected)
    assert printed.splitlines()[0] == f"parameters of {model_dir} (Hugging Face):"
    assert printed.splitlines()[2:] == ["  newly initialized: -", "  not used: -"]


def test_switches_may_change_and_everything_that_changes_is_reported(model_dir):
    switches = [
        "norm=layer",
        "qk_norm=true",
        "ffn=mlp",
        "rope_theta=500",
        "rope_pairing=adjacent",
        "dropout=0.1",
    ]
    switches += ["n_kv_heads=2"]
    found, printed = read(
        model_dir, *(f"model.{switch}" for switch in switches), "model.param_dtype=bfloat16"
    )
    lines = {line.partition(":")[0].strip(): line for line in printed.splitlines()}
    assert "layers/attention_norm/bias_D" in lines["newly initialized"]
    assert "layers/attention/q_scale_K" in lines["newly initialized"]
    assert "layers/attention/w_k_DGK (2, 8, 1, 6) -> (2, 8, 2, 6)" in lines["newly initialized"]
    assert "layers/ffn/w_gate_DF" in lines["not used"]
    assert "layers/attention_norm/scale_D" in lines["loaded"]
    for difference in (
        "norm rms -> layer",
        "rope_theta 10000.0 -> 500.0",
        "rope_pairing halves -> adjacent",
    ):
        assert difference in lines["config.model differs"]
    assert "dropout" not in lines["config.model differs"]
    assert {str(x.dtype) for x in found.values.values()} == {"bfloat16"}


def test_special_tokens_may_be_switched_off(model_dir):
    assert "newly initialized: -" in read(model_dir, "data.special_tokens=false")[1]


def test_another_tokenizer_is_an_error_and_a_missing_one_a_warning(model_dir):
    with pytest.raises(
        UserError, match=r"llama: it has another tokenizer; use config.data.tokenizer = hf:.*json$"
    ):
        read(model_dir, "data.tokenizer=char", "data.special_tokens=false")
    (model_dir / "tokenizer.json").unlink()
    _, printed = read(model_dir, "data.tokenizer=char")
    assert printed.startswith(
        f"WARNING: cannot check that {model_dir} has the tokenizer of the data\n"
    )


SETTINGS = {
    "chat_template.jinja": "{{ messages }} and é\n",
    "generation_config.json": '{"bos_token_id": 8, "eos_token_id": [9, 7], "top_k": 20}',
    "tokenizer_config.json": '{"model_max_length": 16, "chat_template": "x"}',
}


@pytest.fixture
def mistral_dir(model_dir):
    """Return a Mistral without windows, which exports as llama unless something says where it came
    from.
    """
    checkpoint(model_dir, "mistral", bos_token_id=8)
    fields = json.loads((model_dir / "config.json").read_text()) | {"sliding_window": None}
    (model_dir / "config.json").write_text(json.dumps(fields))
    for name, text in SETTINGS.items():
        (model_dir / name).write_text(text)
    return model_dir


@pytest.mark.parametrize("source", ["llama", slow("imported")])
def test_a_continued_model_is_exported_as_what_it_came_from(source, mistral_dir, tmp_path, command):
    if source == "imported":
        assert command(hf_main, "import", mistral_dir, "--workdir", tmp_path / "imported")[0] == 0
    keys = {
        "data.source": f"text:{tmp_path / 'text.txt'}",
        "init_from": tmp_path / source,
        "train.seq_len": 8,
    }
    keys |= {
        "eval.sample_prompt": "a",
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
    }
    run = [
        f"--config=hf:{mistral_dir}",
        *(f"--config.{name}={x}" for name, x in keys.items()),
        "--workdir=run",
    ]
    for steps in (1, 2):  # the second start resumes the run, and reads nothing from `source`
        code, output = command(train_main, *run, f"--config.train.steps={steps}", "--resume")
        assert code == 0, output
    assert command(hf_main, "export", "--workdir=run", "--output=out", "--step=latest")[0] == 0
    assert {name: (tmp_path / "out" / name).read_text() for name in SETTINGS} == SETTINGS
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert (fields["model_type"], fields["bos_token_id"], fields["eos_token_id"]) == (
        "mistral",
        8,
        [9, 7],
    )
    assert lm.load("run").tokenizer.stop_ids >= {9, 7}


def test_settings_of_a_checkpoint_without_the_tokenizer_of_the_data_are_not_kept(mistral_dir):
    assert read(mistral_dir)[0].settings.keys() == {"config.json", *SETTINGS}
    (mistral_dir / "tokenizer.json").unlink()
    assert read(mistral_dir, "data.tokenizer=char")[0].settings == {}


def test_a_model_without_a_common_parameter_is_an_error_before_the_weights_are_read(
    model_dir, monkeypatch
):
    monkeypatch.setattr(module, "read_params", None)
    with pytest.raises(UserError, match="no parameter has the name and shape"):
        read(model_dir, "model.d_model=24", "model.d_head=2", "model.d_ff=6")


def test_a_directory_that_cannot_be_read_is_an_error_before_jax_is_imported(model_dir):
    config, _ = prepared(model_dir, f"init_from={model_dir}")
    check_init_from(config, None)
    spoils = {
        "model_type is 'mamba'": lambda d: checkpoint(d, model_type="mamba"),
        "rms_norm_eps": lambda d: checkpoint(d, rms_norm_eps="small"),
        "holds no checkpoints; give the directory of a run, or of a checkpoint of Hugging "
        "Face": shutil.rmtree,
    }
    for message, spoil in spoils.items():
        spoil(model_dir)
        with pytest.raises(UserError, match=rf"^config.init_from: .*{message}"):
            check_init_from(config, None)


def test_processes_compare_what_they_read(model_dir, monkeypatch):
    compared = []
    config, corpus = prepared(model_dir, f"init_from={model_dir}")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        module.processes, "from_first", lambda function, *arguments: function(*arguments)
    )
    monkeypatch.setattr(module.processes, "check_equal", lambda what, text: compared.append(text))
    warm_start(config, corpus, str)
    embedding = parameters.flat(load_params(model_dir, config))["embedding"]
    assert f"'embedding': {zlib.crc32(embedding.tobytes())}" in compared[0]


def test_on_a_mesh_parameters_get_the_models_shardings(model_dir):
    with jax.set_mesh(make_mesh({"replica": 1, "fsdp": 1, "tensor": 1, "sequence": 1})):
        found, _ = read(model_dir)
    assert {type(x.sharding).__name__ for x in found.values.values()} == {"NamedSharding"}
    assert "tensor" in found.values["layers/attention/w_q_DHK"].sharding.spec


@pytest.mark.slow
def test_on_eight_devices_a_run_starts_from_the_same_parameters(
    bench, model_dir, tmp_path, monkeypatch
):
    data = [f"--config.data.source=text:{tmp_path / 'text.txt'}", "--config.eval.sample_prompt=a"]
    run = [
        f"--config=hf:{model_dir}",
        f"--config.init_from={model_dir}",
        *data,
        "--config.train.steps=0",
    ]
    losses = {}
    for n in (1, 8):
        monkeypatch.setitem(bench.env, "JAX_NUM_CPU_DEVICES", str(n))
        command = [
            sys.executable,
            "-m",
            "lm.train",
            *run,
            f"--config.mesh.fsdp={n}",
            f"--workdir={tmp_path / str(n)}",
        ]
        done = subprocess.run(
            command, cwd=bench.base, env=bench.env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        losses[n] = summary_of(tmp_path / str(n))["val_loss"]
    assert losses[8] == pytest.approx(losses[1], rel=1e-6)


# --config hf:DIR


def test_the_config_of_an_architecture_takes_overrides(model_dir):
    config = load(f"hf:{model_dir}", ["train.steps=7", "model.norm=layer"], note=str)
    expected = dataclasses.replace(read_config(model_dir).model, norm="layer")
    assert dataclasses.asdict(config.model) == dataclasses.asdict(expected)
    assert (config.name, config.train.seq_len, config.train.steps) == ("llama", 16, 7)
    assert (config.data.tokenizer, config.data.special_tokens) == (
        f"hf:{model_dir}/tokenizer.json",
        True,
    )
    checkpoint(model_dir, dtype="bfloat16")
    m = load(f"hf:{model_dir}", []).model
    # small updates would be lost in bfloat16
    assert (m.param_dtype, m.compute_dtype) == (
        "float32",
        "bfloat16",
    )


def test_a_missing_architecture_is_an_error(model_dir):
    messages = {
        "hf:{}/absent": "^--config: .*absent: there is no such directory",
        "hf:{}": "has no config.json",
        "{}/llama": r"there is no file .*; did you mean hf:.*/llama\?",
    }
    for path, message in messages.items():
        with pytest.raises(UserError, match=message):
            load(path.format(model_dir.parent), [])


def test_training_an_architecture_needs_data(model_dir, command):
    """The default would be Tiny Shakespeare; --plan and --print_config need no data."""
    code, output = command(
        train_main, f"--config=hf:{model_dir}", f"--config.init_from={model_dir}"
    )
    assert (code, "config.data.source" in output, "--config.data.source=text:" in output) == (
        2,
        True,
        True,
    )


def test_an_architecture_is_planned_without_its_weights(command, model_dir):
    (model_dir / "tokenizer.json").unlink()
    checkpoint(model_dir, dtype="bfloat16")
    (model_dir / "model.safetensors").unlink()
    code, output = command(train_main, f"--config=hf:{model_dir}", "--plan", "--device=h100:8")
    assert (code, "8 x h100" in output) == (0, True), output
    assert "batch size, steps and the rest have their defaults" in output
