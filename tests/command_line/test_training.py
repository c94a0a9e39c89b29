"""The command line of lm.train: its help, and its own mistakes."""

import pytest
from running import ROOT

from lm.command_line.training import parse_arguments
from lm.config import schema
from lm.errors import UserError

CONFIG = "--config=configs/shakespeare.py"


@pytest.fixture
def help_text(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_key_with_its_values(help_text):
    for name in schema():
        assert f"  {name} = " in help_text
    joined = " ".join(help_text.split())
    for values in ("tfds:NAME | text:PATH | tokens:PATH", "bpe:SIZE | hf:PATH", "float in [0, 1)", "rms | layer"):
        assert values in joined


def test_the_commands_in_help_are_accepted(help_text, monkeypatch):
    monkeypatch.chdir(ROOT)
    examples = [line.split()[3:] for line in help_text.splitlines() if line.startswith("  python -m lm.train ")]
    assert len(examples) >= 4
    for arguments in examples:
        parse_arguments(arguments)


MISTAKES = [
    (["--model.d_model=3"], "--model.d_model=3: unexpected argument; config keys are set with --config.SECTION"),
    (["--resume"], "--resume: name the run to resume with --workdir DIR"),
    (["--connect_timeout=0"], "--connect_timeout: give a number of seconds between 1 and 86400"),
    (["--num_processes=2"], "belong together; give all three"),
    (
        ["--num_processes=2", "--process_id=0", "--coordinator_address=localhost"],
        "--coordinator_address: 'localhost' is not HOST:PORT",
    ),
    (["--plan"], "--plan and --device NAME:COUNT belong together"),
]


def test_a_mistake_on_the_command_line_is_reported_beside_those_of_the_config(monkeypatch):
    monkeypatch.chdir(ROOT)
    for arguments, expected in MISTAKES:
        with pytest.raises(UserError) as caught:
            parse_arguments([CONFIG, "--config.train.steps=x", *arguments])
        first, last = caught.value.problems
        assert expected in first
        assert last == "config.train.steps: 'x' is not an int"
