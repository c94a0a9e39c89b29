"""What preparation gives: the tokens of each split, and how windows are counted, placed and evaluated in them."""

import dataclasses

import numpy as np

from lm.data import shards as token_shards
from lm.data import tokenizers
from lm.data.concatenated import ConcatenatedArray
from lm.errors import UserError

COUNTED = 2**22  # enough for frequencies, and read in a moment


@dataclasses.dataclass(frozen=True)
class Split:
    """The tokens of one split: an array (n,) of uint16 or uint32, or packed rows (R, T+1) with segments (R, T+1).

    n_bytes: the UTF-8 length of the text, None where it is not known; bits per byte of a mean loss in nats per token is
    loss * n_tokens / n_bytes / ln 2. n_tokens counts the split's tokens, without padding.
    """

    name: str
    tokens: np.ndarray | ConcatenatedArray
    n_tokens: int
    n_bytes: int | None
    segments: np.ndarray | ConcatenatedArray | None = None

    @property
    def packed(self) -> bool:
        return self.segments is not None

    @property
    def arrays(self) -> dict:
        """The split as `batches.gather` takes it: {"tokens"}, and {"segments"} if packed."""
        return {"tokens": self.tokens} | ({"segments": self.segments} if self.packed else {})


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text made ready: tokens by split, the tokenizer (None for token shards without one), and what was noticed.

    name: which text it really is; fingerprint: sha256 of all that determines the tokens; entropy_floor: nats per token
    that no honest model can pass, where it is known (the markov source with the char tokenizer).
    """

    name: str
    splits: dict[str, Split]
    tokenizer: tokenizers.Tokenizer | None
    fingerprint: str
    notices: tuple[str, ...] = ()
    entropy_floor: float | None = None
    packed: bool = False

    def split(self, name: str) -> Split:
        """A split by name; "validation+test" is the two in this order. Raises UserError when there is none."""
        if missing := [part for part in name.split("+") if part not in self.splits]:
            raise UserError(f'{self.name} has no split "{missing[0]}"; it has {", ".join(self.splits)}')
        parts = [self.splits[part] for part in name.split("+")]
        if len(parts) == 1:
            return parts[0]
        return Split(
            name,
            ConcatenatedArray([part.tokens for part in parts]),
            sum(part.n_tokens for part in parts),
            None if any(part.n_bytes is None for part in parts) else sum(part.n_bytes for part in parts),
            ConcatenatedArray([part.segments for part in parts]) if self.packed else None,
        )


def unigram_loss(corpus: Corpus, name: str, vocab_size: int) -> float | None:
    """What counting tokens alone reaches on a split, in nats per token; None where there is no such split.

    Probabilities are the frequencies in the training split, where every token counts one more time than it occurs
    (Laplace's rule). Of a long split the first COUNTED tokens count.
    """
    if name not in corpus.splits:
        return None
    train, scored = (_counts(corpus.split(part), vocab_size) for part in ("train", name))
    train += 1
    return float(np.log(train.sum()) - scored @ np.log(train) / scored.sum())


def _counts(split: Split, vocab_size: int) -> np.ndarray:
    n = COUNTED // split.tokens.shape[1] if split.packed else COUNTED
    tokens = np.asarray(split.tokens[:n])
    if split.packed:
        tokens = tokens[np.asarray(split.segments[:n]) > 0]
    return np.bincount(tokens, minlength=vocab_size)


def problems(corpus: Corpus, seq_len: int, batch_size: int, vocab_size: int) -> list[str]:
    """All mistakes that only the data can show, each with key, value, why and a suggestion."""
    found = []
    known = corpus.tokenizer.vocab_size if corpus.tokenizer else None
    if known is not None and known > vocab_size:
        found.append(
            f"config.model.vocab_size: {vocab_size} is too small for the tokenizer, which has {known} ids; "
            "use at least that, or None"
        )
    if "train" not in corpus.splits:
        found.append(f'config.data: {corpus.name} has no "train" split; it has {", ".join(corpus.splits)}')
    for split in corpus.splits.values():
        n = len(split.tokens)
        if corpus.packed and not n:
            found.append(f"config.data.packing: the {split.name} split has no document of two tokens; use other splits")
        elif not corpus.packed and n < seq_len + 1:
            advice = f"use a seq_len of at most {n - 1}" if n > 1 else "leave that split out (a fraction of 0)"
            found.append(
                f"config.train.seq_len: {seq_len} needs windows of {seq_len + 1} tokens, but the {split.name} split "
                f"has {n}; {advice}, or choose other config.data.splits"
            )
        # Where a tokenizer made the ids they are below its size; ids that came from outside are looked at.
        elif split.n_bytes is None and (largest := token_shards.largest_id(split.tokens)) >= vocab_size:
            found.append(
                f"config.model.vocab_size: {vocab_size}, but the {split.name} split has the id {largest}; "
                f"use at least {largest + 1}"
            )
    return found
