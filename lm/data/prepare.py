"""Tokenize a large corpus into token shards, in parallel.

The input is divided into units of about --unit_mb MiB, parts of a file or several small files, and
each unit becomes at least one shard per split. Finished units are kept: rerun the same command to
resume after an interruption. The output holds the shards, their tokenizer.json, and manifest.json:
the input files, the tokenizer and the shards with counts and checksums.
"""

import argparse
import os
import sys
from pathlib import Path

from lm.system.errors import UserError, lasting_output, with_exit_code
from lm.system.files import expanded, refuse_url
from lm.system.git import git_state
from lm.system.parser import Parser
from lm.system.text_tables import say

EXAMPLES = """examples:
  python -m lm.data.prepare --input parquet:fineweb/ --tokenizer bpe:32000 --output data/fineweb --deduplicate
  python -m lm.data.prepare --input hf:wikitext --tokenizer hf:tokenizer.json --output data/wikitext
  python -m lm.data.prepare --input jsonl:dump/ --input text:books/ --tokenizer bpe:32000 --output data/dump
  python -m lm.data.prepare --input text:novel.txt --tokenizer byte --output data/novel
  python -m lm.data.prepare --verify data/dump
  python -m lm.train --config configs/gpt2_124m.py --config.data.source=tokens:data/dump \\
    --config.data.tokenizer=hf:data/dump/tokenizer.json
"""
OPTIONS = {
    "config.data.source": "--input",
    "--config.data.field": "--field",
    "config.data.tokenizer": "--tokenizer",
}


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    a = parse_arguments(argv)
    if a.verify is not None:
        from lm.data import shards

        say(shards.verify(Path(expanded(a.verify))))
        return 0
    from lm.data.shard_writer import write_shards

    refuse_url(a.output, "--output")
    a.output = Path(expanded(a.output))
    try:
        with lasting_output():
            write_shards(a, (git_state() or {"commit": None})["commit"])
    except UserError as error:  # with the keys of a config that also reads text
        for key, option in OPTIONS.items():
            error.problems = tuple(problem.replace(key, option) for problem in error.problems)
        raise
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("data.prepare", __doc__, EXAMPLES)
    add = parser.add_argument
    inputs = (
        "text:PATH, jsonl:PATH, csv:PATH, parquet:PATH or arrow:PATH (a file, a folder of files, a "
        "pattern or a URL); hf:DIR (a data set of Hugging Face) or tfds:DIR (one of TFDS), which "
        "keep their own splits; may be repeated, and all are read, in this order"
    )
    special_tokens = (
        "encode the names of special tokens in the text, such as <|endoftext|>, as these tokens, "
        "and put the tokenizer's first token (<s>) before documents; not for untrusted text "
        "(default: encode them as text)"
    )
    validation = (
        "expected fraction of the text in the validation split, to which documents are assigned by "
        "a hash of their text, unless the data set has such a split (default: %(default)s)"
    )
    add("--input", action="append", metavar="KIND:PATH", help=inputs)
    add(
        "--tokenizer",
        metavar="SPEC",
        help="byte, hf:PATH (a tokenizer.json), or bpe:SIZE to train one",
    )
    add("--special_tokens", action="store_true", help=special_tokens)
    add("--output", metavar="DIR", help="directory of the shards, empty or new")
    add(
        "--verify",
        metavar="DIR",
        help="only compare the shards in DIR with the checksums in its manifest.json",
    )
    add("--validation", type=float, default=0.005, help=validation)
    add(
        "--field",
        default="text",
        help="name of the field or column with the text (default: %(default)s)",
    )
    add(
        "--min_chars",
        type=int,
        default=1,
        help="leave out shorter documents (default: %(default)s)",
    )
    add("--max_chars", type=int, help="leave out longer documents (default: none)")
    add("--deduplicate", action="store_true", help="keep the first of documents with the same text")
    add("--unit_mb", type=float, default=64, help="MiB of input per unit (default: %(default)s)")
    add(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="number of processes (default: all cores)",
    )
    a = parser.parse_args(argv)
    missing = [f"--{name}" for name in ("input", "tokenizer", "output") if getattr(a, name) is None]
    if missing and a.verify is None:
        parser.error(f"the following arguments are required: {', '.join(missing)} (or --verify)")
    if not 0 <= a.validation < 1:
        parser.error("--validation must be at least 0 and below 1")
    if not 2**-20 <= a.unit_mb <= 2**20:  # from 1 byte to 1 TiB; false for NaN
        parser.error("--unit_mb must be at least one byte (0.000001) and at most 1048576")
    if not 1 <= a.min_chars <= (a.max_chars or a.min_chars):
        parser.error("--min_chars must be at least 1, and --max_chars at least --min_chars")
    if a.workers < 1:
        parser.error("--workers must be at least 1")
    return a


if __name__ == "__main__":
    sys.exit(main())
