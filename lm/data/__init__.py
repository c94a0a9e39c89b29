"""The data room: prepare(config) finds the text, makes the tokenizer, and gives the tokens of each split.

After that a batch is a pure function of (tokens, seed, step): `windows.window_numbers` says which windows, and
`batches.gather` reads them. Nothing here holds iterator state, and nothing here imports jax.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from lm.data import batches, cache, sources, tokenizers, windows
from lm.errors import UserError

FORMAT = 1  # of what the cache holds; part of its keys


@dataclasses.dataclass(frozen=True)
class Split:
    """The tokens of one split: an array (n,) of uint16 or uint32, or packed rows (R, T+1) with segments (R, T+1).

    n_bytes: the UTF-8 length of the text, None where it is not known; bits per byte of a mean loss in nats per token is
    loss * n_tokens / n_bytes / ln 2. n_tokens counts the split's tokens, without padding.
    """

    name: str
    tokens: np.ndarray | batches.Shards
    n_tokens: int
    n_bytes: int | None
    segments: np.ndarray | batches.Shards | None = None

    @property
    def packed(self) -> bool:
        return self.segments is not None

    def n_windows(self, seq_len: int, order: str, stride: int | None = None) -> int:
        """How many windows (or packed rows) there are to choose from."""
        return len(self.tokens) if self.packed else windows.n_windows(len(self.tokens), seq_len, order, stride)

    def starts(self, numbers: np.ndarray, seq_len: int, order: str, stride: int | None = None) -> np.ndarray:
        """What `gather` takes for these window numbers: first tokens, or the numbers themselves for packed rows."""
        return numbers if self.packed else windows.starts(numbers, seq_len, order, stride)

    def n_eval_windows(self, seq_len: int) -> int:
        return len(self.tokens) if self.packed else windows.n_eval_windows(len(self.tokens), seq_len)

    def eval_windows(self, seq_len: int, batch_size: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts (B,) and target weights (B, T) of one evaluation batch (packed: to be multiplied by `target_weights`)."""
        if not self.packed:
            return windows.eval_windows(len(self.tokens), seq_len, batch_size, batch)
        row = batch * batch_size + np.arange(batch_size, dtype=np.int64)
        exists_B1 = (row < len(self.tokens))[:, None]
        return np.minimum(row, len(self.tokens) - 1), np.repeat(exists_B1, seq_len, 1).astype(np.float32)


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
            batches.Shards([part.tokens for part in parts]),
            sum(part.n_tokens for part in parts),
            None if any(part.n_bytes is None for part in parts) else sum(part.n_bytes for part in parts),
            batches.Shards([part.segments for part in parts]) if self.packed else None,
        )


def prepare(config, *, seq_len: int | None = None, say: Callable[[str], None] = print) -> Corpus:
    """The corpus that a `DataConfig` describes, read from the cache where it has been prepared before.

    seq_len is needed for packing = "documents" alone. Notices for the user go to `say` and into the corpus.
    Raises UserError for a source that is not there, a text that the tokenizer does not cover, or an unwritable cache.
    """
    notices = []

    def notice(text: str) -> None:
        notices.append(text)
        say(text)

    cache_dir = cache.user_cache(config.cache_dir)
    source, name = _find(config, cache_dir, notice, say)
    tokenizer = _tokenizer(config, source, cache_dir, say)
    fingerprint = cache.key_of(FORMAT, source.digest, tokenizer.fingerprint)
    splits = _tokens(source, tokenizer, cache_dir / "tokens" / fingerprint[:32], say)
    floor = source.entropy_rate if isinstance(tokenizer, tokenizers.CharTokenizer) else None
    return Corpus(name, splits, tokenizer, fingerprint, tuple(notices), floor)


def _find(config, cache_dir, notice, say):
    try:
        source = sources.find(config, cache_dir, say)
        return source, source.name
    except sources.Unavailable as e:
        if config.offline is None:
            raise
        notice(
            f"NOTICE: {e.problems[0]}\nNOTICE: this run uses {config.offline} INSTEAD of {config.source}, "
            f'because config.data.offline = "{config.offline}"; its losses are not comparable.'
        )
        source = sources.find(dataclasses.replace(config, source=config.offline), cache_dir, say)
        return source, f"{source.name} (fallback)"


def _tokenizer(config, source, cache_dir, say) -> tokenizers.Tokenizer:
    """The configured tokenizer; one that was learned from the text is remembered by the text's digest."""
    if config.tokenizer == "byte" or config.tokenizer.startswith("hf:"):
        return tokenizers.make(config.tokenizer, ())
    key = cache.key_of(FORMAT, source.digest, config.tokenizer, config.unk, config.vocabulary_from)
    path = cache_dir / "tokenizers" / f"{key[:32]}.json"
    if not path.exists():
        if config.tokenizer.startswith("bpe"):
            say(f"training the tokenizer {config.tokenizer} on {source.name}")
        splits = source.load()
        everything = config.vocabulary_from == "all" and not config.tokenizer.startswith("bpe")
        documents = chain.from_iterable(splits.values()) if everything else splits.get("train", ())
        tokenizer = tokenizers.make(config.tokenizer, _with_separator(documents), config.unk)
        cache.write_file(path, tokenizer.to_json())
    return tokenizers.from_json(path.read_text(encoding="utf-8"))


def _with_separator(documents: Iterable[str]) -> Iterator[str]:
    """The documents and, between them, the newline that separates them for tokenizers without an end of text."""
    for i, document in enumerate(documents):
        if i:
            yield "\n"
        yield document


def _tokens(source, tokenizer, directory: Path, say) -> dict[str, Split]:
    """The memory-mapped tokens of each split, written on first use."""
    if not directory.is_dir():
        say(f"tokenizing {source.name} into {directory}")
        cache.publish(directory, lambda work: _write_splits(source.load(), tokenizer, work))
    meta = json.loads((directory / "meta.json").read_text())
    return {
        name: Split(name, cache.map_tokens(directory / f"{name}.bin", meta["dtype"], (n_tokens,)), n_tokens, n_bytes)
        for name, (n_tokens, n_bytes) in meta["splits"].items()
    }


def _write_splits(splits: dict[str, Iterable[str]], tokenizer, directory: Path) -> None:
    meta = {"dtype": tokenizer.dtype.name, "splits": {}}
    for name, documents in splits.items():
        n_bytes, lengths = 0, []

        def chunks(documents=documents, lengths=lengths):
            nonlocal n_bytes
            for i, document in enumerate(documents):
                separator, size = _separator(tokenizer) if i else (np.empty(0, tokenizer.dtype), 0)
                ids = tokenizer.encode(document)
                lengths.append(len(separator) + len(ids))
                n_bytes += size + len(document.encode())
                yield from (separator, ids)

        n_tokens = cache.write_tokens(directory, name, chunks(), tokenizer.dtype)
        np.save(directory / f"{name}.lengths.npy", np.array(lengths, np.int64))
        meta["splits"][name] = n_tokens, n_bytes
    (directory / "meta.json").write_text(json.dumps(meta))


def _separator(tokenizer) -> tuple[np.ndarray, int]:
    """What stands between two documents, and its bytes of text: the end-of-text token, or a newline where there is none."""
    if tokenizer.end_of_text is not None:
        return np.array([tokenizer.end_of_text], tokenizer.dtype), 0
    return tokenizer.encode("\n"), 1


def problems(corpus: Corpus, seq_len: int, batch_size: int, vocab_size: int) -> list[str]:
    """All mistakes that only the data can show, each with key, value, why and a suggestion; empty when there is none."""
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
        if not corpus.packed and len(split.tokens) < seq_len + 1:
            found.append(
                f"config.train.seq_len: {seq_len} needs windows of {seq_len + 1} tokens, but the {split.name} split has "
                f"{len(split.tokens)}; use a shorter seq_len, or other config.data.splits"
            )
    return found
