"""Evaluate a model on a split of its own text or of another one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from lm.config import Config
from lm.data import Corpus, Split, open_corpus, shards
from lm.errors import UserError
from lm.files import read_json
from lm.scoring.predictions import score_split
from lm.scoring.scores import Scores
from lm.trained_model import TrainedModel

_RUN = {"data": ({"fingerprint": str}, None)}  # of run.json


@dataclasses.dataclass(frozen=True)
class TextResult:
    """The evaluation of one text.

    Attributes:
        source: the text, as in config.data.source.
        name: the short name of the text.
        split: the part of it that was evaluated.
        plain: the scores in consecutive windows, as in training.
        sliding: the scores in sliding windows; None without a stride.
    """

    source: str
    name: str
    split: str
    plain: Scores
    sliding: Scores | None


def evaluate(
    run: TrainedModel,
    split: str = "test",
    *,
    data: str | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
    say: Callable[[str], None] = print,
    progress: Callable[[str], Callable[[int, int], None]] = lambda title: lambda done, total: None,
) -> TextResult:
    """Evaluate a model on a split of a text.

    Args:
        run: the model, as `lm.load` returns it.
        split: "train", "validation" or "test"; "validation+test" joins two, and "all" joins all splits.
        data: the text, as config.data.source; None: the text of the run. It is encoded with the model's tokenizer.
        stride: evaluate in sliding windows with this distance, too.
        batch_size: windows per batch; None: as many as have about 8,000 tokens.
        say: receives lines of information and warnings.
        progress: called with the title of each pass over the text; what it returns is called after each batch with the
            number of windows that are finished and the number of all windows.

    Raises:
        UserError: if the text cannot be read or encoded, has no such split or too few tokens, or the stride is out of
            range.
    """
    corpus, tokens = open_text(run, split, data=data, stride=stride, say=say)
    return score_text(run, corpus, tokens, data, stride=stride, batch_size=batch_size, progress=progress)


def open_text(
    run: TrainedModel, split: str, *, data: str | None, stride: int | None, say: Callable[[str], None]
) -> tuple[Corpus, Split]:
    """Open a text, and check everything that can be checked before the model runs; see `evaluate`."""
    is_own = data in (None, run.config.data.source)
    if data is None and not (run.path / "checkpoints").is_dir():
        raise UserError(f"--data: {run.path} is not a run with a text of its own; name a text")
    corpus = _open_corpus(run, data or run.config.data.source, is_own=is_own, say=say)
    if is_own and corpus.fingerprint != (fingerprint := _trained_on(run.path)) and fingerprint:
        say(f"WARNING: the text or the tokens of {corpus.name} have changed since {run.path} trained on them")
    try:
        found = corpus.split("+".join(corpus.splits) if split == "all" else split)
    except UserError as error:
        raise UserError(f"--split: {error}; all joins them") from None
    _check_split(run.config, corpus, found)
    if stride is not None and corpus.packed:
        raise UserError(f"--stride: {run.path} packs documents into rows, and is evaluated in these rows; leave it out")
    if stride is not None and not 1 <= stride <= run.seq_len:
        raise UserError(f"--stride: {stride} must be at least 1 and at most {run.seq_len}, the context of this model")
    return corpus, found


def _open_corpus(run: TrainedModel, source: str, *, is_own: bool, say: Callable[[str], None]) -> Corpus:
    """Open a text with the tokenizer of the model, and with its splits and packing."""
    config = run.config.data
    if run.tokenizer is None and not source.startswith("tokens:"):
        raise UserError(f"--data: {run.path} was trained on token ids and has no tokenizer; give tokens:PATH")
    # These directories may not exist on this machine.
    directories = {name: path for name in ("data_dir", "cache_dir") if (path := getattr(config, name))}
    missing = {name: None for name, path in directories.items() if not Path(path).expanduser().is_dir()}
    config = dataclasses.replace(config, source=source, **missing)
    if not is_own:
        config = dataclasses.replace(config, offline=None)
        if source.startswith("tokens:"):
            config = dataclasses.replace(config, packing="none")
    try:
        return open_corpus(config, seq_len=run.seq_len, tokenizer=run.tokenizer, say=say)
    except UserError as error:
        error.problems = tuple(line.replace("config.data.source:", "--data:") for line in error.problems)
        raise


def _trained_on(path: Path) -> str | None:
    """Return the fingerprint of the tokens that a run trained on, None if it is not known."""
    try:
        return (read_json(path / "run.json", _RUN)["data"] or {}).get("fingerprint")
    except FileNotFoundError:
        return None


def _check_split(config: Config, corpus: Corpus, split: Split) -> None:
    """Raise UserError if a split is shorter than a window, or has tokens that the model does not know."""
    n, window, vocab_size = len(split.tokens), config.train.seq_len + 1, config.model.vocab_size
    advice = "use a longer text, or --split all"
    if split.packed and not n:
        raise UserError(f"--data: the {split.name} split of {corpus.name} has no document of two tokens; {advice}")
    if not split.packed and n < window:
        raise UserError(
            f"--data: the {split.name} split of {corpus.name} has {n:,} tokens, and this model needs windows of "
            f"{window:,}; {advice}"
        )
    if not corpus.ids_are_checked and (largest := shards.largest_id(split.tokens)) >= vocab_size:
        raise UserError(
            f"--data: the {split.name} split of {corpus.name} has the id {largest}, and the vocabulary of this model "
            f"has {vocab_size}; the shards are of another tokenizer"
        )


def score_text(
    run: TrainedModel,
    corpus: Corpus,
    split: Split,
    data: str | None,
    *,
    stride: int | None,
    batch_size: int | None,
    progress: Callable[[str], Callable[[int, int], None]],
) -> TextResult:
    """Evaluate a model on an open text; see `evaluate`."""

    def score(stride: int | None, windows: str) -> Scores:
        report = progress(f"{corpus.name}, {split.name} split, {windows}")
        return score_split(run.params, run.config, split, stride=stride, batch_size=batch_size, report=report)

    plain = score(None, "windows as in training")
    sliding = None if stride is None else score(stride, f"stride {stride}")
    return TextResult(data or run.config.data.source, corpus.name, split.name, plain, sliding)
