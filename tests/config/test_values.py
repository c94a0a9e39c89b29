"""One key at a time: what a value may be, and how a wrong one is reported."""

import argparse
import itertools

import pytest

from lm.command_line.loading import load
from lm.config import schema
from lm.config.schema import key
from lm.config.values import parse, path_argument, show

WRONG = [
    ("model.d_model=0", "0 is out of range; it must be >= 1"),
    ("model.dropout=1.0", "1.0 is out of range; it must be < 1"),
    ("optimizer.learning_rate=0", "0.0 is out of range; it must be > 0"),
    ("optimizer.decay_fraction=1.1", "it must be <= 1"),
    ("optimizer.learning_rate=nan", "'nan' is not a float"),
    ("optimizer.learning_rate=1e999", "not a finite number"),
    ("optimizer.eps=1e-60", "1e-60 is 0 in float32; use at least 1.2e-38"),
    ("model.d_model=1e3", "1000.0 is not an int"),
    ("model.d_model=True", "True is not an int"),
    ("model.tie_embeddings=yes", "'yes' is not a bool"),
    ("train.seed=-1", "-1 is out of range; it must be >= 0"),
    ("model.d_ff=wide", "'wide' is not an int or none"),
    ("model.window_pattern=(4,-1)", "-1 is out of range"),
    ("model.window_pattern=()", "empty"),
    ("model.window_pattern=(True,)", "True is not an int"),
    ("train.on_nonfinite=ignore", "not one of stop, skip"),
    ("data.tokenizer=bpe:big", "not one of"),
    ("data.tokenizer=char:3", "not one of"),
    ("data.tokenizer=bpe:1" + "0" * 23, "not one of"),
    ("data.tokenizer=bpe:" + "9" * 5000, "not one of"),
    ("data.tokenizer=bpe:٣٠٠", "not one of"),
    ("name=caf\udce9", "has a character that is not text"),
    ("data.source=text:\0", "has a character that is not text"),
    ("d_model=3", "did you mean model.d_model?"),
    ("model=3", "model is a section"),
    ("model.steps=3", "did you mean train.steps?"),
    ("steps=3", "did you mean train.steps?"),
    (
        "data.mixture=(('web','text:web',1))",
        "('web', 'text:web', 1) is not a tuple of tuples; write one as ((...),)",
    ),
    ("data.mixture_stages=(3,1.0,2.0)", "(3, 1.0, 2.0) is not a tuple of tuples"),
    ("optimizer.qqq=1", "optimizer has name, learning_rate"),
    ("qqq=1", "there are name, notes, init_from, checkpoint, data"),
    ("wibble.steps=3", "there are checkpoint, data, eval, log, mesh, model, optimizer, train"),
]


def test_a_key_whose_default_is_an_empty_tuple_is_refused_where_it_is_declared():
    with pytest.raises(ValueError, match="use None"):
        key((), "some ids")


def test_a_wrong_value_is_reported_with_its_key_and_what_would_be_right(config_file, the_problem):
    path = config_file()
    for override, expected in WRONG:
        line = the_problem(path, override)
        assert line.startswith("config." + override.partition("=")[0] + ":"), line
        assert expected in line


SOURCES = [
    ("/data/my.txt", "did you mean text:/data/my.txt?"),
    ("novel.txt", "did you mean text:novel.txt?"),
    ("./novels", "did you mean text:./novels?"),
    ("dump/part.jsonl", "did you mean jsonl:dump/part.jsonl?"),
    ("dump/part.parquet", "did you mean parquet:dump/part.parquet?"),
    ("text:", "not one of tfds:NAME, text:PATH"),
    ("shards/train.bin", "did you mean tokens:shards?"),
    ("tfsd:tiny", "did you mean tfds:NAME?"),
]


def test_a_source_without_its_kind_is_reported_with_the_right_form(config_file, the_problem):
    path = config_file()
    for source, advice in SOURCES:
        assert advice in the_problem(path, f"data.source={source}")


ABSURD = [
    "model.d_model={}", "model.n_heads={}", "train.seed={}", "train.steps=-{}", "model.window_pattern=({},0)",
    "data.tokenizer=bpe:{}", "data.device_bytes={}", "mesh.fsdp={}", "optimizer.learning_rate={}e400", "{}=1",
    "model.norm={}", "data.source={}", "train.profile=({},{})", "model.d_model=" + "(" * 300 + "{}",
]  # fmt: skip


def test_absurd_values_give_one_short_line(config_file, the_problem):
    path = config_file()
    for override, digits in itertools.product(ABSURD, (20, 400, 5000)):
        line = the_problem(path, override.replace("{}", "9" * digits))
        assert len(line) < 600
        assert "\n" not in line


def test_a_huge_float_is_refused_and_a_large_one_is_not(config_file, the_problem):
    assert "too large for a float" in the_problem(config_file(), "optimizer.clip_norm=" + "9" * 400)
    assert load(config_file(), ["optimizer.clip_norm=" + "9" * 30]).optimizer.clip_norm == 1e30


def test_a_tilde_is_the_home_directory_in_every_path(config_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = {
        "data.source": "text:~/novel.txt",
        "data.tokenizer": "hf:~/t",
        "data.cache_dir": "~/c",
        "init_from": "~/r",
    }
    found = load(config_file(), [f"{key}={path}" for key, path in paths.items()])
    assert (found.data.source, found.data.tokenizer) == ("text:/home/me/novel.txt", "hf:/home/me/t")
    assert (found.data.cache_dir, found.init_from) == ("/home/me/c", "/home/me/r")
    assert path_argument("~/run") == "/home/me/run"
    assert load(config_file(), ["eval.sample_prompt=~/x"]).eval.sample_prompt == "~/x"
    with pytest.raises(argparse.ArgumentTypeError, match="not UTF-8"):
        path_argument("run\udcff")


def test_defaults_as_they_are_shown_are_read_back():
    for type_, field in schema().values():
        assert parse(show(field.default), type_) == field.default
