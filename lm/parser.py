"""The argument parser of all commands, with completion in shells."""

import argparse
import os
import sys


class BothSpellings(argparse.ArgumentParser):
    """A parser that takes each option with hyphens and with underscores."""

    def parse_known_args(self, args=None, namespace=None):
        names = {name.replace("_", "-"): name for name in self._option_string_actions}
        given = [text.partition("=") for text in (sys.argv[1:] if args is None else args)]
        args = [f"{names.get(name.replace('_', '-'), name)}{equals}{value}" for name, equals, value in given]
        return super().parse_known_args(args, namespace)


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
