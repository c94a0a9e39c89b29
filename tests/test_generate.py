"""The command lm.generate."""

import io
import json
import sys

import numpy as np
import pytest
from huggingface_checkpoints import checkpoint, edit_tensors
from tiny import with_keys

import lm
from lm import trained_model
from lm.data import tokenizers
from lm.data.tokenizers import ByteTokenizer, CharTokenizer
from lm.generate import main
from lm.generation.text import Continuation


def test_a_text_continues_the_prompt_and_a_seed_repeats_it(bench, capsys, monkeypatch):
    arguments = [f"--workdir={bench.reference()}", "--tokens=20", "--seed=3"]
    assert main([*arguments, "--prompt=the cat"]) == 0
    plain = capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n")))
    assert main([*arguments, "--prompt-file=-", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert plain.out == record["prompt"] + record["text"] + "\n"
    assert (record["prompt"], record["n_tokens"], record["finish"]) == ("the cat", 20, "length")
    assert "step " in plain.err


@pytest.mark.slow
def test_generation_replaces_attention_that_this_device_does_not_support(bench, monkeypatch):
    """A run that was trained with cuDNN on a GPU generates text on a CPU."""
    saved = trained_model.saved_config
    keys = {"model_attention": "cudnn", "model_compute_dtype": "bfloat16"}
    on_a_gpu = lambda fields: with_keys(saved(fields), **keys)  # noqa: E731
    monkeypatch.setattr(trained_model, "saved_config", on_a_gpu)
    assert main([f"--workdir={bench.reference()}", "--tokens=5"]) == 0


def test_mistakes_are_errors(bench, capsys):
    for arguments, message in (
        ([], "absent; python -m lm.runs DIR lists"),
        (["--temperature=nan", "--tokens=0"], "--temperature: nan"),
        (["--top-p=0", "--stop=", "--prompt="], "--top-p: 0.0"),
        (["--prompt-file=absent.txt"], "--prompt-file: absent.txt"),
        (["--prompt-file="], "--prompt-file: "),
        (
            ["--step=" + "9" * 5000],
            "(5002 characters) is not best, latest, ema, mean:N, or the number of a step",
        ),
        (
            ["--tokens=1000000000000"],
            "--tokens: 1000000000000 is out of range; it must be <= 1000000",
        ),
        (["--seed=" + "9" * 400], "(400 characters) is out of range; it must be <= 4294967295"),
        ([f"--workdir={bench.reference()}", "--prompt=Zeus"], "'Z'"),
    ):
        named = (
            []
            if any(argument.startswith("--workdir") for argument in arguments)
            else ["--workdir=absent"]
        )
        assert main([*named, *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err


class Echo:
    """A run that continues each prompt with its number."""

    step = 7
    tokenizer = ByteTokenizer()

    def with_special_tokens(self, special_tokens):
        print(f"special tokens {special_tokens}")
        return self

    def stream(self, prompts, n_tokens, **options):
        yield [
            Continuation(prompt, 0, f"[{i}]", finish="length") for i, prompt in enumerate(prompts)
        ]


@pytest.fixture
def echo(monkeypatch):
    """Load an Echo as every run."""
    monkeypatch.setattr(lm, "load", lambda *_: Echo())


def test_the_ends_of_a_checkpoint_are_those_of_its_configs_and_nan_weights_are_named(
    tmp_path, capsys
):
    """Llama 3's generation_config.json lists several ends; the name of the end is nowhere in its
    tokenizer.json.
    """
    from tokenizers import Tokenizer, models

    directory = checkpoint(tmp_path / "model", eos_token_id=5)
    vocab = {chr(ord("a") + i): i for i in range(9)}
    (directory / "tokenizer.json").write_text(
        Tokenizer(models.WordLevel(vocab, unk_token="a")).to_str()
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    run = lm.load(directory)
    assert run.tokenizer.stop_ids == {2, 5, 7}
    assert (
        run.tokenizer.fingerprint
        == tokenizers.make(
            f"hf:{directory / 'tokenizer.json'}", (), special_tokens=True
        ).fingerprint
    )
    assert tokenizers.from_json(run.tokenizer.to_json()).stop_ids == {2, 5, 7}
    assert run.with_special_tokens(False).tokenizer.stop_ids == {2, 5, 7}
    assert capsys.readouterr().err == ""
    edit_tensors(
        directory,
        lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"] * np.nan},
    )
    lm.load(directory)  # to generate with it is an error, see tests/generation/test_decoding.py
    assert "WARNING" in (err := capsys.readouterr().err)
    assert "1 of " in err
    assert "final_norm/scale_D" in err


def test_special_tokens_of_prompts_are_an_option(echo, capsys):
    for options, printed in (
        ([], ""),
        (["--special-tokens"], "special tokens True\n"),
        (["--no-special-tokens"], "special tokens False\n"),
    ):
        assert main(["--workdir=run", "--prompt=a", *options]) == 0
        assert capsys.readouterr().out == f"{printed}a[0]\n"


def test_the_default_prompt_is_a_newline_or_the_first_token_of_a_text_without_newlines(
    echo, capsys, monkeypatch
):
    for tokenizer, prompt in ((ByteTokenizer(), "\n"), (CharTokenizer("cab"), "a"), (None, "\n")):
        monkeypatch.setattr(Echo, "tokenizer", tokenizer)
        assert main(["--workdir=run"]) == 0
        assert capsys.readouterr().out == f"{prompt}[0]\n"


def test_texts_are_printed_in_order_once_they_are_finished(echo, capsys, monkeypatch):
    first, second = Continuation("a", 0, "1"), Continuation("a", 0, "2", finish="stop")
    printed = []

    def stream(*_, **__):
        for finish in (None, "length"):
            first.finish = finish
            yield [first, second]
            printed.append(capsys.readouterr().out)

    monkeypatch.setattr(Echo, "stream", stream)
    # the same prompt twice has two numbers
    assert main(["--workdir=run", "--prompt=a", "--prompt=a"]) == 0
    assert printed == ["", "---- prompt 1, sample 1 ----\na1\n---- prompt 2, sample 1 ----\na2\n"]


def test_only_line_feeds_separate_the_prompts_of_a_file(echo, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_bytes("one\f\u2028still\r\ntwo\n".encode())
    assert main(["--workdir=run", f"--prompt-file={tmp_path / 'prompts.txt'}", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [row["prompt"] for row in rows] == ["one\f\u2028still", "two"]


@pytest.mark.parametrize("as_json", [False, True])
def test_output_that_cannot_encode_the_text_escapes_it_as_json_does(echo, monkeypatch, as_json):
    """As with PYTHONIOENCODING=ascii: printing does not decide whether a command succeeds."""
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", stream)
    assert main(["--workdir=run", "--prompt=é日😀", *(["--json"] if as_json else [])]) == 0
    printed = stream.buffer.getvalue().decode("ascii")
    assert r"\u00e9\u65e5\ud83d\ude00" in printed
    if as_json:
        assert json.loads(printed)["prompt"] == "é日😀"


def test_a_terminal_gets_no_control_characters(echo, capsys, monkeypatch):
    for is_terminal, printed in ((False, "a\x1b[2J\tb\n[0]\n"), (True, "a\ufffd[2J\tb\n[0]\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)  # noqa: B023
        assert main(["--workdir=run", "--prompt=a\x1b[2J\tb\n"]) == 0
        assert capsys.readouterr().out == printed


def test_running_out_of_memory_is_an_error(echo, capsys, monkeypatch):
    def stream(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
        yield

    monkeypatch.setattr(Echo, "stream", stream)
    assert main(["--workdir=run"]) == 2
    assert capsys.readouterr().err.endswith(
        "allocating 9 bytes.; use a smaller --batch-size or --tokens\n"
    )
