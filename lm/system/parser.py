"""The argument parser of all commands, with completion in shells."""

import argparse
import itertools
import os
import sys

from lm.system.errors import UserError


class BothSpellings(argparse.ArgumentParser):
    """A parser that takes options with hyphens and underscores, and refuses a second value.

    A value may begin with a hyphen, as in --prompt "-So" and --learning-rate -1e-5, unless it is an
    option.
    """

    def parse_args(self, args=None, namespace=None):
        """Parse arguments; options that do not exist are named before argparse takes their values
        for other arguments.
        """
        arguments = self._spelled(args)
        options = itertools.takewhile(lambda argument: argument != "--", arguments)
        names = [option.partition("=")[0] for option in options if option.startswith("--")]
        unknown = [name for name in names if name not in self._option_string_actions]
        if unknown and not self._subparsers:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return super().parse_args(arguments, namespace)

    def parse_known_args(self, args=None, namespace=None):
        arguments = self._spelled(args)
        self._refuse_repeated(arguments)
        return super().parse_known_args(arguments, namespace)

    def _spelled(self, args) -> list[str]:
        """Return arguments with options in the spelling of the parser, joined to their values."""
        names = {name.replace("_", "-"): name for name in self._option_string_actions}
        arguments = []
        for text in sys.argv[1:] if args is None else args:
            name, equals, value = text.partition("=")
            arguments.append(f"{names.get(name.replace('_', '-'), name)}{equals}{value}")
        return self._joined(arguments)

    def _print_message(self, message, file=None):
        """Print help or an error; argparse would ignore that it cannot be written."""
        if message:
            (file or sys.stderr).write(message)

    def _joined(self, arguments: list[str]) -> list[str]:
        """Join options and values that begin with a hyphen: argparse would take these for options."""
        joined: list[str] = []
        rest = list(arguments)
        while rest and rest[0] != "--":
            argument = rest.pop(0)
            if rest and self._is_value(rest[0], self._option_string_actions.get(argument)):
                argument += f"={rest.pop(0)}"
            joined.append(argument)
        return joined + rest

    def _get_values(self, action, arg_strings):
        """Return the value of an option; argparse of Python 3.11 loses "--" where it is the value."""
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)

    def _is_value(self, text: str, option: argparse.Action | None) -> bool:
        """Return whether a text with a hyphen is the value of the option before it."""
        if option is None or option.nargs is not None:
            return False
        if not option.option_strings[0].startswith("--") or not text.startswith("-"):
            return False
        if text.partition("=")[0] in self._option_string_actions:
            return False
        return option.metavar == "TEXT" or not text.startswith("--")

    def error(self, message):
        """End with exit code 2, the mistake and an example in place of the list of all options."""
        lines = [line.strip() for line in (self.epilog or "").splitlines()]
        example = next(
            (f"for example: {line}\n" for line in lines if line.startswith(("python -m ", "lm "))),
            "",
        )
        self.exit(2, f"{self.prog}: {message}\n{example}{self.prog} --help lists all options\n")

    def _refuse_repeated(self, arguments: list[str]) -> None:
        """Raise UserError for an option given twice: argparse would keep the last in silence.

        Options that collect their values may be repeated, and so may those without a value, which
        changes nothing. Repeated keys of the config are reported with its other mistakes. A parser
        of several commands leaves the options to theirs.
        """
        first: dict = {}
        for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
            name = argument.partition("=")[0]
            if not name.startswith("--") or name.startswith("--config.") or self._subparsers:
                continue
            option = self._option_string_actions.get(name, name)
            if option in first and _counts_once(option):
                both = name if first[option] == name else f"{first[option]} and {name}"
                raise UserError(
                    f"{both}: given twice, and one of the values would be lost; give it once"
                )
            first[option] = name


def _counts_once(option: argparse.Action | str) -> bool:
    """Return whether a second value of an option, or of another tool's, would replace the first."""
    is_flag = isinstance(option, argparse.Action) and option.nargs == 0
    contradicts = isinstance(option, argparse.BooleanOptionalAction)
    return contradicts or not (is_flag or isinstance(option, argparse._AppendAction))


class Parser(BothSpellings):
    """A parser that shows texts as they are written, and takes options in full.

    In a shell that has run `eval "$(register-python-argcomplete lm)"`, it prints the completions of
    the command line. `command` is the name of the module after "lm.".
    """

    completes = "_ARGCOMPLETE" in os.environ  # a shell asks for completions
    caller = "python -m lm."  # "lm " if the command lm calls it

    def __init__(self, command: str, description: str, epilog: str = ""):
        super().__init__(
            prog=f"{self.caller}{command}",
            description=description.replace("python -m lm.", self.caller),
            epilog=epilog.replace("python -m lm.", self.caller),
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
