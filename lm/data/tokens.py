"""open_corpus: from a source to the tokens of each split. Each step is computed once and cached.

source -> documents by split -> tokenizer -> tokens (memory-mapped) -> packed rows (packing =
"documents")
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lm.config import SPLITS
from lm.config.values import short
from lm.data import cache, chats, mixtures, packing, shards, sources, tokenizers
from lm.data.chats import Chat
from lm.data.corpus import Corpus, Split, Targets, join
from lm.data.encoding import Piece, encode
from lm.data.markov import LETTERS
from lm.data.tokenizers import CharTokenizer, Tokenizer
from lm.system.errors import Unavailable, UserError
from lm.system.files import COUNT, read_bytes, read_json, user_cache
from lm.system.text_tables import plural, some, without_secrets

# Of a split in counts.json; UTF-8 bytes of its text. The last two are there if answers are marked.
COUNTS = {"tokens": COUNT, "bytes": COUNT, "chats": COUNT, "answer_tokens?": COUNT, "answer_bytes?": COUNT}  # fmt: skip
FORMAT = 1  # of the tokens; part of their fingerprints


def open_corpus(
    config,
    *,
    seq_len: int | None = None,
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], None] = print,
) -> Corpus:
    """Open the corpus of a `DataConfig`, from the cache if it was tokenized before.

    Args:
        config: a `DataConfig` that passed the checks of `lm.command_line.loading.load`.
        seq_len: length of packed rows; only needed for packing = "documents".
        tokenizer: the tokenizer of a trained model, to be used instead of config.tokenizer.
        say: receives lines of information, and warnings, which begin with WARNING and become the
            corpus's notices.

    Raises:
        UserError: the source does not exist, the tokenizer does not cover the text, or the cache
            cannot be written.
    """
    notices: dict[str, None] = {}

    def tell(text: str) -> None:
        if text.startswith("WARNING"):
            notices[without_secrets(text)] = None
        say(text)

    if config.mixture:
        corpus = _open_mixture(config, tokenizer, tell)
    elif config.source.startswith("tokens:"):
        corpus = _open_token_shards(config, tokenizer, tell)
    else:
        corpus = _open_text(config, tokenizer, seq_len, tell)
    return dataclasses.replace(corpus, notices=tuple(notices))


def _open_text(config, tokenizer: Tokenizer | None, seq_len: int | None, say) -> Corpus:
    source = _find_source(config, say)
    tokenizer = tokenizer or _make_tokenizer(config, source, say)
    fingerprint = cache.key_of(FORMAT, source.digest, tokenizer.fingerprint)
    if config.targets != "all":
        fingerprint = cache.key_of(fingerprint, "targets", config.targets)
    row_len = None
    if config.packing not in ("none", "documents"):
        raise KeyError(config.packing)  # a new choice of the schema
    if config.packing == "documents":
        if seq_len is None:
            raise ValueError('packing = "documents" needs seq_len')
        row_len = seq_len
        fingerprint = cache.key_of(fingerprint, "packed", seq_len)
    directory = _entry(config, "tokens", fingerprint)
    splits = _tokenize(source, tokenizer, row_len, config, directory, say)
    has_chats = any(split.n_chats for split in splits.values())
    if has_chats and (warning := chats.notice(tokenizer, config.tokenizer)):
        say(warning)
    corpus = Corpus(source.name, splits, tokenizer, fingerprint, ids_are_checked=True)
    chain = source.chain
    # Other tokens than single letters would have another entropy.
    if not chain or not isinstance(tokenizer, CharTokenizer) or {*LETTERS} - {*tokenizer.chars}:
        return corpus

    def surprisal(ids: np.ndarray) -> np.ndarray:
        return chain.surprisal(tokenizer.decode(ids))

    for name, split in splits.items():
        splits[name] = dataclasses.replace(split, surprisal=surprisal)
    return dataclasses.replace(corpus, entropy_floor=chain.entropy_rate)


def _open_mixture(config, tokenizer: Tokenizer | None, say) -> Corpus:
    """Open the sources of a mixture with one tokenizer, and join their splits."""
    configs = {name: config.of_source(source) for name, source, _ in config.mixture}
    if tokenizer is None and config.tokenizer.partition(":")[0] not in ("byte", "hf", "none"):
        # One vocabulary, learned from the texts of all sources.
        texts = _join_sources([sources.find_source(c, say) for c in configs.values()])
        tokenizer = _make_tokenizer(config, texts, say)
    corpora = {name: open_corpus(c, tokenizer=tokenizer, say=say) for name, c in configs.items()}
    record: dict[str, dict] = {}
    for name, corpus in corpora.items():
        record[name] = {"fingerprint": corpus.fingerprint}
        for prepared in (corpus.record or {}).values():
            record[name] |= prepared
    tokenizers_of = {
        name: made["tokenizer"] for name, made in record.items() if "tokenizer" in made
    }
    if len({*tokenizers_of.values()}) > 1:
        raise UserError(
            f"config.data.mixture: {' and '.join(tokenizers_of)} have tokens of different "
            "tokenizers; prepare them again with --tokenizer=hf:PATH of one of them"
        )
    shares = mixtures.weights(config)
    opened = list(corpora.values())
    splits = {}
    for split in SPLITS:
        lacking = [name for name, corpus in corpora.items() if split not in corpus.splits]
        if lacking:
            # A mixture of fewer sources would be another one.
            if len(lacking) < len(corpora):
                say(f"the mixture has no {split} split, because {lacking[0]} has none")
            continue
        of_sources = [corpus.splits[split] for corpus in opened]
        # Windows are drawn by their tokens, and the mean loss is over the targets in them.
        of_targets = [
            share * part.target_fraction for part, share in zip(of_sources, shares, strict=True)
        ]
        start = 0
        parts = []
        for name, part, share in zip(corpora, of_sources, of_targets, strict=True):
            n_tokens = len(part.tokens)
            weight = share / (math.fsum(of_targets) or 1)
            parts.append(mixtures.Part(name, start, n_tokens, weight, part.bytes_per_token))
            start += n_tokens
        splits[split] = join(split, of_sources, tuple(parts))
    return Corpus(
        "+".join(corpora),
        splits,
        opened[0].tokenizer,
        cache.key_of(FORMAT, [corpus.fingerprint for corpus in opened], shares),
        ids_are_checked=all(corpus.ids_are_checked for corpus in opened),
        record=record,
    )


def _join_sources(parts: list[sources.Source]) -> sources.Source:
    """Return the texts of several sources as one, to learn a tokenizer from."""

    def read() -> dict[str, list[str]]:
        documents: dict[str, list[str]] = {}
        for source in parts:
            for split, texts in source.documents.items():
                documents.setdefault(split, []).extend(texts)
        return documents

    name = "+".join(source.name for source in parts)
    return sources.Source(name, cache.key_of([source.digest for source in parts]), read)


def _entry(config, kind: str, *parts) -> Path:
    return user_cache(config.cache_dir) / kind / cache.key_of(cache.LAYOUT, *parts)[:32]


def _open_token_shards(config, tokenizer: Tokenizer | None, say) -> Corpus:
    """Open tokens:PATH; a tokenizer, if given or configured, only decodes."""
    path = config.source.partition(":")[2]
    marks = config.targets == "assistant"
    corpus = shards.open_shards(path, user_cache(config.cache_dir), say, marks=marks)
    mismatch = f"config.data.source: the shards in {corpus.name} have tokens of another tokenizer"
    if tokenizer is None and config.tokenizer != "none":
        tokenizer = tokenizers.load(config.tokenizer, config.special_tokens, say)
        mismatch = (
            f"config.data.tokenizer: {config.tokenizer} with special_tokens = "
            f"{config.special_tokens} is not the tokenizer of the shards in {corpus.name}; use "
            "--config.data.tokenizer=hf:PATH with the tokenizer.json beside the shards, or byte if "
            "there is none, and --config.data.special_tokens=true if they were written with "
            "--special_tokens"
        )
    recorded = corpus.record and corpus.record[corpus.name]["tokenizer"]
    if tokenizer and recorded and tokenizer.fingerprint != recorded:
        raise UserError(mismatch)
    return dataclasses.replace(
        corpus,
        tokenizer=tokenizer,
        fingerprint=cache.key_of(FORMAT, corpus.fingerprint, tokenizer and tokenizer.fingerprint),
        ids_are_checked=bool(tokenizer and recorded),
    )


def _find_source(config, say) -> sources.Source:
    """Return the configured source, or its fallback (named so) where a network is missing."""
    try:
        return sources.find_source(config, say)
    except Unavailable as e:
        if config.offline is None:
            raise
        say(
            f"WARNING: {e.problems[0]}\nWARNING: training on {config.offline} INSTEAD of "
            f'{config.source}, because config.data.offline = "{config.offline}". The losses are '
            f"not those of {config.source}."
        )
        source = sources.find_source(dataclasses.replace(config, source=config.offline), say)
        return dataclasses.replace(source, name=f"{source.name} (fallback)")


def _make_tokenizer(config, source: sources.Source, say) -> Tokenizer:
    """Return the configured tokenizer; a learned one is cached by the digest of its text."""
    if config.tokenizer.partition(":")[0] in ("byte", "hf"):
        return tokenizers.load(config.tokenizer, config.special_tokens, say)
    settings = (config.tokenizer, config.unk, config.special_tokens)
    directory = _entry(config, "tokenizers", FORMAT, source.digest, *settings)

    def write(work: Path) -> None:
        learned = _learn_tokenizer(config, source, say).to_json()
        (work / "tokenizer.json").write_text(learned, encoding="utf-8")

    cache.make_entry(directory, write, say)
    return tokenizers.from_json(read_bytes(directory / "tokenizer.json").decode())


def _learn_tokenizer(config, source: sources.Source, say) -> Tokenizer:
    """Learn a vocabulary: bpe from train; char and word from all splits, with unk from train."""
    splits = list(source.documents.values())
    has_chats = any(isinstance(text, Chat) for text in itertools.chain.from_iterable(splits))
    markers = chats.MARKERS if has_chats else ()

    def learn(splits: list[list[str]]) -> Any:
        texts = itertools.chain.from_iterable(map(_with_newlines, splits))
        return tokenizers.make(config.tokenizer, texts, config.unk, config.special_tokens, markers)

    is_bpe = config.tokenizer.startswith("bpe")
    if is_bpe:
        say(f"training the tokenizer {config.tokenizer} on {source.name}")
    of_train = learn([source.documents.get("train", [])])
    if is_bpe or config.unk:
        return of_train
    # Without <unk>, a piece of a held-out text needs an id, although no training text has it.
    of_all = learn(splits)
    if others := sorted(set(of_all.pieces) - set(of_train.pieces)):
        total = plural(of_all.vocab_size, of_all.piece)
        occur = "occurs" if len(others) == 1 else "occur"
        say(
            f"{len(others):,} of the {total} of {source.name} {occur} in no training text: "
            f"{some([*map(short, others)])}; for <unk> in their place, --config.data.unk=true"
        )
    return of_all


def _with_newlines(texts: list[str]) -> Iterator[str]:
    """Yield texts and what separates them if the tokenizer has no end of text."""
    for i, text in enumerate(texts):
        if i:
            yield "\n"
        yield text


def _tokenize(
    source, tokenizer, row_len: int | None, config, directory: Path, say
) -> dict[str, Split]:
    """Return the memory-mapped tokens or packed rows of each split; the first call writes them."""

    def write(work: Path) -> None:
        say(f"tokenizing {source.name}")
        marks = config.targets == "assistant"
        counts = {
            name: _write_split(name, texts, tokenizer, row_len, marks, work)
            for name, texts in source.documents.items()
        }
        (work / "counts.json").write_text(json.dumps(counts))

    def load(name: str, kind: str = "") -> np.ndarray:
        return np.load(directory / f"{name}{kind}.npy", mmap_mode="r")

    cache.make_entry(directory, write, say)
    splits = {}
    for name, counts in read_json(directory / "counts.json", {str: COUNTS}).items():
        targets = None
        if "answer_tokens" in counts:
            is_target = load(name, ".targets")
            targets = Targets(is_target, counts["answer_tokens"], counts["answer_bytes"])
        splits[name] = Split(
            name,
            load(name),
            counts["tokens"],
            counts["bytes"],
            segments=load(name, ".segments") if row_len else None,
            targets=targets,
            n_chats=counts["chats"],
        )
    return splits


def _write_split(
    name: str, documents: list[str], tokenizer, row_len: int | None, marks: bool, directory: Path
) -> dict[str, int]:
    """Write the tokens of a split, in order or in rows, and return its `COUNTS`.

    The last document has no ending. If there are chats and `marks` is set, also write which tokens
    are of answers.
    """
    n_chats = sum(isinstance(text, Chat) for text in documents)
    if not marks and any(isinstance(text, Chat) and text.is_marked for text in documents):
        raise UserError(chats.IGNORED.format(f"the {name} split"))
    n_bytes = 0
    answer_bytes = 0
    lengths: list[int] = []
    is_answer = [np.zeros(0, np.uint8)]
    pieces = (
        Piece(name, f"the {name} split", text, ends=i < len(documents))
        for i, text in enumerate(documents, 1)
    )
    # The ids go through a file, so that a text of many tokens does not fill the memory.
    unpacked = directory / "ids"
    with unpacked.open("wb") as file:
        for _, encoded in encode(tokenizer, pieces):
            file.write(encoded.ids.tobytes())
            lengths.append(len(encoded.ids))
            n_bytes += encoded.n_bytes
            answer_bytes += encoded.answer_bytes
            if n_chats and marks:
                is_answer.append(encoded.is_answer)
    counts = {"tokens": sum(lengths), "bytes": n_bytes, "chats": n_chats}
    tokens = np.zeros(0, tokenizer.dtype)
    if any(lengths):  # an empty file cannot be mapped
        tokens = np.memmap(unpacked, tokenizer.dtype, "r")
    arrays = {"": tokens}
    if n_chats and marks:
        arrays[".targets"] = np.concatenate(is_answer)
        counts["answer_tokens"] = int(arrays[".targets"].sum())
        counts["answer_bytes"] = answer_bytes
    if row_len is not None:
        segments, *rows = packing.pack(np.array(lengths, np.int64), row_len, *arrays.values())
        arrays = {".segments": segments} | dict(zip(arrays, rows, strict=True))
    for kind, array in arrays.items():
        np.save(directory / f"{name}{kind}.npy", array)
    unpacked.unlink()
    return counts
