"""The arguments that name a trained model: --workdir and --step; and --trust-data, for its text."""

import argparse
import re
from typing import Any

from lm.config.values import path_argument, short
from lm.system.errors import UserError


def parse_step(text: str) -> int | str:
    """Return the value of --step: a number, or the text as it is.

    Raises:
        UserError: the text is something else.
    """
    if not re.fullmatch("best|latest|ema|(mean:)?[0-9]{1,18}", text):
        raise UserError(
            f"--step: {short(text)} is not best, latest, ema, mean:N, or the number of a step"
        )
    return int(text) if text.isdigit() else text


STEP: dict[str, Any] = {
    "type": parse_step,
    "default": "best",
    "metavar": "N|best|latest|ema|mean:N",
    "help": "checkpoint (default: best, by validation loss); ema: the average of config.train.ema at the latest step; "
    "mean:N: the mean of the newest N checkpoints",
}


def add_run(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the directory of a run to a command: as --workdir DIR, or DIR alone."""
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--workdir", type=path_argument, metavar="DIR", help=what)
    either.add_argument(
        "alone", nargs="?", type=path_argument, metavar="DIR", help="the same", action=_AsWorkdir
    )


class _AsWorkdir(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        if values is not None:  # argparse calls it for an argument that is absent, too
            namespace.workdir = values


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the run, by `add_run`, and --step to a command that reads a trained model."""
    add_run(parser, "the directory of the run, or of a Hugging Face checkpoint")
    parser.add_argument("--step", **STEP)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add --trust-data to a command that reads the text of a run."""
    what = (
        "read the files or URLs that the run names, although you have not trained with them; "
        "they are remembered"
    )
    parser.add_argument("--trust-data", action="store_true", help=what)
