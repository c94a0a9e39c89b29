"""Evaluate a trained model: python -m lm.evaluate --workdir runs/NAME."""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

import lm
from lm.command_line.checkpoint import add_checkpoint, add_trust
from lm.config.values import short
from lm.data import trusted
from lm.system.errors import UserError, with_exit_code
from lm.system.files import expanded, make_folder, to_json, write_text
from lm.system.parser import Parser
from lm.system.text_tables import say, without_secrets, write

EPILOG = """\
examples:
  python -m lm.evaluate --workdir runs/mine
  python -m lm.evaluate --workdir runs/mine --split validation+test --stride 64
  python -m lm.evaluate --workdir runs/mine --data text:novel.txt --split all
  python -m lm.evaluate --workdir runs/mine --data tfds:tiny_shakespeare --data text:novel.txt --json

Another text is encoded with the tokenizer of the run and cut into splits like the text of the run. With --stride N, the
text is also evaluated in overlapping windows, so that each token has at least seq_len - N + 1 tokens of context, if
that many come before it. docs/evaluation.md explains all numbers.

exit codes: 0 finished; 1 a file cannot be read or written at the moment; 2 invalid arguments; 3 a loss below the
entropy of synthetic text; 130 Ctrl-C.
"""
MAX_BYTES = 120  # of the sources, in the name of a file


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    what = (
        "Evaluate a trained model: loss, perplexity, bits per byte and accuracy, with standard "
        "errors."
    )
    parser = Parser("evaluate", what, EPILOG)
    add_checkpoint(parser)
    add = parser.add_argument
    splits = "train, validation, test, a+b to join two, or all (default: test)"
    add("--split", default="test", metavar="NAME", help=splits)
    data = (
        "a text, see config.data.source, or the name of a source of the run's mixture; may be "
        "repeated (default: the run's)"
    )
    add("--data", action="append", metavar="SOURCE", help=data)
    add(
        "--seq-len",
        type=int,
        metavar="N",
        help="tokens that the model sees at once (default: train.seq_len)",
    )
    add(
        "--stride", type=int, metavar="N", help="also evaluate in windows that begin N tokens apart"
    )
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="windows per batch (default: as many as have about 8,000 tokens)",
    )
    add("--no-baselines", action="store_true", help="do not compute the losses of n-gram models")
    add_trust(parser)
    add(
        "--output",
        metavar="DIR",
        help="directory for the results (default: evaluation/ in --workdir)",
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(argv)


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    a = parse_arguments(argv)
    if a.batch_size is not None and not 1 <= a.batch_size < 2**31:
        raise UserError(
            f"--batch-size: {short(a.batch_size)} must be at least 1 and less than 2**31"
        )
    sources = a.data or []
    if repeated := {source for source in sources if sources.count(source) > 1}:
        raise UserError(f"--data: {min(repeated)} is given twice")
    run = lm.load(a.workdir, a.step)
    if a.trust_data:
        trusted.remember(run.config.data)
    from lm.scoring import texts  # imports jax
    from lm.training.memory import report_out_of_memory

    run = texts.with_seq_len(run, a.seq_len)
    texts.check_stride(run, a.stride)
    opened = [
        texts.open_text(run, a.split, source, print_line)
        for source in sources or texts.own_texts(run)
    ]
    output = Path(expanded(a.output)) if a.output else run.path / "evaluation"
    try:
        output.mkdir(parents=True, exist_ok=True) if a.output else make_folder(output)
    except OSError as error:
        raise UserError(
            f"--output: {output} cannot be created ({error.strerror}); give another one"
        ) from None
    if not os.access(output, os.W_OK):
        raise UserError(f"--output: {output} is not writable; give another one")
    options = {"stride": a.stride, "batch_size": a.batch_size}
    with report_out_of_memory("use --no-baselines"):
        baselines = (
            [{}] * len(opened) if a.no_baselines else texts.find_baselines(run, opened, print_line)
        )
    with report_out_of_memory("use a smaller --batch-size"):
        results = [
            texts.score_text(run, *pair, **options) for pair in zip(opened, baselines, strict=True)
        ]
    show(a, run, results, output)
    return 0


def print_line(line: str) -> None:
    """Print information that is not a result."""
    say(line, sys.stderr)


def show(a: argparse.Namespace, run, results: list, output: Path) -> None:
    """Print the results, and write them as JSON."""
    from lm.scoring import report

    record = {
        "run": a.workdir,
        "step": run.step,
        "seq_len": run.seq_len,
        "texts": list(map(report.to_record, results)),
    }
    if mean := report.weighted_mean(results):
        record["weighted_mean_loss"] = mean.value
    if a.json:
        write(to_json(record, indent=2) + "\n")
    else:
        say(f"{a.workdir}, step {run.step}, {a.split} split, context of {run.seq_len:,} tokens\n")
        say(report.losses_table(results))
        say("\n".join(report.footnotes(results)))
        say("\nloss by tokens of context, consecutive windows\n")
        say(report.context_table(results))
    path = output / file_name(run.step, a.split, a.data or [], seq_len=a.seq_len, stride=a.stride)
    write_text(path, to_json(record, indent=2) + "\n")
    print_line(f"written: {path}")


def file_name(step: int | str, split: str, sources: list[str], **windows: int | None) -> str:
    """Return the name of the file of an evaluation.

    >>> file_name(600, "test", ["text:novel.txt"], seq_len=None, stride=64)
    'step_600_test_text_novel_txt_stride_64.json'
    """
    names = "_".join(
        re.sub(r"[^\w+-]+", "_", source).strip("_") for source in without_secrets(sources)
    )
    if len(names.encode()) > MAX_BYTES:
        digest = hashlib.sha256(names.encode()).hexdigest()[:8]
        names = names.encode()[-MAX_BYTES:].decode(errors="ignore") + f"_{digest}"
    numbers = [f"{name}_{value}" for name, value in windows.items() if value is not None]
    return "_".join(filter(None, [f"step_{step}", split, names, *numbers])) + ".json"


if __name__ == "__main__":
    sys.exit(main())
