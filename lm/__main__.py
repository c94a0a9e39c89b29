"""The command `lm`: `lm train ...` is `python -m lm.train ...`, and so on."""

import importlib
import sys

COMMANDS = {
    "train": "train a model, or estimate its cost",
    "generate": "continue prompts",
    "evaluate": "evaluate on a text",
    "inspect": "show what a model does with a text, token by token",
    "harness": "evaluate on tasks of the lm-evaluation-harness",
    "hf": "import, export and check checkpoints of Hugging Face",
    "sweep": "run an ablation",
    "report": "write the report of a sweep",
    "runs": "list runs: settings, steps, best loss, status, size",
    "data.prepare": "write token shards",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name not in COMMANDS:
        listed = "\n".join(f"  {name:<14}{what}" for name, what in COMMANDS.items())
        print(f"usage: lm COMMAND ...; lm COMMAND --help says more\n\n{listed}")
        return 0 if name in ("-h", "--help") else 2
    return importlib.import_module(f"lm.{name}").main(arguments)


if __name__ == "__main__":
    sys.exit(main())
