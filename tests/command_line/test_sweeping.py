"""The command line of lm.sweep: the commands in its help, and its own mistakes."""

import pytest

from lm.command_line.sweeping import parse_arguments

CONFIG = "--config=configs/sweeps/positions.py"


def test_the_commands_in_help_are_accepted(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [line.split()[3:] for line in lines if line.startswith("  python -m lm.sweep ")]
    assert [parse_arguments(arguments).dry_run for arguments in examples] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: --config"),
        ([CONFIG, "--budget=half"], "invalid choice: 'half'"),
        ([CONFIG, "--dry"], "unrecognized arguments: --dry"),
        ([CONFIG, "--together=all"], "invalid int value: 'all'"),
    ],
)
def test_a_mistake_ends_the_process_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err
