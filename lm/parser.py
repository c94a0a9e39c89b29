"""The argument parser of all commands, with completion in shells."""

import argparse
import itertools
import os
import sys

from lm.errors import UserError


class BothSpellings(argparse.ArgumentParser):
    """A parser that takes each option with hyphens and with underscores, and refuses a second value of one."""

    def parse_known_args(self, args=None, namespace=None):
        names = {name.replace("_", "-"): name for name in self._option_string_actions}
        given = [text.partition("=") for text in (sys.argv[1:] if args is None else args)]
        args = [f"{names.get(name.replace('_', '-'), name)}{equals}{value}" for name, equals, value in given]
        self._refuse_repeated(args)
        return super().parse_known_args(args, namespace)

    def _refuse_repeated(self, arguments: list[str]) -> None:
        """Raise UserError for an option that is given twice, because argparse would keep the last in silence.

        Options that collect their values may be repeated, and so may those without a value, which changes nothing.
        Repeated keys of the config are reported with its other mistakes. A parser of several commands leaves the
        options to theirs.
        """
        first: dict = {}
        for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
            name = argument.partition("=")[0]
            if not name.startswith("--") or name.startswith("--config.") or self._subparsers:
                continue
            option = self._option_string_actions.get(name, name)
            if option in first and _counts_once(option):
                both = name if first[option] == name else f"{first[option]} and {name}"
                raise UserError(f"{both}: given twice, and one of the values would be lost; give it once")
            first[option] = name


def _counts_once(option: argparse.Action | str) -> bool:
    """Return whether a second value of an option would replace the first; option: its name if it is of another tool."""
    is_flag = isinstance(option, argparse.Action) and option.nargs == 0
    contradicts = isinstance(option, argparse.BooleanOptionalAction)
    return contradicts or not (is_flag or isinstance(option, argparse._AppendAction))


class Parser(BothSpellings):
    """A parser that shows texts as they are written, and takes options in full.

    In a shell that has run `eval "$(register-python-argcomplete lm)"`, it prints the completions of the command line.
    `command` is the name of the module after "lm.".
    """

    completes = "_ARGCOMPLETE" in os.environ  # a shell asks for completions

    def __init__(self, command: str, description: str, epilog: str = ""):
        super().__init__(
            prog=f"python -m lm.{command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_known_args(self, args=None, namespace=None):
        """Parse arguments; for a shell that completes them, print what may come next and exit."""
        if self.completes:
            import argcomplete  # of the extra [completion]; whoever registers it has it

            self.completes = False  # it calls this method
            argcomplete.autocomplete(self, always_complete_options="long")
        return super().parse_known_args(args, namespace)
