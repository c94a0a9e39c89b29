"""Evaluate a model on a split of its own text, or of another one."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lm.baselines.ngrams import ngram_losses
from lm.data import Corpus, Split, mixtures, open_corpus, trusted
from lm.data.corpus import largest_id
from lm.data.entropy_floor import check_loss
from lm.scoring.means import TextMeans
from lm.scoring.predictions import score_split
from lm.system.errors import UserError
from lm.system.files import read_json
from lm.system.text_tables import without_secrets
from lm.trained_model import TrainedModel
from lm.workdir.saved_run import WEIGHTS_OF

# Shapes of run.json and config.json; see `lm.system.files.read_json`.
_RUN = {"data": ({"fingerprint": str}, None)}
_CONFIG = {"train": {"seq_len": int}}


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to evaluate: its source, as in config.data.source, and the tokens of a split.

    `name` and `weight` are those of a source of the run's mixture; "" and None for other texts.
    """

    source: str
    corpus: Corpus
    split: Split
    name: str = ""
    weight: float | None = None

    def __str__(self) -> str:
        return f"the {self.split.name} split of {self.corpus.name}"


@dataclasses.dataclass(frozen=True)
class TextResult:
    """The evaluation of one text."""

    text: Text
    plain: TextMeans  # in consecutive windows, as in the evaluation of a run
    sliding: TextMeans | None  # in sliding windows; None without a stride
    # losses of unigram to trigram models of the run's train split, in nats per token
    baselines: dict[str, float]
    is_bound: bool = False  # of masked diffusion


def evaluate(
    run: TrainedModel,
    split: str = "test",
    *,
    data: str | None = None,
    seq_len: int | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
    baselines: bool = True,
    say: Callable[[str], None] = print,
) -> TextResult:
    """Evaluate a model on a split of a text.

    Args:
        run: the model, as `lm.load` returns it.
        split: "train", "validation" or "test"; "validation+test" joins two, and "all" joins all
            splits.
        data: the text, as in config.data.source, or the name of a source of the run's mixture;
            None: the text of the run. It is encoded with the model's tokenizer.
        seq_len: tokens that the model sees at once; None: as many as in training.
        stride: also evaluate in sliding windows, which begin this many tokens apart.
        batch_size: windows per batch; None: as many as have about 8,000 tokens.
        baselines: also compute the losses of n-gram models.
        say: receives lines of information and warnings.

    Raises:
        UserError: if the text cannot be read or encoded, has no such split or too few tokens, or
            seq_len or the stride is out of range.
        BelowEntropy: see `score_text`.
    """
    run = with_seq_len(run, seq_len)
    check_stride(run, stride)
    text = open_text(run, split, data, say)
    (losses,) = find_baselines(run, [text], say) if baselines else [{}]
    return score_text(run, text, losses, stride=stride, batch_size=batch_size)


def score_text(
    run: TrainedModel,
    text: Text,
    baselines: dict[str, float],
    *,
    stride: int | None = None,
    batch_size: int | None = None,
) -> TextResult:
    """Evaluate a model on an open text; `baselines` are losses of other models, nats per token.

    For the stride and the batch size see `evaluate`.

    Raises:
        BelowEntropy: the loss is below that of the best possible model, where it is known
            (`lm/data/entropy_floor.py`).
    """

    def score(stride: int | None, windows: str) -> TextMeans:
        title = f"{text}, {windows}"
        means = score_split(
            run.params, run.config, text.split, stride=stride, batch_size=batch_size, title=title
        )
        is_estimate = run.config.model.masked_diffusion
        check_loss(text.split, means.loss.value, means.tokens, is_estimate=is_estimate)
        return means

    plain = score(None, f"windows of {run.seq_len}")
    sliding = None if stride is None else score(stride, f"stride {stride}")
    return TextResult(text, plain, sliding, baselines, run.config.model.masked_diffusion)


def with_seq_len(run: TrainedModel, seq_len: int | None) -> TrainedModel:
    """Return a model that sees this many tokens at once, at most those of training; None: all."""
    if seq_len is None:
        return run
    if not 1 <= seq_len <= run.seq_len:
        raise UserError(
            f"--seq-len: {seq_len} must be at least 1 and at most {run.seq_len}, as in training"
        )
    train = dataclasses.replace(run.config.train, seq_len=seq_len)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, train=train))


def check_stride(run: TrainedModel, stride: int | None) -> None:
    """Raise UserError if a model cannot be evaluated in windows with this distance."""
    if stride is not None and not 1 <= stride <= run.seq_len:
        raise UserError(
            f"--stride: {stride} must be at least 1 and at most {run.seq_len}, the length of a "
            "window"
        )
    if stride is not None and run.config.data.packing == "documents":
        raise UserError(
            f"--stride: {run.path} packs documents into rows and is evaluated in these rows; leave "
            "out the stride"
        )


def own_texts(run: TrainedModel) -> dict[str | None, tuple[str, float | None]]:
    """Return the source and weight of each text of a run, by name; both None without a mixture."""
    data = run.config.data
    if not data.mixture:
        return {None: (data.source, None)}
    shares = zip(data.mixture, mixtures.weights(data), strict=True)
    return {name: (source, share) for (name, source, _), share in shares}


def open_text(run: TrainedModel, split: str, data: str | None, say: Callable[[str], None]) -> Text:
    """Open a text, and check it before the model runs; see `evaluate`.

    A text that only the run names is read if the user has trained with it; see
    `lm/data/trusted.py`.
    """
    own = own_texts(run)
    if data is None and not _has_text(run):
        raise UserError(
            f"--data: {run.path} has no text of its own; give one, such as text:novel.txt"
        )
    if data is None and None not in own:
        raise UserError(
            f"--data: {run.path} has a mixture; name one of its sources: {', '.join(map(str, own))}"
        )
    source, weight = own.get(data, (data or "", None))
    names = split.split("+")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--split: {repeated[0]} is given twice")
    corpus = _open_corpus(run, source, say, is_given=data is not None and data not in own)
    try:
        tokens = corpus.split("+".join(corpus.splits) if split == "all" else split)
    except UserError as error:
        raise UserError(f"--split: {error}; all joins them") from None
    name = data or "" if weight else ""
    text = Text(without_secrets(source), corpus, tokens, name, weight)
    n = len(tokens.tokens)
    vocab_size = run.config.model.vocab_size
    advice = "use a longer text, --split all or a smaller --seq-len"
    if tokens.packed and not n:
        raise UserError(f"--data: {text} has no document of two tokens; {advice}")
    if not tokens.packed and n <= run.seq_len:
        raise UserError(
            f"--data: {text} has {n:,} tokens, and a window of this model has {run.seq_len + 1:,}; "
            f"{advice}"
        )
    if tokens.targets and not tokens.targets.n_tokens:
        raise UserError(
            f"--data: {text} has no answers, which alone count in this run (config.data.targets)"
        )
    if not corpus.ids_are_checked and (largest := largest_id(tokens.tokens)) >= vocab_size:
        raise UserError(
            f"--data: {text} has the id {largest:,}, but the vocabulary of this model has "
            f"{vocab_size:,} ids; these shards have another tokenizer"
        )
    return text


def _has_text(run: TrainedModel) -> bool:
    """Return whether a run trained a model, unlike a checkpoint of Hugging Face."""
    imported = _data_record(run).get("name", "").startswith(WEIGHTS_OF)
    return (run.path / "checkpoints").is_dir() and not imported


def _open_corpus(
    run: TrainedModel, source: str, say: Callable[[str], None], *, is_given: bool = False
) -> Corpus:
    """Open a text with the tokenizer of a model, and with the splits and the packing of its run.

    `is_given` says whether the user named the source, not only the run.
    """
    # A run records URLs without their secrets, and the user may give them.
    own = [without_secrets(text) for text, _ in own_texts(run).values()]
    is_own = without_secrets(source) in own and _has_text(run)
    if run.tokenizer is None and not source.startswith("tokens:"):
        raise UserError(f"--data: {run.path} has no tokenizer, only token ids; give tokens:PATH")
    config = trusted.local(run.config.data)
    if is_own and not config.mixture:
        config = dataclasses.replace(config, source=source)
    else:
        config = config.of_source(source)
    if not is_given:
        # The tokenizer is the model's, and a file that the run names is not read.
        named = dataclasses.replace(run.config.data.of_source(source), tokenizer="char")
        trusted.check(named, run.path)
    if source.startswith("tokens:") and config.packing != "none":
        raise UserError(
            f"--data: {run.path} packs documents, and token shards do not record documents; give a "
            "text"
        )
    try:
        corpus = open_corpus(config, seq_len=run.seq_len, tokenizer=run.tokenizer, say=say)
    except UserError as error:
        problems = []
        for line in error.problems:
            line = line.replace("config.data.source:", "--data:")
            problems.append(line if line.startswith("--data:") else f"--data: {source}: {line}")
        error.problems = tuple(problems)
        raise
    if is_own and corpus.fingerprint not in (_trained_on(run) or {corpus.fingerprint}):
        say(
            f"WARNING: the text or the tokens of {source} have changed since {run.path} trained on "
            "them"
        )
    return corpus


def find_baselines(
    run: TrainedModel, texts: list[Text], say: Callable[[str], None]
) -> list[dict[str, float]]:
    """Return the losses of n-gram models of the run's train split on each text.

    They are empty if the model was not trained by a run, or on a mixture; and, with a warning, if
    the text of the run cannot be read.
    """
    if not _has_text(run) or run.config.data.mixture:
        return [{} for _ in texts]
    source = run.config.data.source
    opened = [text.corpus for text in texts if text.source == without_secrets(source)]
    try:
        own = opened[0] if opened else _open_corpus(run, source, say)
        return [ngram_losses(own, text.split, run.config.model.vocab_size) for text in texts]
    except UserError as error:
        say(f"WARNING: no baselines, because the text of the run cannot be read: {error}")
        return [{} for _ in texts]


def _data_record(run: TrainedModel) -> dict[str, Any]:
    """Return the name and fingerprint of the tokens that a run trained on; empty if unknown."""
    try:
        return read_json(run.path / "run.json", _RUN)["data"] or {}
    except FileNotFoundError:
        return {}


def _trained_on(run: TrainedModel) -> set[str]:
    """Return the fingerprints of a run's training texts; empty if unknown or of other rows."""
    record = _data_record(run)
    data = run.config.data
    if data.mixture:
        return {made["fingerprint"] for made in record.get("record", {}).values()}
    if not record:
        return set()
    if data.packing != "none":
        trained = read_json(run.path / "config.json", _CONFIG)["train"]["seq_len"]
        if trained != run.seq_len:
            return set()
    return {record["fingerprint"]}
