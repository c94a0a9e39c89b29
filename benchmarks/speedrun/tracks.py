"""The tracks, and what all runs have in common: the texts, the splits, and the limits of the config."""

import dataclasses
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.command_line.loading import load
from lm.config import Config, DataConfig
from lm.config.convert import flatten, to_dict
from lm.config.schema import SPLITS
from lm.config.values import show
from lm.data import python_docs, shakespeare, sources
from lm.errors import UserError

MAX_CONTEXT = 256  # characters that a prediction may depend on
CORES = 2
MIN_RUNS = 5
P = 0.01  # the p-value of a record must be below this
FRACTIONS = (0.9, 0.1, 0.0)  # of the text: train, validation, no test
# Python's documentation as the records were tuned on it. It differs a little between releases of Python.
TUNING_PYTHON, TUNING_SHA256 = "3.11.7", "c2a5f3033799f66678b9adfb2f5f142cddf076bd0018a88477f45f0e09e7de2a"


@dataclasses.dataclass(frozen=True)
class Track:
    """A loss to be reached.

    Attributes:
        target: nats per character; the mean loss of a record's runs is below it.
        clock: "cpu" or "wall", the seconds by which records are ordered.
        wall_limit: seconds that a run may take, None for any.
    """

    target: float
    clock: str
    wall_limit: float | None = None


TRACKS = {
    # The loss of the CPU run in nanoGPT's README, which takes about 3 minutes on a laptop.
    "nanogpt-cpu": Track(1.88, "cpu"),
    # The loss of the GPU run in nanoGPT's README: 10.7 million parameters, 3 minutes on an A100.
    "shakespeare-2-cores": Track(1.4697, "wall", wall_limit=15 * 60),
}


# ---- Texts -----------------------------------------------------------------------------------------------------------


def scored_text(path: Path | None) -> bytes:
    """Return Tiny Shakespeare, from its input.txt or from a TFDS directory (downloaded if it is missing).

    Raises:
        UserError: the file is missing or has other content, or the text cannot be downloaded.
    """
    if path is None:
        source = sources.find_source(DataConfig(), print)
        content = "".join(text for split in SPLITS for text in source.documents[split]).encode()
    elif path.is_file():
        content = path.read_bytes()
    else:
        raise UserError(f"--text: {path} is not a file; give Tiny Shakespeare's input.txt, from {shakespeare.URL}")
    if (found := sha256(content)) != shakespeare.SHA256:
        expected = f"{shakespeare.SHA256[:12]}...; give the file at {shakespeare.URL}"
        raise UserError(f"--text: sha256 {found[:12]}... instead of {expected}")
    return content


def tuning_text() -> bytes:
    """Return the beginning of Python's documentation, as long as Tiny Shakespeare; warn if it is of another release."""
    content = "".join(python_docs.documents()).encode()[: shakespeare.SIZE]
    if sha256(content) != TUNING_SHA256:
        print(f"WARNING: Python's documentation is not that of CPython {TUNING_PYTHON}; losses differ", file=sys.stderr)
    return content


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def n_predicted(content: bytes) -> int:
    """Return the number of predicted characters: all of the validation split but the first.

    >>> n_predicted(b"x" * 1_115_394)
    111539
    """
    return len(content) - int(len(content) * FRACTIONS[0]) - 1


# ---- Configs ---------------------------------------------------------------------------------------------------------


def forced_values() -> dict[str, Any]:
    """Return the values that the rules set in every run, by dotted name; text, seed and caches are set for each run."""
    return {
        "data.splits": FRACTIONS, "data.tokenizer": "char", "data.unk": False,
        "data.packing": "none", "data.offline": None, "eval.every": 0,
        "eval.final_splits": ("test",),  # there is no such split: a run does not evaluate, and is scored after its end
    }  # fmt: skip


def load_config(path: str, overrides: list[str]) -> Config:
    """Return the config of a file as its runs use it, apart from text, seed and caches.

    Raises:
        UserError: the config has mistakes or is against the rules.
    """
    config = load(path, [*overrides, *(f"{name}={show(value)}" for name, value in forced_values().items())])
    if problems := list(_against_the_rules(config)):
        raise UserError(*problems)
    return config


def _against_the_rules(config: Config) -> Iterator[str]:
    if config.init_from is not None:
        yield f"config.init_from: {config.init_from}, but a run starts from random initial values; use none"
    if config.train.seq_len > MAX_CONTEXT:
        yield f"config.train.seq_len: {config.train.seq_len}, but the context is at most {MAX_CONTEXT} characters"
    if config.train.steps == 0:
        yield "config.train.steps: 0 trains nothing; use at least 1"


def describe(config: Config) -> dict[str, Any]:
    """Return what a config changes, by dotted name, without what the rules set and without names."""
    left_out = {*forced_values(), "data.source", "data.cache_dir", "data.data_dir", "train.seed", "name", "notes"}
    defaults = flatten(to_dict(Config()))
    values = {name: value for name, value in flatten(to_dict(config)).items() if name not in left_out}
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
