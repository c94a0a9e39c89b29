"""The command line of python -m lm.train."""

import argparse
import re
import textwrap

from lm.config import Config, schema
from lm.config.loading import load
from lm.errors import UserError

EPILOG = """\
examples:
  python -m lm.train --config configs/shakespeare.py
  python -m lm.train --config configs/shakespeare.py --config.model.d_model=256 --config.train.steps=2000
  python -m lm.train --config configs/shakespeare.py --workdir runs/mine --resume

exit codes: 0 finished; 1 a disk or another process failed, or holds the workdir: the same command may go on later;
2 a mistake in what was asked; 3 the loss or a gradient was not finite; 130 (Ctrl-C) and 143 (SIGTERM) saved and
stopped, --resume goes on.

config keys (--config.SECTION.KEY=VALUE), their defaults and meaning:
"""


def command_line(argv: list[str] | None) -> tuple[argparse.Namespace, Config]:
    """The parsed arguments and the config they ask for; raises UserError with everything that is wrong with them."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.train",
        description="Train a decoder-only Transformer language model.",
        epilog=EPILOG + key_list(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a config file, such as configs/shakespeare.py")
    parser.add_argument("--workdir", metavar="DIR", help="where the run lives (runs/NAME-TIME)")
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --workdir, or start it if there is none"
    )
    parser.add_argument("--verbose", action="store_true", help="show the table of parameters")
    several = parser.add_argument_group("several processes (recognized by themselves under SLURM and mpirun)")
    several.add_argument(
        "--multihost", action="store_true", help="ask JAX who the others are (TPU pods; Kubernetes, with extra [k8s])"
    )
    several.add_argument("--coordinator_address", metavar="HOST:PORT", help="of process 0, if JAX cannot know")
    several.add_argument("--num_processes", type=int, metavar="N")
    several.add_argument("--process_id", type=int, metavar="I")
    parser.add_argument("--plan", action="store_true", help="print what the run would take on --device, and stop")
    parser.add_argument("--device", metavar="NAME:COUNT", help="with --plan: the machines, h100:64 for example")
    arguments, rest = parser.parse_known_args(argv)
    overrides = [argument.removeprefix("--config.") for argument in rest if argument.startswith("--config.")]
    problems = [
        f"{argument}: unexpected argument; config values are set with --config.SECTION.KEY=VALUE"
        for argument in rest
        if not argument.startswith("--config.")
    ]
    if arguments.resume and not arguments.workdir:
        problems.append("--resume: say which run to continue with --workdir DIR")
    named = (arguments.coordinator_address, arguments.num_processes, arguments.process_id)
    if any(value is not None for value in named) and None in named:
        problems.append("--coordinator_address, --num_processes and --process_id belong together; give all three")
    if (address := arguments.coordinator_address) and not re.fullmatch(r".+:\d+", address):
        problems.append(f"--coordinator_address: {address!r} is not HOST:PORT, where process 0 is to listen")
    if arguments.plan != bool(arguments.device):
        problems.append("--plan and --device NAME:COUNT belong together; --plan --device h100:64, for example")
    try:
        config = load(arguments.config, overrides)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*problems)
    return arguments, config


def key_list() -> str:
    """Every config key with its default and meaning, for --help."""
    lines = []
    for name, (_, field) in schema().items():
        lines.append(f"  {name} = {field.default!r}")
        words = field.metadata["doc"] + (
            f" [{' | '.join(field.metadata['choices'])}]" if field.metadata["choices"] else ""
        )
        lines.append(textwrap.fill(words, 110, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return "\n".join(lines)
