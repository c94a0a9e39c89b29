"""Tokenize a large corpus into token shards, in parallel.

The input is cut into units of about --unit_mb MiB, and each unit becomes one shard per split. Finished units are kept:
rerun the same command to resume after an interruption. The output holds the shards, their tokenizer.json, and
manifest.json: the input files, the tokenizer and the shards with counts and checksums.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from lm.errors import with_exit_code
from lm.git import git_state

EXAMPLES = """examples:
  python -m lm.data.prepare --input jsonl:dump/ --tokenizer bpe:32000 --output data/dump
  python -m lm.data.prepare --input text:novel.txt --tokenizer byte --output data/novel
  python -m lm.data.prepare --verify data/dump
  python -m lm.train --config configs/gpt2_124m.py --config.data.source=tokens:data/dump \\
    --config.data.tokenizer=hf:data/dump/tokenizer.json
"""


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    a = parse_arguments(argv)
    if a.verify is not None:
        from lm.data import shards

        print(shards.verify(Path(a.verify).expanduser()))
        return 0
    from lm.data.shard_writer import Options, write_shards

    given = {name: getattr(a, name) for name in ("input", "tokenizer", "validation", "field", "workers")}
    options = Options(output=Path(a.output).expanduser(), unit_bytes=int(a.unit_mb * 2**20), **given)
    git = git_state() or {"commit": None}
    write_shards(dataclasses.replace(options, special_tokens=a.special_tokens), git["commit"])
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lm.data.prepare",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input",
        metavar="KIND:PATH",
        help="text:PATH or jsonl:PATH (a file, a folder of files, or a pattern), or tfds:DIR (a prepared dataset, "
        "which keeps its own splits)",
    )
    parser.add_argument(
        "--tokenizer", metavar="SPEC", help="byte, hf:PATH (a tokenizer.json), or bpe:SIZE to train one"
    )
    parser.add_argument(
        "--special_tokens",
        action="store_true",
        help="encode the names of special tokens in the text, such as <|endoftext|>, as these tokens, and put "
        "the tokenizer's first token (<s>) before documents; not for untrusted text (default: encode them as text)",
    )
    parser.add_argument("--output", metavar="DIR", help="directory of the shards, empty or new")
    parser.add_argument(
        "--verify", metavar="DIR", help="only compare the shards in DIR with the checksums in its manifest.json"
    )
    parser.add_argument(
        "--validation",
        type=float,
        default=0.005,
        help="expected fraction of the text in the validation split, to which documents are assigned by a hash of "
        "their text (default: %(default)s)",
    )
    parser.add_argument("--field", default="text", help="jsonl: name of the field with the text (default: %(default)s)")
    parser.add_argument("--unit_mb", type=float, default=64, help="MiB of input per shard (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="number of processes (default: all cores)")
    a = parser.parse_args(argv)
    missing = [f"--{name}" for name in ("input", "tokenizer", "output") if getattr(a, name) is None]
    if missing and a.verify is None:
        parser.error(f"the following arguments are required: {', '.join(missing)} (or --verify)")
    if not 0 <= a.validation < 1:
        parser.error("--validation must be at least 0 and below 1")
    if not 2**-20 <= a.unit_mb <= 2**20:  # from 1 byte to 1 TiB; false for NaN
        parser.error("--unit_mb must be at least one byte (0.000001) and at most 1048576")
    if a.workers < 1:
        parser.error("--workers must be at least 1")
    return a


if __name__ == "__main__":
    sys.exit(main())
