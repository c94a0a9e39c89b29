import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import Config, flatten, from_dict, schema, to_dict
from lm.config.loading import load
from lm.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def config_file(tmp_path):
    """Writes a config file whose get_config() runs the given lines; returns its path."""

    def write(*lines):
        path = tmp_path / "experiment.py"
        body = "".join(f"    {line}\n" for line in lines)
        path.write_text(
            "from lm.config import default_config\n\n\ndef get_config():\n"
            f"    config = default_config()\n{body}    return config\n"
        )
        return str(path)

    return write


def problems(path, *overrides):
    with pytest.raises(UserError) as caught:
        load(path, list(overrides))
    return caught.value.problems


def the_problem(path, *overrides):
    found = problems(path, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_every_key_says_what_it_means():
    for name, (type_, field) in schema().items():
        assert len(field.metadata["doc"]) > 3, name
        assert field.default is not dataclasses.MISSING, name
        assert type_ is not typing.Any, name


def test_defaults_pass_their_own_checks(config_file):
    assert load(config_file(), []) == Config() == from_dict({})


def test_all_kinds_of_mistakes_are_told_at_once(config_file):
    path = config_file(
        "config.model.d_modl = 64",
        "config.modle.d_model = 64",
        "config.train.seed = -1",
        "config.optimizer.learning_rate = float('inf')",
        "config.data.splits = (0.5, 1.5)",
    )
    overrides = [
        "tain.steps=3",
        "train.batchsize=8",
        "model.n_layers=two",
        "model.norm=rsm",
        "model.tie_embeddings=yes",
    ]
    overrides += ["data.tokenizer=bpe", "train.seq_len", "optimizer.warmup_steps=5000", "model.n_heads=3"]
    expected = [
        ("model.d_modl", "unknown key", "d_model"),
        ("modle.d_model", "unknown section", "model"),
        ("train.seed", "-1", ">= 0"),
        ("optimizer.learning_rate", "inf", "finite"),
        ("data.splits", "1.5", "<= 1"),
        ("tain.steps", "unknown section", "train"),
        ("train.batchsize", "unknown key", "batch_size"),
        ("model.n_layers", "'two'", "int"),
        ("model.norm", "'rsm'", "rms"),
        ("model.tie_embeddings", "'yes'", "bool"),
        ("data.tokenizer", "'bpe'", "bpe:SIZE"),
        ("train.seq_len", "equals sign", "--config.train.seq_len=VALUE"),
        ("optimizer.warmup_steps", "5000", "less than 1000"),
        ("model.d_model", "256 is not divisible by n_heads = 3", "n_heads = 2"),
    ]
    found = problems(path, *overrides)
    assert len(found) == len(expected), "\n".join(found)
    for name, why, suggestion in expected:
        (line,) = [line for line in found if line.startswith(f"config.{name}:")]
        assert why in line, line
        assert suggestion in line.partition(":")[2], line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.d_model=0", "0 is out of range; it must be >= 1"),
        ("model.dropout=1.0", "1.0 is out of range; it must be < 1"),
        ("optimizer.learning_rate=0", "0.0 is out of range; it must be > 0"),
        ("optimizer.decay_fraction=1.1", "it must be <= 1"),
        ("optimizer.learning_rate=nan", "'nan' is not a float"),
        ("optimizer.learning_rate=1e999", "not a finite number"),
        ("model.d_model=1e3", "1000.0 is not an int"),
        ("model.d_model=True", "True is not an int"),
        ("model.d_ff=wide", "'wide' is not an int or none"),
        ("model.window_pattern=(4,-1)", "-1 is out of range"),
        ("model.window_pattern=()", "empty"),
        ("model.window_pattern=(True,)", "True is not an int"),
        ("train.on_nonfinite=ignore", "not one of stop, skip"),
        ("data.source=tfsd:tiny", "did you mean tfds:NAME?"),
        ("data.source=text:", "not one of"),
        ("data.tokenizer=bpe:big", "not one of"),
        ("data.tokenizer=char:3", "not one of"),
        ("d_model=3", "did you mean model.d_model?"),
        ("model=3", "model is a section"),
        ("model.steps=3", "did you mean train.steps?"),
        ("optimizer.qqq=1", "optimizer has name, learning_rate"),
        ("wibble.steps=3", "there are checkpoint, data, eval, log, mesh, model, optimizer, train"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(config_file, override, expected):
    line = the_problem(config_file(), override)
    assert line.startswith("config." + override.partition("=")[0] + ":")
    assert expected in line


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("model.d_model=100 model.n_heads=8", "model.d_model: 100 is not divisible by n_heads = 8"),
        ("model.d_head=7", "model.d_head: 7 is odd, and RoPE rotates pairs; use 8"),
        ("model.d_model=12", "model.d_head: 3 is odd"),
        ("model.d_model=9 model.n_heads=3 model.positions=sinusoidal", "model.d_model: 9 is odd"),
        ("model.n_kv_heads=3", "model.n_kv_heads: 3 does not divide n_heads = 4; use one of [1, 2, 4]"),
        ("model.n_kv_heads=8", "model.n_kv_heads: 8 does not divide"),
        ("model.norm=layer model.norm_algorithm=running_mean model.norm_ddof=1", "model.norm_ddof: 1"),
        (
            "model.norm=layer model.d_model=1 model.n_heads=1 model.positions=none model.norm_ddof=1",
            "model.norm_ddof: 1 leaves nothing to divide by",
        ),
        (
            "model.norm=layer model.norm_algorithm=running_mean model.d_model=1 model.n_heads=1 model.positions=none",
            "model.norm_algorithm: running_mean divides by d_model - 1",
        ),
        ("model.tie_embeddings=true model.head_bias=true", "model.head_bias: true"),
        ("model.positions=learned model.max_positions=64", "model.max_positions: 64 is less than"),
        ("model.attention=xla model.attn_softcap=50", "model.attention: xla has no softcap"),
        ("model.attention=cudnn", "model.attention: cudnn needs compute_dtype = bfloat16"),
        (
            "model.attention=cudnn model.compute_dtype=bfloat16 model.scan_layers=true model.window_pattern=(64,0)",
            "model.attention: cudnn needs one window",
        ),
        ("data.splits=(0.5,0.5,0.5)", "data.splits: (0.5, 0.5, 0.5) must be three fractions"),
        ("data.splits=(0.5,0.5)", "data.splits: (0.5, 0.5) must be three fractions"),
        ("data.tokenizer=none", "data.tokenizer: none"),
        ("data.tokenizer=bpe:256", "data.tokenizer: bpe:256 is too small"),
        ("data.source=tokens:x", "data.tokenizer: char is made from text"),
        (
            "data.source=tokens:x data.tokenizer=none data.packing=documents data.order=epochs",
            "data.packing: documents needs",
        ),
        ("data.packing=documents", "data.order: crops cut across documents"),
        ("data.stride=3", "data.stride: 3 has no meaning"),
        ("train.debug=true model.scan_layers=true", "train.debug: true"),
        ("train.debug=true train.steps_per_dispatch=2", "train.steps_per_dispatch: 2"),
        ("optimizer.decay_steps=2000", "optimizer.decay_steps: 2000 is longer than train.steps = 1000"),
        ("optimizer.warmup_steps=1000", "optimizer.warmup_steps: 1000 leaves nothing"),
        ("train.profile=(5,3)", "train.profile: (5, 3) must be (first, last)"),
        ("train.profile=(5,5000)", "train.profile: (5, 5000)"),
        ("train.profile=5", "train.profile: (5,)"),
        ("eval.sample_prompt=", "eval.sample_prompt: it is empty"),
    ],
)
def test_keys_that_contradict_each_other(config_file, overrides, expected):
    assert the_problem(config_file(), *overrides.split()).startswith(f"config.{expected}")


def test_what_looks_like_a_contradiction_and_is_none(config_file):
    for overrides in (
        ["optimizer.schedule=constant", "optimizer.decay_steps=2000"],
        ["model.scan_layers=true", "model.window_pattern=(64,64,0)"],
        ["model.positions=none", "model.d_head=7"],
        ["eval.sample_prompt=", "eval.sample_tokens=0"],
        ["data.splits=(0.7,0.0,0.3)"],
    ):
        load(config_file(), overrides)


def test_a_misspelled_final_split(config_file):
    with pytest.raises(UserError, match=r"config.eval.final_splits: there is no split 'valdation'; did you mean valid"):
        load(config_file(), ["eval.final_splits=test+valdation"])


def test_wandb_that_is_not_installed_is_told_beforehand(config_file, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'lm[wandb]'" in the_problem(config_file(), "log.wandb=true")


def test_no_contradiction_follows_from_a_value_that_was_refused(config_file):
    """n_heads = 0 is out of range; that its stand-in would not divide d_model is not the user's mistake."""
    assert "out of range" in the_problem(config_file("config.model.d_model = 250"), "model.n_heads=0")


def test_values_from_the_command_line(config_file):
    c = load(
        config_file("config.model.d_ff = 100", "config.data.splits = [0.8, 0.1, 0.1]", "config.eval.every = 7"),
        [
            "model.d_ff=None", "model.window_pattern=128,0", "model.tie_embeddings=1", "log.tensorboard=False",
            "optimizer.learning_rate=1", "eval.sample_prompt=a\\nb = c", "eval.final_splits=(validation, test+train)",
            "train.profile=(2, 3)", "data.source=text:a=b", "model.embed_std=2e-2",
        ],
    )  # fmt: skip
    assert c.model.d_ff is None
    assert c.model.window_pattern == (128, 0)
    assert c.model.tie_embeddings is True
    assert c.log.tensorboard is False
    assert c.optimizer.learning_rate == 1
    assert isinstance(c.optimizer.learning_rate, float)
    assert c.eval.sample_prompt == "a\nb = c"
    assert c.eval.final_splits == ("validation", "test+train")
    assert c.train.profile == (2, 3)
    assert c.data.source == "text:a=b"
    assert c.data.splits == (0.8, 0.1, 0.1)
    assert c.eval.every == 7
    assert c.model.embed_std == 0.02
    assert hash(c) == hash(dataclasses.replace(c))  # a jit-static argument


def test_the_later_override_wins(config_file):
    assert load(config_file("config.train.steps = 5"), ["train.steps=6", "train.steps=7"]).train.steps == 7


def test_files_that_cannot_be_read(tmp_path, config_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "shakespeare.py").write_text("")
    assert "did you mean configs/shakespeare.py?" in the_problem("configs/shakespear.py")
    broken = config_file("raise RuntimeError('no such thing')")
    assert "RuntimeError: no such thing" in the_problem(broken)
    assert len(problems(broken, "train.stpes=3", "train.steps=x")) == 3
    assert "get_config" in the_problem("configs/shakespeare.py")


VALUES = {
    int: st.integers(1, 2**32 - 1),
    float: st.floats(0.001, 0.999),
    bool: st.booleans(),
    str: st.text(max_size=5),
}


@st.composite
def leaf_values(draw):
    """A dotted name with a value that the schema allows."""
    name = draw(st.sampled_from(sorted(schema())))
    type_, field = schema()[name]
    limits = field.metadata
    kind = next(t for t in (typing.get_args(type_) or (type_,)) if t is not type(None))
    if limits["choices"]:
        value = draw(st.sampled_from(limits["choices"]))
    elif limits["forms"]:
        value = draw(st.sampled_from(limits["forms"])).replace("SIZE", "300")
    elif typing.get_origin(kind or type_) is tuple or typing.get_origin(type_) is tuple:
        inner = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
        value = tuple(draw(st.lists(VALUES[inner], min_size=1, max_size=3)))
    else:
        value = draw(VALUES[kind])
        value = min(value, limits["high"]) if limits["high"] is not None else value
        value = max(value, limits["low"]) if limits["low"] is not None else value
    return name, value


@settings(max_examples=50)
@given(st.lists(leaf_values(), max_size=8))
def test_round_trip_by_way_of_json(pairs):
    nested = to_dict(Config())
    for name, value in pairs:
        section, _, leaf = name.rpartition(".")
        (nested[section] if section else nested)[leaf] = value
    config = from_dict(nested)
    for name, value in dict(pairs).items():
        assert flatten(to_dict(config))[name] == value
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_from_dict_tells_all_mistakes():
    with pytest.raises(UserError) as caught:
        from_dict({"model": {"d_model": "x", "colour": 1}, "name": 3})
    assert len(caught.value.problems) == 3


def test_no_jax_before_the_config_is_right(config_file):
    """Errors and --help must not pay two seconds for an import."""
    code = (
        "import sys\nfrom lm.config.loading import load\n"
        f"try:\n    load({config_file()!r}, ['train.steps=x'])\nexcept Exception as e:\n    print(e)\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('jax', 'flax', 'optax', 'tensorflow_datasets')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == ["config.train.steps: 'x' is not an int", "[]"]
