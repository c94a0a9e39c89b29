"""Exchange models with Hugging Face: python -m lm.hf import|export|check."""

import argparse
import sys

from lm.command_line.checkpoint import STEP, add_run
from lm.config.values import MAX_INT, path_argument, short
from lm.system.errors import UserError, with_exit_code
from lm.system.parser import BothSpellings, Parser

EPILOG = """\
examples:
  python -m lm.hf import Qwen3-0.6B --workdir runs/qwen3
  python -m lm.hf export --workdir runs/mine --output mine-hf
  python -m lm.hf export --workdir runs/idea --output idea-hf --code   # of a model that no family has
  python -m lm.hf check mine-hf
  python -m lm.train --config hf:Llama-3.2-1B --print_config python > configs/llama.py

Checkpoints are local directories; nothing is downloaded. docs/huggingface.md lists the supported models.

exit codes: 0 finished; 1 a file cannot be read at the moment; 2 invalid arguments, or a model that is not supported;
3 check: the logits differ; 130 Ctrl-C.
"""


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parse_arguments(argv)
    return arguments.run(arguments)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        "hf",
        "Exchange models with Hugging Face's transformers: safetensors, config.json, "
        "tokenizer.json.",
        EPILOG,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=BothSpellings)

    def command(name, run, text):
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(run=run)
        return added.add_argument

    add = command(
        "import",
        import_,
        "write the directory of a run with the weights and tokenizer of a checkpoint",
    )
    add("directory", type=path_argument, metavar="DIR", help="the directory of the checkpoint")
    add(
        "--workdir", required=True, type=path_argument, metavar="DIR", help="the directory to write"
    )
    add(
        "--seq-len",
        type=int,
        metavar="N",
        help="positions that the model uses (default: the checkpoint's, at most 2048)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of parameters and computation (default: as stored)",
    )

    add = command(
        "export", export, "write the model of a run as a checkpoint that transformers loads"
    )
    add_run(commands.choices["export"], "the directory of the run")
    add("--output", required=True, type=path_argument, metavar="DIR", help="the directory to write")
    add("--step", **STEP)
    add(
        "--code",
        action="store_true",
        help="also write the model as one file in PyTorch (modeling_lm.py) with the equations of "
        "its config, for models that no family of transformers computes; it is loaded with "
        "trust_remote_code=True",
    )

    add = command(
        "check",
        check,
        "compare our logits with those of transformers, layer by layer (needs torch)",
    )
    add(
        "directory",
        type=path_argument,
        metavar="DIR",
        help="the directory of the checkpoint; export a run first",
    )
    add(
        "--workdir",
        type=path_argument,
        metavar="RUN",
        help="compare the weights of this run, exported to DIR; needed after --code",
    )
    add("--step", **STEP)
    add(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="largest accepted difference of logits (default: 0.001)",
    )
    return parser.parse_args(argv)


def import_(a: argparse.Namespace) -> int:
    if a.seq_len is not None and not 1 <= a.seq_len <= MAX_INT:
        raise UserError(f"--seq-len: {short(a.seq_len)} must be at least 1 and at most {MAX_INT}")
    start_jax()
    from lm.command_line.exchange import import_checkpoint
    from lm.training.memory import report_out_of_memory

    with report_out_of_memory("use --dtype bfloat16"):
        import_checkpoint(a.directory, a.workdir, seq_len=a.seq_len, dtype=a.dtype)
    return 0


def export(a: argparse.Namespace) -> int:
    start_jax()
    from lm.command_line.exchange import export_run

    export_run(a.workdir, a.output, a.step, code=a.code)
    return 0


def check(a: argparse.Namespace) -> int:
    start_jax()
    from lm.command_line.exchange import compare

    return 0 if compare(a.directory, a.workdir, a.step, a.tolerance) else 3


def start_jax() -> None:
    """Import jax with this package's settings."""
    from lm.system import runtime

    runtime.start_jax(retain_memory=False)
    runtime.require_platform(None)


if __name__ == "__main__":
    sys.exit(main())
