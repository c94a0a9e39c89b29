"""open_corpus(config): from a source to token files, each step computed once and kept in the cache.

source -> documents by split -> tokenizer -> tokens (memory-mapped) -> packed rows, where configured
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from lm.data import cache, packing, sources, tokenizers
from lm.data import shards as token_shards
from lm.data.corpus import Corpus, Split
from lm.errors import Unavailable, UserError

FORMAT = 1  # of what the cache holds; part of its keys
BATCH = 2**24  # characters of documents tokenized at once; BPE takes about 140 bytes of memory for each


def open_corpus(config, *, seq_len: int | None = None, say: Callable[[str], None] = print) -> Corpus:
    """The corpus that a `DataConfig` describes, read from the cache where it has been prepared before.

    The config's keys must agree with each other, as `lm.config.loading.load` makes sure.
    seq_len is needed for packing = "documents" alone. Notices for the user go to `say` and into the corpus.
    Raises UserError for a source that is not there, a text that the tokenizer does not cover, or an unwritable cache.
    """
    notices = []

    def notice(text: str) -> None:
        notices.append(text)
        say(text)

    cache_dir = cache.user_cache(config.cache_dir)
    if config.source.startswith("tokens:"):
        return _prepare_shards(config, cache_dir, notice, notices)
    source, name = _find(config, cache_dir, notice, say)
    tokenizer = _tokenizer(config, source, cache_dir, notice, say)
    fingerprint = cache.key_of(FORMAT, source.digest, tokenizer.fingerprint)
    directory = cache_dir / "tokens" / fingerprint[:32]
    splits = _tokenize(source, tokenizer, directory, say)
    if packed := config.packing == "documents":
        if seq_len is None:
            raise ValueError('packing = "documents" needs seq_len')
        fingerprint = cache.key_of(fingerprint, "packed", seq_len)
        splits = _pack(splits, directory, cache_dir / "tokens" / fingerprint[:32], seq_len)
    floor = source.entropy_rate if config.tokenizer == "char" else None
    return Corpus(name, splits, tokenizer, fingerprint, tuple(notices), floor, packed)


def _prepare_shards(config, cache_dir, notice, notices) -> Corpus:
    """The corpus of tokens:PATH, whose ids were made elsewhere; a tokenizer, where given, only decodes."""
    found = token_shards.find(config.source.partition(":")[2], cache_dir)
    tokenizer = None if config.tokenizer == "none" else _load_tokenizer(config.tokenizer, notice)
    if tokenizer and found.tokenizer and tokenizer.fingerprint != found.tokenizer:
        raise UserError(
            f"config.data.tokenizer: {config.tokenizer} is not the tokenizer that made the shards of {found.name}; "
            "use the one that lm.data.prepare named (byte, or the tokenizer.json beside them)"
        )
    splits = {split: Split(split, ids, len(ids), found.text_bytes.get(split)) for split, ids in found.tokens.items()}
    fingerprint = cache.key_of(FORMAT, found.digest, tokenizer and tokenizer.fingerprint)
    return Corpus(found.name, splits, tokenizer, fingerprint, tuple(notices))


def _find(config, cache_dir, notice, say) -> tuple[sources.Source, str]:
    """The source and the name of the text that it really is, which is not always the text that was asked for."""
    try:
        source = sources.find(config, cache_dir, say)
        return source, source.name
    except Unavailable as e:
        if config.offline is None:
            raise
        notice(
            f"NOTICE: {e.problems[0]}\n"
            f'NOTICE: config.data.offline = "{config.offline}" lets this run train on {config.offline} INSTEAD of '
            f"{config.source}: its losses say nothing about {config.source}."
        )
        source = sources.find(dataclasses.replace(config, source=config.offline), cache_dir, say)
        return source, f"{source.name} (fallback)"


def _load_tokenizer(spec: str, notice) -> tokenizers.Tokenizer:
    """A tokenizer that needs no text to learn from."""
    tokenizer = tokenizers.make(spec, ())
    if tokenizers.is_lossy(tokenizer):
        notice(f'NOTICE: the tokenizer "{spec}" is lossy: decoding does not always give back the text.')
    return tokenizer


def _tokenizer(config, source, cache_dir, notice, say) -> tokenizers.Tokenizer:
    """The configured tokenizer; one that was learned from the text is remembered by the text's digest."""
    kind = config.tokenizer.partition(":")[0]
    if kind in ("byte", "hf"):
        return _load_tokenizer(config.tokenizer, notice)
    key = cache.key_of(FORMAT, source.digest, config.tokenizer, config.unk, config.vocabulary_from)
    path = cache_dir / "tokenizers" / f"{key[:32]}.json"
    if not path.exists():
        if kind == "bpe":
            say(f"training the tokenizer {config.tokenizer} on {source.name}")
        splits = source.documents
        everything = config.vocabulary_from == "all" and kind != "bpe"
        known = splits.values() if everything else [splits.get("train", ())]
        documents = chain.from_iterable(map(_with_newlines, known))
        tokenizer = tokenizers.make(config.tokenizer, documents, config.unk)
        cache.write_file(path, tokenizer.to_json())
    return tokenizers.from_json(path.read_text(encoding="utf-8"))


def _with_newlines(documents: Iterable[str]) -> Iterator[str]:
    """The documents and the newlines between them that tokenizers without an end of text need to know."""
    for i, document in enumerate(documents):
        if i:
            yield "\n"
        yield document


def _tokenize(source, tokenizer, directory: Path, say) -> dict[str, Split]:
    """The memory-mapped tokens of each split, written on first use."""
    if not directory.is_dir():
        say(f"tokenizing {source.name}")
        cache.publish(directory, lambda work: _write_splits(source.documents, tokenizer, work))
    with _whole(directory):
        meta = json.loads((directory / "meta.json").read_text())
        return {
            name: Split(
                name, cache.map_tokens(directory / f"{name}.bin", meta["dtype"], (n_tokens,)), n_tokens, n_bytes
            )
            for name, (n_tokens, n_bytes) in meta["splits"].items()
        }


def _write_splits(splits: dict[str, Iterable[str]], tokenizer, directory: Path) -> None:
    """Writes the tokens of each split, their documents one after the other, and the documents' lengths for packing.

    Between two documents stands the tokenizer's end of text, or a newline where it has none, as part of the first.
    """
    end = tokenizer.end_of_text
    meta = {"dtype": tokenizer.dtype.name, "splits": {}}
    for name, documents in splits.items():
        n_bytes, lengths = 0, []
        with (directory / f"{name}.bin").open("wb") as file:
            for texts in _batched(documents):
                try:
                    encoded = tokenizer.encode_all(texts)
                    separator = tokenizer.encode("\n") if end is None and (lengths or len(texts) > 1) else [end]
                except UserError as e:
                    raise UserError(f"the {name} split: {e}") from None
                for text, ids in zip(texts, encoded, strict=True):
                    if lengths:
                        file.write(np.array(separator, tokenizer.dtype))
                        lengths[-1] += 1
                        n_bytes += end is None
                    file.write(ids)
                    lengths.append(len(ids))
                    n_bytes += len(text.encode())
        np.save(directory / f"{name}.lengths.npy", np.array(lengths, np.int64))
        meta["splits"][name] = sum(lengths), n_bytes
    (directory / "meta.json").write_text(json.dumps(meta))


def _pack(splits: dict[str, Split], tokens: Path, directory: Path, seq_len: int) -> dict[str, Split]:
    """The same splits as packed rows, memory-mapped, written on first use."""

    def write(work: Path) -> None:
        for name, split in splits.items():
            with _whole(tokens):
                lengths = np.load(tokens / f"{name}.lengths.npy")
            rows, segments = packing.pack(split.tokens, lengths, seq_len)
            np.save(work / f"{name}.npy", rows)
            np.save(work / f"{name}.segments.npy", segments)

    if not directory.is_dir():
        cache.publish(directory, write)
    with _whole(directory):
        return {
            name: dataclasses.replace(
                split,
                tokens=np.load(directory / f"{name}.npy", mmap_mode="r"),
                segments=np.load(directory / f"{name}.segments.npy", mmap_mode="r"),
            )
            for name, split in splits.items()
        }


@contextlib.contextmanager
def _whole(directory: Path) -> Iterator[None]:
    """Around the reading of a cache entry, of which others (cleaners of temporary files, say) may have taken a part."""
    try:
        yield
    except (OSError, ValueError) as e:
        raise UserError(f"{directory} is damaged ({e}); delete it, and it will be made anew") from None


def _batched(documents: Iterable[str]) -> Iterator[list[str]]:
    """Lists of consecutive documents of up to BATCH characters together, or of one that is longer."""
    batch, size = [], 0
    for document in documents:
        if batch and (len(batch) == 1024 or size + len(document) > BATCH):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document)
    if batch:
        yield batch
