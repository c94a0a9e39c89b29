"""Look inside a trained model: python -m lm.inspect --workdir runs/NAME --prompt "ROMEO:"."""

import argparse
import re
import sys
from pathlib import Path

import lm
from lm.command_line.checkpoint import add_checkpoint
from lm.config.values import path_argument, short
from lm.system.errors import UserError, with_exit_code
from lm.system.files import check_output, write_text
from lm.system.parser import Parser
from lm.system.text_tables import say

EPILOG = """\
examples:
  python -m lm.inspect --workdir runs/mine --prompt "ROMEO: But soft, what light"
  python -m lm.inspect --workdir runs/mine --prompt "$(cat scene.txt)" --layers 0,5 --output scene.html

The page needs no network. It shows the loss of each token, the likely next tokens, the logit lens, the attention of
each head, and norms by layer. docs/inspect.md explains how to capture and patch the same values in Python.

exit codes: 0 finished; 1 a file cannot be read or written at the moment; 2 invalid arguments; 130 Ctrl-C.
"""


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return inspect(parse_arguments(argv))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        "inspect", "Write an HTML page that shows how a trained model processes a text.", EPILOG
    )
    add_checkpoint(parser)
    add = parser.add_argument
    add(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="the text to read, at most as long as the model's context",
    )
    add(
        "--layers",
        metavar="I,J,...",
        help="layers whose attention is shown (default: as many as fit on a page)",
    )
    add(
        "--output",
        type=path_argument,
        metavar="FILE",
        help="the page to write (default: inspect.html in the directory of the run)",
    )
    return parser.parse_args(argv)


def inspect(a: argparse.Namespace) -> int:
    if a.layers is not None and not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", a.layers):
        raise UserError(f"--layers: {short(a.layers)} is not a list of layers such as 0,5")
    output = Path(a.output or Path(a.workdir, "inspect.html"))
    if a.output:
        check_output(output, "--output", ".html", ".htm")
    run = lm.load(a.workdir, a.step)
    run.require_next_token("a page of next tokens")
    from lm.interpret.measure import measure  # these import jax
    from lm.interpret.page import to_html
    from lm.training.memory import report_out_of_memory

    layers = None if a.layers is None else [int(layer) for layer in a.layers.split(",")]
    with report_out_of_memory("use a shorter --prompt or fewer --layers"):
        page = to_html(run, measure(run, a.prompt, layers))
    write_text(output, page)
    say(str(output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
