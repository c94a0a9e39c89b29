"""The tokens of a text by split, and the checks that they suit a run."""

import dataclasses
from collections.abc import Callable

import numpy as np

from lm.data.concatenated import ConcatenatedArray
from lm.data.mixtures import Part
from lm.data.tokenizers import Tokenizer
from lm.system.errors import UserError


@dataclasses.dataclass(frozen=True)
class Targets:
    """Which tokens of a split count in losses, where some do not (config.data.targets)."""

    is_target: np.ndarray | ConcatenatedArray  # uint8, as the tokens
    n_tokens: int  # of the targets
    n_bytes: int  # UTF-8 bytes of their text


@dataclasses.dataclass(frozen=True)
class Split:
    """The tokens of one split.

    Attributes:
        name: "train", "validation", "test", or two joined by "+".
        tokens: ids (n,) of uint16 or uint32, or packed rows (R, T+1).
        n_tokens: number of tokens without padding.
        n_bytes: UTF-8 bytes of the text, None if unknown.
        segments: document numbers (R, T+1) of packed rows, 0 for padding; None if not packed.
        parts: where the tokens of each source of a mixture are; () if there is one source.
        surprisal: maps consecutive ids (n,) to -ln P of each under the true source; None if the
            source is not known.
        targets: which tokens count; None: all.
        n_chats: number of documents that are chats.
    """

    name: str
    tokens: np.ndarray | ConcatenatedArray
    n_tokens: int
    n_bytes: int | None
    segments: np.ndarray | ConcatenatedArray | None = None
    surprisal: Callable[[np.ndarray], np.ndarray] | None = None
    parts: tuple[Part, ...] = ()
    targets: Targets | None = None
    n_chats: int = 0

    @property
    def packed(self) -> bool:
        return self.segments is not None

    @property
    def bytes_per_token(self) -> float | None:
        """Return the bytes per target: bits per byte are loss / bytes_per_token / ln 2."""
        counted = self.targets or self
        return counted.n_bytes / counted.n_tokens if counted.n_bytes else None

    @property
    def target_fraction(self) -> float:
        """Return which part of the tokens are targets."""
        return self.targets.n_tokens / self.n_tokens if self.targets else 1.0

    def describe_chats(self) -> list[str]:
        """Return a line on the chats of the split, if it has any."""
        if not self.n_chats:
            return []
        line = f"{self.name}: {self.n_chats:,} chats, {self.n_tokens:,} tokens"
        if self.targets:
            line += f", {self.targets.n_tokens:,} of which count (config.data.targets)"
        return [line]

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Return the parts; of one source, the split as one part without a name."""
        return self.parts or (Part("", 0, len(self.tokens), 1.0, self.bytes_per_token),)

    @property
    def arrays(self) -> dict:
        """Return the arrays that `batches.gather` reads: tokens, segments and is_target if any."""
        arrays = {"tokens": self.tokens}
        if self.segments is not None:
            arrays["segments"] = self.segments
        if self.targets:
            arrays["is_target"] = self.targets.is_target
        return arrays


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenized text.

    Attributes:
        name: the text that was read, which may be a fallback.
        splits: the tokens by split.
        tokenizer: None for token shards without one.
        fingerprint: sha256 of everything that determines the tokens.
        record: by name of the source, what is recorded about prepared token shards
            (`shards.summary`); of a mixture, also the fingerprint of each source.
        notices: warnings about the data, to be repeated in the run's summary.
        entropy_floor: nats per token below which no causal model can score, where it is known
            (sources "markov" and "markov:ORDER" with the char tokenizer).
        ids_are_checked: whether the tokenizer wrote the tokens, so that their ids are below its
            size.
    """

    name: str
    splits: dict[str, Split]
    tokenizer: Tokenizer | None
    fingerprint: str
    notices: tuple[str, ...] = ()
    entropy_floor: float | None = None
    ids_are_checked: bool = False
    record: dict | None = None

    @property
    def packed(self) -> bool:
        return any(split.packed for split in self.splits.values())

    def split(self, name: str) -> Split:
        """Return a split by name; "validation+test" joins two. UserError if there is none."""
        if missing := [part for part in name.split("+") if part not in self.splits]:
            raise UserError(
                f'{self.name} has no split "{missing[0]}"; it has {", ".join(self.splits)}'
            )
        parts = [self.splits[part] for part in name.split("+")]
        if len(parts) == 1:
            return parts[0]
        if parts[0].parts:
            raise UserError(
                f"{self.name} is a mixture, whose splits are not joined; evaluate them one by one"
            )
        return join(name, parts)


def join(name: str, splits: list[Split], parts: tuple[Part, ...] = ()) -> Split:
    """Join splits in their order; `parts` are those of a mixture."""
    sizes = [split.n_bytes for split in splits if split.n_bytes is not None]
    segments = [split.segments for split in splits if split.segments is not None]
    targets = None
    if any(split.targets for split in splits):
        each = [split.targets or _all_targets(split) for split in splits]
        targets = Targets(
            ConcatenatedArray([of_split.is_target for of_split in each]),
            sum(of_split.n_tokens for of_split in each),
            sum(of_split.n_bytes for of_split in each),
        )
    return Split(
        name,
        ConcatenatedArray([split.tokens for split in splits]),
        n_tokens=sum(split.n_tokens for split in splits),
        n_bytes=sum(sizes) if len(sizes) == len(splits) else None,
        segments=ConcatenatedArray(segments) if segments else None,
        surprisal=None if parts else splits[0].surprisal,
        parts=parts,
        targets=targets,
        n_chats=sum(split.n_chats for split in splits),
    )


def _all_targets(split: Split) -> Targets:
    """Return targets that are all tokens of a split, which takes no memory."""
    return Targets(
        np.broadcast_to(np.uint8(1), split.tokens.shape), split.n_tokens, split.n_bytes or 0
    )


def check_corpus(corpus: Corpus, seq_len: int, vocab_size: int) -> list[str]:
    """Return every mismatch between the data and the config: key, value, reason and advice."""
    problems = []
    if corpus.tokenizer and corpus.tokenizer.vocab_size > vocab_size:
        problems.append(
            f"config.model.vocab_size: {vocab_size} is too small for the tokenizer, which has "
            f"{corpus.tokenizer.vocab_size} ids; use --config.model.vocab_size=none"
        )
    if "train" not in corpus.splits:
        problems.append(
            f'config.data: {corpus.name} has no "train" split; it has {", ".join(corpus.splits)}'
        )
    for split in corpus.splits.values():
        for part in split.all_parts:
            n = part.n_tokens
            name = f"{split.name} split" + (part.name and f" of {part.name}")
            own = slice(part.start, part.start + n)
            if split.targets and not np.any(split.targets.is_target[own]):
                problems.append(
                    f"config.data.targets: the {name} has no answers; use all, or other splits: "
                    "--config.data.splits=0.8,0.2,0, for example"
                )
            if split.packed and not n:
                problems.append(
                    f"config.data.packing: the {name} has no document of at least two tokens; use "
                    "other splits, such as --config.data.splits=0.8,0.1,0.1"
                )
            elif not split.packed and n < seq_len + 1:
                shorter = f"--config.train.seq_len={n - 1} or less, or " * (n > 1)
                problems.append(
                    f"config.train.seq_len: {seq_len} needs windows of {seq_len + 1} tokens, but "
                    f"the {name} has {n}; use {shorter}other splits: "
                    "--config.data.splits=0.8,0.2,0, for example; token shards: lm.data.prepare "
                    "with a larger --validation"
                )
        if not corpus.ids_are_checked and (largest := largest_id(split.tokens)) >= vocab_size:
            problems.append(
                f"config.model.vocab_size: {vocab_size}, but the {split.name} split has the id "
                f"{largest}; use --config.model.vocab_size={largest + 1} or more"
            )
    return problems


def largest_id(tokens) -> int:
    """Return the largest id; beyond 2^28 tokens, of 256 evenly spaced blocks of 2^20 only."""
    block = 2**20
    n_blocks = min(256, -(-len(tokens) // block))
    starts = np.linspace(0, max(0, len(tokens) - block), n_blocks).astype(np.int64).tolist()
    return max((int(tokens[start : start + block].max()) for start in starts), default=0)
