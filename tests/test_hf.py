"""lm.hf: the commands and their errors."""

import json
import subprocess
import sys

import numpy as np
import pytest
from huggingface_checkpoints import checkpoint
from running import ROOT

import lm
from lm.command_line.loading import load as load_config
from lm.data.tokenizers import CharTokenizer
from lm.exchange import checking
from lm.hf import main
from lm.huggingface.config_files import read_config
from lm.huggingface.safetensors_files import TensorFiles
from lm.huggingface.tokenizer_files import to_tokenizer_json


@pytest.fixture
def with_tokenizer(tmp_path):
    """Return the directory of a checkpoint with a tokenizer and settings."""
    directory = checkpoint(tmp_path / "model")
    (directory / "tokenizer.json").write_text(to_tokenizer_json(CharTokenizer("abcdefghijk")))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "top_k": 20}))
    return directory


@pytest.mark.slow
def test_a_checkpoint_is_imported_used_and_exported_again(with_tokenizer, tmp_path, capsys):
    assert main(["import", str(with_tokenizer), "--workdir", str(tmp_path / "run")]) == 0
    run = lm.load(tmp_path / "run")
    assert (run.step, run.seq_len, run.tokenizer.decode([0, 1])) == (0, 16, "ab")
    assert run.logits("abc").shape == (3, 11)
    assert main(["export", "--workdir", str(tmp_path / "run"), "--output", str(tmp_path / "again")]) == 0
    assert "config.json" in capsys.readouterr().out
    with TensorFiles(with_tokenizer) as one, TensorFiles(tmp_path / "again") as two:
        assert one.shapes == two.shapes
        assert all(np.array_equal(one.read(name), two.read(name)) for name in one.shapes)
    fields = json.loads((tmp_path / "again/config.json").read_text())
    assert fields["eos_token_id"] == [3, 4]
    assert json.loads((tmp_path / "again/generation_config.json").read_text())["top_k"] == 20
    assert (tmp_path / "again/tokenizer.json").read_text() == (with_tokenizer / "tokenizer.json").read_text()


def test_config_prints_a_file_that_trains_the_architecture(with_tokenizer, tmp_path, capsys):
    assert main(["config", str(with_tokenizer)]) == 0
    path = tmp_path / "published.py"
    path.write_text(capsys.readouterr().out)
    assert load_config(str(path), []).model == read_config(with_tokenizer).model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "nothing"], "no such directory"),
        (["import", "nothing", "--workdir", "run"], "no such directory"),
        (["import", "model", "--workdir", "run", "--seq-len", "0"], "--seq-len: 0 must be at least 1"),
        (["import", "model", "--workdir", "model"], "already holds a run"),
        (["export", "--workdir", "nothing", "--output", "out"], "holds no checkpoint"),
        (["export", "--workdir", "run", "--output", "model"], "is not an empty directory"),
        (["export", "--workdir", "run", "--output", "out", "--step", "last"], "--step: 'last' is not best"),
        (["export", "--workdir", "run", "--output", "out", "--shard-gb", "0"], "--shard-gb: 0.0"),
        (
            ["export", "--workdir", "run", "--output", "out", "--shard-gb", "2e6"],
            "greater than 0 and less than 1000000",
        ),
        (["check", "model", "--ids", "1;2"], "--ids: '1;2' is not a list"),
        (["check", "model", "--ids", "1", "--prompt", "a"], "give one of them"),
        (["check", "model", "--prompt", ""], "--prompt is empty"),
    ],
)
def test_mistakes_exit_with_2_and_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    checkpoint(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_import_into_the_workdir_of_a_run_suggests_another_one(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")
    assert main(["import", str(checkpoint(tmp_path / "model")), "--workdir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "already holds a run" in error
    assert "give another one" in error
    assert "--resume" not in error  # which lm.hf import does not have


@pytest.mark.parametrize("arguments", [["imprt", "DIR"], [], ["import", "DIR"], ["export", "--workdir", "run"]])
def test_a_misspelled_command_exits_with_2_and_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: python -m lm.hf" in capsys.readouterr().err


def test_check_without_torch_names_the_extra_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checking.importlib.util, "find_spec", lambda name: None)
    assert main(["check", str(checkpoint(tmp_path))]) == 2
    assert "torch and transformers are not installed; pip install -e '.[bench]'" in capsys.readouterr().err


def test_config_needs_no_jax(tmp_path):
    checkpoint(tmp_path)
    code = "import sys; sys.modules['jax'] = None; from lm.hf import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "config", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
