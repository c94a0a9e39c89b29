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
    assert [parse_arguments(arguments).dry_run for arguments in examples] == [True, False, False]
