"""The command `lm`: `lm train ...` is `python -m lm.train ...`, and so on."""

import difflib
import importlib
import os
import sys

from lm.config.values import short
from lm.system.errors import UserError, with_exit_code
from lm.system.parser import Parser

COMMANDS = {
    "train": "train a model, or estimate its cost",
    "generate": "continue prompts",
    "chat": "talk to a model that was trained on chats",
    "evaluate": "evaluate on a text",
    "inspect": "show what a model does with a text, token by token",
    "harness": "evaluate on tasks of the lm-evaluation-harness",
    "hf": "import, export and check checkpoints of Hugging Face",
    "sweep": "run an ablation",
    "report": "write the report of a sweep",
    "check": "check that a model of any config keeps what every model must",
    "runs": "list runs: settings, steps, best loss, status, size",
    "compare": "compare runs: what differs in their configs, losses, curves",
    "show": "print the texts that a run trained on in a step",
    "data.prepare": "write token shards",
}


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    if "_ARGCOMPLETE" in os.environ:
        return complete(os.environ["COMP_LINE"].split()[1:2])
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        listed = "\n".join(f"  {name:<14}{what}" for name, what in COMMANDS.items())
        print(f"usage: lm COMMAND ...; lm COMMAND --help says more\n\n{listed}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name[:200], COMMANDS, n=1)
        advice = f"did you mean {near[0]}?" if near else "lm --help lists the commands"
        raise UserError(f"lm: unknown command {short(name)}; {advice}")
    Parser.caller = "lm "
    try:
        return importlib.import_module(f"lm.{name}").main(arguments)
    finally:
        Parser.caller = "python -m lm."


def complete(typed: list[str]) -> int:
    """Print the completions of the command line that a shell asks about; typed: the name of the
    command, if any.
    """
    if typed and typed[0] in COMMANDS:
        os.environ["_ARGCOMPLETE"] = "2"  # the arguments are those behind the second word
        return importlib.import_module(f"lm.{typed[0]}").main([])
    parser = Parser("COMMAND", "")
    parser.add_argument("command", choices=COMMANDS)
    parser.parse_args([])
    return 0


if __name__ == "__main__":
    sys.exit(main())
