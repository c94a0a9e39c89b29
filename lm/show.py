"""Print the text that a step of a run trained on: python -m lm.show --workdir runs/mine --step 214"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lm.command_line.checkpoint import add_run, add_trust
from lm.config import Config, from_dict
from lm.data import Corpus, batches, open_corpus, trusted
from lm.system.errors import UserError, with_exit_code
from lm.system.parser import Parser
from lm.system.text_tables import for_terminal, say, write
from lm.workdir.saved_run import read_run


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(
        "show",
        "Print the examples of a step of a run, which are computed again from its text and config.",
    )
    add_run(parser, "directory of the run")
    parser.add_argument(
        "--step",
        default=1,
        type=int,
        metavar="N",
        help="as in metrics.jsonl (default: 1, the first)",
    )
    add_trust(parser)
    a = parser.parse_args(argv)
    saved = read_run(Path(a.workdir))
    config = from_dict(saved.config)
    if not 1 <= a.step <= config.train.steps:
        raise UserError(
            f"--step: {a.step} is not a step of this run; use 1 to {config.train.steps}"
        )
    if a.trust_data:
        trusted.remember(config.data)
    trusted.check(config.data, a.workdir)
    data = trusted.local(config.data)
    corpus = open_corpus(data, seq_len=config.train.seq_len, say=lambda line: say(line, sys.stderr))
    if saved.data and saved.data["fingerprint"] != corpus.fingerprint:
        raise UserError(
            f"--workdir: {a.workdir} trained on {saved.data['name']}, and the data now "
            f"({corpus.name}) has other text or other tokens; restore the data"
        )
    for example in examples(corpus, config, a.step):
        write(example + "\n")
    return 0


def examples(corpus: Corpus, config: Config, step: int) -> Iterator[str]:
    """Yield each example of a step: a line on its place in the train split, and its text, or its
    ids as numbers.

    Documents of a packed row are separated by blank lines. If only some tokens are targets, they
    are in [[ and ]].
    """
    split = corpus.split("train")
    starts = batches.window_starts(split, config, step - 1)
    batch = batches.gather(split.arrays, starts, config.train.seq_len)
    for i, (start, ids) in enumerate(zip(starts.tolist(), batch["tokens"], strict=True)):
        part = next(part for part in reversed(split.all_parts) if part.start <= start)
        place = (
            f"{'row' if split.packed else 'token'} "
            f"{start - part.start:,}{f' of {part.name}' * bool(part.name)}"
        )
        own = [slice(None)]
        if split.packed:
            segments = batch["segments"][i]
            own = [segments == number for number in np.unique(segments[segments > 0])]
        decode = (
            corpus.tokenizer.decode if corpus.tokenizer else lambda ids: " ".join(map(str, ids))
        )
        if split.targets:
            texts = [mark(decode, ids[at], batch["is_target"][i][at]) for at in own]
        else:
            texts = [decode(ids[at]) for at in own]
        text = for_terminal("\n\n".join(texts))
        yield f"---- example {i + 1} of step {step}: {place} ----\n{text}"


def mark(decode: Callable, ids: np.ndarray, is_target: np.ndarray) -> str:
    """Return the text of ids, with those that are targets between [[ and ]].

    >>> mark(lambda ids: "".join(map(chr, ids)), np.array([65, 66, 67]), np.array([0, 1, 1]))
    'A[[BC]]'
    """
    borders = np.flatnonzero(np.diff(is_target)) + 1
    stretches = zip(np.split(ids, borders), np.split(is_target, borders), strict=True)
    return "".join(
        f"[[{decode(part)}]]" if flags.any() else decode(part) for part, flags in stretches
    )


if __name__ == "__main__":
    sys.exit(main())
