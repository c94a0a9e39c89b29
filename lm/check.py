"""Check that a model keeps what every model must: python -m lm.check --config configs/mine.py"""

import argparse
import os
import sys
import time

from lm.command_line.loading import load, overrides_of
from lm.system import runtime
from lm.system.errors import UserError, first_line, with_exit_code
from lm.system.parser import Parser
from lm.system.text_tables import say

EPILOG = """\
examples:
  python -m lm.check --config configs/shakespeare_small.py --config.model.attn_gate=head
  python -m lm.check --config configs/mine.py --only decoding,document

The model of the config is made small: few features, layers and tokens, with all its ideas. Each line of the card is a
property and what was measured. It takes one to two minutes on two cores.

exit codes: 0 all hold; 2 invalid arguments, or a property does not hold; 130 Ctrl-C.
"""
# Programs that run once: less time for the compiler, and eight devices of this machine's CPU.
FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_force_host_platform_device_count=8",
)


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    a, rest = parse_arguments(argv)
    overrides, problems = overrides_of(rest)
    if problems:
        raise UserError(*problems)
    config = load(a.config, overrides)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
    runtime.start_jax()
    from lm.checking.card import PROPERTIES
    from lm.checking.source import where_it_starts
    from lm.checking.subject import Broken, Subject

    chosen = {
        name: holds
        for name, holds in PROPERTIES.items()
        if not a.only or any(word in name for word in a.only.split(","))
    }
    if not chosen:
        raise UserError(f"--only: no property has {a.only}; they are {'; '.join(PROPERTIES)}")
    began = time.monotonic()
    broken = []
    subject = Subject(config)
    for name, holds in chosen.items():
        start = time.monotonic()
        try:
            verdict, measured = "ok", holds(subject)
        except Exception as error:  # of the code that is checked: any
            verdict, measured = "BROKEN", _text(error)
            broken.append(name)
            if isinstance(error, Broken):
                measured = "; ".join(filter(None, [measured, where_it_starts(subject, error)]))
        say(f"{verdict:<7} {name:<42} {measured}  ({time.monotonic() - start:.0f} s)")
        if broken and a.first:
            break
    say(f"{len(chosen) - len(broken)} of {len(chosen)} hold, {time.monotonic() - began:.0f} s")
    return 2 if broken else 0


def _text(error: Exception) -> str:
    """Return the message of a failure; that of another error begins with its type."""
    return first_line(error).removeprefix("Broken: ").removeprefix("UserError: ")


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        "check", "Check a model of any config, tiny, for what must always hold.", EPILOG
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a config file")
    parser.add_argument(
        "--only", metavar="WORDS", help="only properties whose names have one of these words"
    )
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    sys.exit(main())
