"""The command line of python -m lm.train."""

import argparse
import os
import textwrap
from collections.abc import Iterator

from lm.command_line.loading import load, overrides_of
from lm.config.convert import flatten, to_dict
from lm.config.schema import PLATFORMS, Config, schema, sections
from lm.config.values import allowed, is_address, path_argument, short, show
from lm.system.errors import UserError
from lm.system.parser import Parser
from lm.workdir.saved_run import holds_run

EPILOG = """\
examples:
  python -m lm.train --config configs/shakespeare.py
  python -m lm.train --config configs/shakespeare.py --config.train.steps=20
  python -m lm.train --config configs/shakespeare.py --config.data.source=text:novel.txt --config.model.d_model=256
  python -m lm.train --config configs/shakespeare.py --workdir runs/mine --resume
  python -m lm.train --config configs/gpt2_124m.py --plan --device h100:8

exit codes:
  0    the run finished, or was already finished
  1    a disk, a lock, a mirror or another process failed: the same command may succeed later
  2    a mistake in the arguments, config or data, or a --plan that does not fit into memory: nothing was trained
  3    the loss, a gradient or the update was not finite, or the loss is below the entropy of synthetic text
  130  Ctrl-C, and 143 SIGTERM: saved and stopped; rerun with --resume to continue

config keys, set by --config.SECTION.KEY=VALUE (the same list as tables: docs/configuration.md):
"""


CONNECT_TIMEOUT = 300  # seconds
MAX_CONNECT_TIMEOUT = 86400
DATA = ("--config.data.source=", "--config.data.mixture=")  # what a run trains on


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, Config]:
    """Return the parsed arguments (None: those of this process), and the config that they name.

    `notes` of the arguments are the lines about the config that a command shows once nothing is
    wrong with the data.

    Raises:
        UserError: with every mistake in both.
    """
    a, rest = _parser().parse_known_args(argv)
    overrides, problems = overrides_of(rest)
    problems += _problems(a, rest)
    resuming = bool(a.branch_from or a.mirror or a.plan)
    if a.resume and a.workdir and holds_run(a.workdir):
        resuming = True
    try:
        a.notes = []
        config = load(a.config, overrides, a.notes.append, resuming=resuming)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*problems)
    return a, config


def process_id(a: argparse.Namespace) -> str | None:
    """Return the number of this process in its run, as far as known before they connect."""
    if a.process_id is not None:
        return str(a.process_id)
    return os.environ.get("SLURM_PROCID", os.environ.get("OMPI_COMM_WORLD_RANK"))


def as_python(config: Config) -> str:
    """Return a config file that gives this config, with the keys that differ from their defaults."""
    defaults = flatten(to_dict(Config()))
    lines = []
    for name, value in flatten(to_dict(config)).items():
        if value != defaults[name]:
            lines.append(f"    config.{name} = {value!r}\n")
    head = "from lm.config import default_config\n\n\ndef get_config():\n"
    return f"{head}    config = default_config()\n{''.join(lines)}    return config"


def key_list() -> str:
    """Return every config key with its default, values and meaning, for --help."""
    lines = []
    leaves = schema()
    for section, cls in {"": Config, **sections()}.items():
        lines.append(f"\n{section or 'top level'}: {cls.__doc__}")
        for name, (type_, field) in leaves.items():
            if name.rpartition(".")[0] == section:
                text = f"{field.metadata['doc']} [{allowed(type_, field)}]"
                lines.append(f"  {name} = {show(field.default)}")
                lines.append(
                    textwrap.fill(text, 110, initial_indent=" " * 8, subsequent_indent=" " * 8)
                )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "train", "Train a decoder-only Transformer language model.", EPILOG + key_list()
    )
    add = parser.add_argument
    add(
        "--config",
        required=True,
        metavar="FILE",
        help=(
            "config file, such as configs/shakespeare.py; or hf:DIR: the architecture of a "
            "Hugging Face checkpoint"
        ),
    )
    add(
        "--workdir",
        type=path_argument,
        metavar="DIR",
        help="directory of the run (default: runs/NAME-TIME)",
    )
    add(
        "--resume",
        action="store_true",
        help=("resume the run in --workdir, or start it if there is none"),
    )
    add(
        "--branch_from",
        type=path_argument,
        metavar="DIR",
        help=(
            "start a run in --workdir from the last state that it shares with the run in DIR "
            "(schedule wsd)"
        ),
    )
    add(
        "--mirror",
        metavar="URL",
        help="copy each checkpoint and the metrics there in the background, through fsspec, and start an empty "
        "--workdir from it: s3://BUCKET/RUN, gs://BUCKET/RUN, file:///DIR",
    )
    add(
        "--print_config",
        choices=("python", "json"),
        help=(
            "print the config and exit: as a config file with what differs from the defaults, or "
            "resolved, as JSON"
        ),
    )
    add(
        "--print_model",
        action="store_true",
        help=(
            "print the equations and the parameters of the model, from a trace of its loss, and exit"
        ),
    )
    add("--verbose", action="store_true", help="show the table of parameters")
    add(
        "--plan",
        action="store_true",
        help="estimate memory, communication and step time on --device, and propose a mesh if config.mesh has its "
        "defaults; then exit",
    )
    add("--device", metavar="NAME:COUNT", help="with --plan: the devices, such as h100:64")
    add(
        "--slices",
        type=int,
        default=1,
        metavar="N",
        help="with --plan: number of TPU slices of the devices",
    )
    add(
        "--compiled",
        nargs="?",
        const="training",
        choices=("training", "time", "evaluation", "prefill", "decode"),
        help="with --plan: also compile the training step for these devices, with the extra [tpu] or [cuda]; time: to "
        "the end, for the compiler's estimate of the time on TPUs; or another program",
    )
    add(
        "--dump",
        metavar="DIR",
        help=("with --compiled: keep the compiler's texts in a new folder there"),
    )
    add(
        "--platform",
        choices=PLATFORMS,
        help=("required kind of device; stop if JAX finds none (default: any)"),
    )
    several = parser.add_argument_group(
        "several processes (found automatically under SLURM and mpirun)"
    )
    several.add_argument(
        "--multihost",
        action="store_true",
        help="let JAX find the processes (TPU pods; Kubernetes with extra [k8s])",
    )
    several.add_argument("--coordinator_address", metavar="HOST:PORT", help="address of process 0")
    several.add_argument("--num_processes", type=int, metavar="N", help="number of processes")
    several.add_argument(
        "--process_id", type=int, metavar="I", help="index of this process, from 0"
    )
    several.add_argument(
        "--connect_timeout",
        type=int,
        default=CONNECT_TIMEOUT,
        metavar="SECONDS",
        help="how long to wait for the other processes (default: %(default)s)",
    )
    if parser.completes:
        for name, (_, field) in schema().items():
            add(f"--config.{name}", choices=field.metadata["choices"], help=field.metadata["doc"])
    return parser


def _problems(a: argparse.Namespace, rest: list[str]) -> Iterator[str]:
    trains = not (a.plan or a.print_config or a.print_model)
    names_data = any(argument.startswith(DATA) for argument in rest)
    if a.config.startswith("hf:") and trains and not names_data:
        yield (
            f"config.data.source: {a.config} names no text, and the default is Tiny Shakespeare; "
            "give --config.data.source=text:FILE or another source"
        )
    if a.resume and not a.workdir:
        yield "--resume: name the run to resume with --workdir DIR"
    if a.branch_from and not a.workdir:
        yield "--branch_from: name the directory of the new run with --workdir DIR"
    if a.mirror is not None and not a.workdir:
        yield "--mirror: name the directory that is copied with --workdir DIR"
    if not 0 < a.connect_timeout <= MAX_CONNECT_TIMEOUT:
        yield f"--connect_timeout: give a number of seconds between 1 and {MAX_CONNECT_TIMEOUT}"
    distributed = (a.coordinator_address, a.num_processes, a.process_id)
    if any(value is not None for value in distributed) and None in distributed:
        yield (
            "--coordinator_address, --num_processes and --process_id belong together; give all "
            "three"
        )
    if (address := a.coordinator_address) and not is_address(address):
        yield (
            f"--coordinator_address: {short(address)} is not HOST:PORT; give the address of "
            "process 0"
        )
    if (a.compiled and not a.plan) or (a.dump and not a.compiled):
        yield (
            "--compiled belongs to --plan, and --dump to --compiled; give --plan --compiled "
            "--dump DIR"
        )
    if a.slices != 1 and not a.plan:
        yield "--slices belongs to --plan; a run finds its slices itself"
    if a.plan != bool(a.device):
        yield (
            "--plan and --device NAME:COUNT belong together; give both, such as --plan --device "
            "h100:64"
        )
