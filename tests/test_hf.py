"""lm.hf: the commands and their errors."""

import json
import resource

import jax
import numpy as np
import pytest
from huggingface_checkpoints import checkpoint

import lm
from lm import train
from lm.command_line import exchange
from lm.command_line.loading import load as load_config
from lm.data.tokenizers import CharTokenizer
from lm.hf import main
from lm.huggingface.config_files import read_config
from lm.huggingface.safetensors_files import TensorFiles
from lm.huggingface.tokenizer_files import to_tokenizer_json
from lm.huggingface.writing import write_checkpoint


@pytest.fixture
def with_tokenizer(tmp_path):
    """Return the directory of a checkpoint with a tokenizer and settings."""
    directory = checkpoint(tmp_path / "model")
    (directory / "tokenizer.json").write_text(to_tokenizer_json(CharTokenizer("abcdefghijk")))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 4], "top_k": 20})
    )
    return directory


def test_train_prints_a_config_file_of_the_architecture(with_tokenizer, tmp_path, capsys):
    assert train.main(["--config", f"hf:{with_tokenizer}", "--print_config", "python"]) == 0
    path = tmp_path / "published.py"
    path.write_text(capsys.readouterr().out)
    assert vars(load_config(str(path), []).model) == vars(read_config(with_tokenizer).model)


MISTAKES = {
    "import nothing --workdir run": "no such directory",
    "import model --workdir run --seq-len 0": "--seq-len: 0 must be at least 1",
    "import model --workdir model": "--workdir model is not an empty directory; give another",
    "export --workdir nothing --output out": "nothing; python -m lm.runs DIR lists",
    "export --workdir model --output model": "--output model is not an empty directory",
    "export --workdir model --output out --step last": "--step: 'last' is not best",
    "imprt model": "python -m lm.hf --help lists all options",
    "import model": "python -m lm.hf import --help lists all options",
    "export --workdir model": "python -m lm.hf export --help lists all options",
}


def test_mistakes_exit_with_2_and_one_line(tmp_path, command):
    checkpoint(tmp_path / "model")
    for arguments, message in MISTAKES.items():
        code, output = command(main, *arguments.split(" "))
        assert (code, message in output) == (2, True), (arguments, output)
        assert output.count("\n") <= (3 if "--help" in message else 1)


def test_an_import_or_export_that_failed_or_was_killed_is_repeated(
    with_tokenizer, tmp_path, command, monkeypatch
):
    export = ("export", "--workdir", tmp_path / "run", "--output", tmp_path / "out")
    (partial := tmp_path / ".run.partial").mkdir()
    (partial / "config.json").write_text("{")  # an import that was killed
    code, output = command(main, "import", with_tokenizer, "--workdir", tmp_path / "run")
    assert (code, partial.exists()) == (0, False), output
    run = lm.load(tmp_path / "run")
    assert (run.step, run.seq_len, run.tokenizer.decode([0, 1])) == (0, 16, "ab")

    def on_full_disk(target, config, params, *arguments, **options):
        """Write as on a disk that is full after 2 kB; NumPy arrays, so that JAX compiles and stores
        nothing.
        """
        params, (soft, hard) = (
            jax.tree.map(np.asarray, params),
            resource.getrlimit(resource.RLIMIT_FSIZE),
        )
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
            return write_checkpoint(target, config, params, *arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr(exchange, "write_checkpoint", on_full_disk)
        code, output = command(main, *export)
    assert (code, "model.safetensors" in output, "Traceback" in output) == (1, True, False), output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]
    (partial := tmp_path / ".out.partial").mkdir()

    def while_another_starts(*arguments, **options):
        patch.undo()
        code, output = command(main, *export)
        assert (code, "--output" in output, "is in use" in output) == (1, True, True), output
        return write_checkpoint(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(exchange, "write_checkpoint", while_another_starts)
        assert command(main, *export)[0] == 0
    assert not partial.exists()
    assert not (tmp_path / "out" / ".lock").exists()
    with TensorFiles(with_tokenizer) as one, TensorFiles(tmp_path / "out") as two:
        assert one.shapes == two.shapes
        assert all(np.array_equal(one.read(name), two.read(name)) for name in one.shapes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [3, 4]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["top_k"] == 20
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (
        with_tokenizer / "tokenizer.json"
    ).read_text()


def test_check_without_torch_names_the_extra_to_install(tmp_path, monkeypatch, command):
    monkeypatch.setattr(exchange.importlib.util, "find_spec", lambda name: None)
    code, output = command(main, "check", checkpoint(tmp_path))
    assert (
        code,
        "torch and transformers are not installed; pip install -e '.[bench]'" in output,
    ) == (2, True)
