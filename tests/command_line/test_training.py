"""The command line of lm.train: its help, with that of lm.sweep, and its own mistakes."""

import dataclasses
import importlib
import json
import shlex

import pytest
from running import CONFIG as TINY
from running import ROOT

from lm import generate, hf
from lm.command_line import sweeping
from lm.command_line.loading import load
from lm.command_line.training import parse_arguments
from lm.config import schema
from lm.data import prepare
from lm.system.errors import UserError


@pytest.mark.parametrize("command", ["lm.train", "lm.sweep"])
def test_help_shows_commands_that_are_accepted_and_every_key_with_its_values(
    command, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    parse = {"lm.train": parse_arguments, "lm.sweep": sweeping.parse_arguments}[command]
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    examples = [
        shlex.split(line)[3:]
        for line in text.splitlines()
        if line.startswith(f"  python -m {command} ")
    ]
    assert len(examples) >= 3
    for arguments in examples:
        parse(arguments)
    if command == "lm.train":
        assert [name for name in schema() if f"  {name} = " not in text] == []
        shown = (
            "tfds:NAME | text:PATH | jsonl:PATH",
            "bpe:SIZE | hf:PATH",
            "float >= 0.0 and < 1.0",
            "rms | layer",
        )
        assert [values for values in shown if values not in " ".join(text.split())] == []


BOTH_SPELLINGS = [
    (lambda arguments: parse_arguments(arguments)[0], ["--config=configs/shakespeare.py", "--print-config", "json"],
     "print_config", "json"),
    (prepare.parse_arguments, ["--verify=x", "--unit-mb=2"], "unit_mb", 2.0),
    (generate.parse_arguments, ["--workdir=.", "--prompt_file=a_b-c"], "prompt_file", "a_b-c"),
    (hf.parse_arguments, ["import", "x", "--workdir=x", "--seq_len=3"], "seq_len", 3),
]  # fmt: skip


def test_options_may_have_hyphens_or_underscores(monkeypatch):
    monkeypatch.chdir(ROOT)
    for parse, arguments, name, value in BOTH_SPELLINGS:
        assert getattr(parse(arguments), name) == value, arguments


SECOND_VALUES = [  # a command, its arguments, and the option that would lose a value
    ("train", ["--config=a.py", "--workdir=a", "--workdir", "b"], "--workdir"),
    ("train", ["--config=a.py", "--branch_from=a", "--branch-from=b", "--workdir=c"], "--branch_from"),
    ("train", ["--config=configs/shakespeare.py", "--config.train.steps=1", "--config.train.steps=2"],
     "config.train.steps"),
    ("data.prepare", ["--input=text:a", "--tokenizer=byte", "--tokenizer=bpe:300", "--output=c"], "--tokenizer"),
    ("generate", ["--workdir=a", "--special-tokens", "--no-special_tokens"], "--special-tokens"),
    ("evaluate", ["--workdir=a", "--split=train", "--split=test"], "--split"),
    ("inspect", ["--workdir=a", "--prompt=x", "--prompt=y"], "--prompt"),
    ("show", ["--workdir=a", "--step=1", "--step=2"], "--step"),
    ("compare", ["a", "b", "--output=a.png", "--output=b.png"], "--output"),
    ("report", ["a", "--publish=b", "--publish=c"], "--publish"),
    ("hf", ["export", "--workdir=a", "--workdir=b", "--output=c"], "--workdir"),
    # an option of the harness
    ("harness", ["--workdir=a", "--tasks", "one", "--tasks", "two"], "--tasks"),
    ("sweep", ["--config=a.py", "--budget=full", "--budget=quick"], "--budget"),
    ("sweep", ["--study=changes_2026", "--add=new", "--set=model.dropout=0.5", "--set=model.dropout=0.1"],
     "model.dropout"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "option"), SECOND_VALUES)
def test_an_option_that_counts_once_is_refused_a_second_time(
    command, monkeypatch, name, arguments, option
):
    main = importlib.import_module(f"lm.{name}").main

    def from_the_root(arguments):
        monkeypatch.chdir(ROOT)
        return main(arguments)

    code, output = command(from_the_root, *arguments)
    assert code == 2
    assert option in output
    assert "given twice" in output


def test_options_that_collect_values_and_those_without_one_may_be_repeated():
    a = generate.parse_arguments(
        ["--workdir=.", "--prompt=a", "--prompt", "b", "--json", "--json", "--stop=c"]
    )
    assert (a.prompt, a.stop, a.json) == (["a", "b"], ["c"], True)


def test_the_config_is_printed_as_a_file_and_resolved_and_so_is_the_model(train, tmp_path):
    code, output = train(None, "--print_config=python", "--config.eval.sample_prompt=a\nb")
    assert code == 0
    (tmp_path / "printed.py").write_text(output)
    wanted = load(str(TINY), ["eval.sample_prompt=a\nb"])
    printed = load(str(tmp_path / "printed.py"), [])
    assert dataclasses.replace(printed, data=wanted.data) == wanted
    code, output = train(None, "--print_config=json")
    assert code == 0
    resolved = json.loads(output[output.index("{\n") : output.rindex("}") + 1])
    assert (resolved["model"]["vocab_size"], resolved["model"]["d_head"]) == (14, 8)
    code, output = train(None, "--print_model")
    assert code == 0
    assert 'x = x + f(norm(f"{name}_norm", x))' in output
    assert "\nparameter " in output
    assert not (tmp_path / "runs").exists()


MISTAKES = [
    (["--model.d_model=3"], ("--model.d_model=3: unexpected argument; config keys are set with "
                            "--config.SECTION")),
    (["--resume"], "--resume: name the run to resume with --workdir DIR"),
    (["--connect_timeout=0"], "--connect_timeout: give a number of seconds between 1 and 86400"),
    (["--num_processes=2"], "belong together; give all three"),
    (["--num_processes=2", "--process_id=0", "--coordinator_address=localhost"],
     "--coordinator_address: 'localhost' is not HOST:PORT"),
    (["--plan"], "--plan and --device NAME:COUNT belong together"),
    (["--slices=2"], "--slices belongs to --plan"),
    (["--compiled", "--dump=here"], "--compiled belongs to --plan"),
]  # fmt: skip


def test_a_mistake_on_the_command_line_is_reported_beside_those_of_the_config(monkeypatch):
    monkeypatch.chdir(ROOT)
    for arguments, expected in MISTAKES:
        with pytest.raises(UserError) as caught:
            parse_arguments(
                ["--config=configs/shakespeare.py", "--config.train.steps=x", *arguments]
            )
        first, last = caught.value.problems
        assert expected in first
        assert last == "config.train.steps: 'x' is not an int"


def test_an_override_without_effect_stops_a_new_run_but_not_a_resumed_or_branched_one(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(ROOT)
    arguments = ["--config=configs/shakespeare_small.py", "--config.optimizer.momentum=0.9"]
    for new in (["--workdir=x"], [f"--workdir={tmp_path}", "--resume"]):  # launchers always resume
        with pytest.raises(UserError, match=r"use optimizer\.name = sgd"):
            parse_arguments([*arguments, *new])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for old in ([f"--workdir={tmp_path}", "--resume"], ["--workdir=x", "--branch_from=y"]):
        a, config = parse_arguments([*arguments, *old])
        assert config.optimizer.momentum == 0.9
        assert a.notes[0].startswith("WARNING: config.optimizer.momentum: 0.9 has no effect")


def test_a_note_about_the_config_follows_what_is_wrong_with_the_data(train, config_file, tmp_path):
    """What the user must mend stands alone. (Of several processes the first one alone shows lines.)"""
    tiny = (
        "model.d_model = 16",
        "model.n_layers = 1",
        "model.n_heads = 2",
        "train.seq_len = 16",
        "eval.every = 0",
    )
    lines = (
        *tiny,
        "optimizer.warmup_steps = 9",
        "eval.sample_tokens = 0",
        "eval.final_splits = ('validation',)",
    )
    short = [
        f"--config={config_file(*(f'config.{line}' for line in lines))}",
        "--config.train.steps=2",
    ]
    note = "warmup_steps=1 in place of 9"
    code, output = train(None, *short, "--config.data.source=text:absent.txt")
    assert (code, note in output) == (2, False)
    code, output = train(tmp_path / "run", *short)
    assert (code, output.count(note)) == (0, 1)
    assert "WARNING" not in output
    assert "attention: " not in output  # there is no choice on a CPU
    code, output = train(None, *short, "--print_config=json")
    assert (code, output.count(note)) == (0, 1)
