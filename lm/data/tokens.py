"""open_corpus: from a source to the tokens of each split. Each step is computed once and cached.

source -> documents by split -> tokenizer -> tokens (memory-mapped) -> packed rows (packing =
"documents")
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
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
from lm.system.text_tables import plural, without_secrets

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
    row_len = {"none": None, "documents": seq_len}[config.packing]
    if config.packing == "documents":
        if seq_len is None:
            raise ValueError('packing = "documents" needs seq_len')
        fingerprint = cache.key_of(fingerprint, "packed", seq_len)
    splits, floor = (
        _tokenize(source, tokenizer, row_len, config, _entry(config, "tokens", fingerprint), say),
        None,
    )
    has_chats = any(split.n_chats for split in splits.values())
    if has_chats and (warning := chats.notice(tokenizer, config.tokenizer)):
        say(warning)
    if (
        source.chain
        and isinstance(tokenizer, CharTokenizer)
        and set(LETTERS) <= set(tokenizer.chars)
    ):
        floor = source.chain.entropy_rate

        def known(ids: np.ndarray, chain=source.chain) -> np.ndarray:
            return chain.surprisal(tokenizer.decode(ids))

        splits = {
            name: dataclasses.replace(split, surprisal=known) for name, split in splits.items()
        }
    return Corpus(
        source.name, splits, tokenizer, fingerprint, entropy_floor=floor, ids_are_checked=True
    )


def _open_mixture(config, tokenizer: Tokenizer | None, say) -> Corpus:
    """Open the sources of a mixture, with one tokenizer, and join their splits; see `open_corpus`."""
    names, shares = [name for name, *_ in config.mixture], mixtures.weights(config)
    configs = [config.of_source(source) for _, source, _ in config.mixture]
    if tokenizer is None and config.tokenizer.partition(":")[0] not in ("byte", "hf", "none"):
        tokenizer = _make_tokenizer(
            config, _join_sources([sources.find_source(c, say) for c in configs]), say
        )
    corpora = {
        name: open_corpus(c, tokenizer=tokenizer, say=say)
        for name, c in zip(names, configs, strict=True)
    }
    prepared = {
        name: made for name, corpus in corpora.items() for made in (corpus.record or {}).values()
    }
    tokenizers_of = {name: made["tokenizer"] for name, made in prepared.items()}
    if len({*tokenizers_of.values()}) > 1:
        raise UserError(
            f"config.data.mixture: {' and '.join(tokenizers_of)} have tokens of different "
            "tokenizers; prepare them again with --tokenizer=hf:PATH of one of them"
        )
    splits = {}
    for split in SPLITS:
        of_sources = [corpus.splits[split] for corpus in corpora.values() if split in corpus.splits]
        if len(of_sources) < len(corpora):
            if of_sources:
                lacking = next(
                    name for name, corpus in corpora.items() if split not in corpus.splits
                )
                say(f"the mixture has no {split} split, because {lacking} has none")
            continue
        starts = itertools.accumulate((len(part.tokens) for part in of_sources), initial=0)
        parts = tuple(
            mixtures.Part(name, start, len(part.tokens), share, part.bytes_per_token)
            for name, start, part, share in zip(names, starts, of_sources, shares, strict=False)
        )
        splits[split] = join(split, of_sources, parts)
    opened = list(corpora.values())
    return Corpus(
        "+".join(names),
        splits,
        opened[0].tokenizer,
        cache.key_of(FORMAT, [c.fingerprint for c in opened], shares),
        ids_are_checked=all(c.ids_are_checked for c in opened),
        record={
            name: {"fingerprint": c.fingerprint} | prepared.get(name, {})
            for name, c in corpora.items()
        },
    )


def _join_sources(found: list[sources.Source]) -> sources.Source:
    """Return the texts of several sources as one, to learn a tokenizer from."""

    def read() -> dict[str, list[str]]:
        names = {split: None for source in found for split in source.documents}
        return {
            split: [t for source in found for t in source.documents.get(split, ())]
            for split in names
        }

    return sources.Source(
        "+".join(s.name for s in found), cache.key_of([s.digest for s in found]), read
    )


def _entry(config, kind: str, *parts) -> Path:
    return user_cache(config.cache_dir) / kind / cache.key_of(cache.LAYOUT, *parts)[:32]


def _open_token_shards(config, tokenizer: Tokenizer | None, say) -> Corpus:
    """Open tokens:PATH; a tokenizer, if given or configured, only decodes."""
    corpus = shards.open_shards(config.source.partition(":")[2], user_cache(config.cache_dir), say)
    if config.targets != "all" and any(split.n_chats for split in corpus.splits.values()):
        raise UserError(
            f"config.data.targets: {config.targets}, but the shards in {corpus.name} do not mark "
            "the answers of their chats; use all, or the chats themselves as the source"
        )
    is_of_model = tokenizer is not None
    if not is_of_model and config.tokenizer != "none":
        tokenizer = tokenizers.load(config.tokenizer, config.special_tokens, say)
    recorded = corpus.record and corpus.record[corpus.name]["tokenizer"]
    if tokenizer and recorded and tokenizer.fingerprint != recorded:
        raise UserError(
            f"config.data.source: the shards in {corpus.name} have tokens of another tokenizer"
            if is_of_model
            else f"config.data.tokenizer: {config.tokenizer} with special_tokens = {config.special_tokens} is not the "
            f"tokenizer of the shards in {corpus.name}; use --config.data.tokenizer="
            f"{'' if config.tokenizer == 'byte' else 'byte, or '}hf:PATH with the tokenizer.json beside the shards, "
            "and --config.data.special_tokens=true if they were written with --special_tokens"
        )
    fingerprint = cache.key_of(FORMAT, corpus.fingerprint, tokenizer and tokenizer.fingerprint)
    same = bool(tokenizer and recorded)
    return dataclasses.replace(
        corpus, tokenizer=tokenizer, fingerprint=fingerprint, ids_are_checked=same
    )


def _find_source(config, say) -> sources.Source:
    """Return the configured source, or its fallback, whose name shows that it is one, if it needs a
    network.
    """
    try:
        return sources.find_source(config, say)
    except Unavailable as e:
        if config.offline is None:
            raise
        say(
            f"WARNING: {e.problems[0]}\n"
            f"WARNING: training on {config.offline} INSTEAD of {config.source}, because config.data.offline = "
            f'"{config.offline}". The losses are not those of {config.source}.'
        )
        source = sources.find_source(dataclasses.replace(config, source=config.offline), say)
        return dataclasses.replace(source, name=f"{source.name} (fallback)")


def _make_tokenizer(config, source: sources.Source, say) -> Tokenizer:
    """Return the configured tokenizer; one that is learned from the text is cached by the text's
    digest.
    """
    if config.tokenizer.partition(":")[0] in ("byte", "hf"):
        return tokenizers.load(config.tokenizer, config.special_tokens, say)
    directory = _entry(
        config,
        "tokenizers",
        FORMAT,
        source.digest,
        config.tokenizer,
        config.unk,
        config.special_tokens,
    )

    def write(work: Path) -> None:
        (work / "tokenizer.json").write_text(
            _learn_tokenizer(config, source, say).to_json(), encoding="utf-8"
        )

    cache.make_entry(directory, write, say)
    return tokenizers.from_json(read_bytes(directory / "tokenizer.json").decode())


def _learn_tokenizer(config, source: sources.Source, say) -> Tokenizer:
    """Learn a vocabulary: bpe from the train split, char and word from all splits unless others
    become <unk>.
    """
    kind = config.tokenizer.partition(":")[0]

    def learn(*splits: list[str]) -> Any:
        # A newline between two documents is the separator of tokenizers without an end of text.
        texts = (
            part
            for texts in splits
            for i, text in enumerate(texts)
            for part in ("\n" * (i > 0), text)
        )
        return tokenizers.make(
            config.tokenizer, filter(None, texts), config.unk, config.special_tokens, markers
        )

    has_chats = any(isinstance(text, Chat) for texts in source.documents.values() for text in texts)
    markers = chats.MARKERS if has_chats else ()
    if kind == "bpe":
        say(f"training the tokenizer {config.tokenizer} on {source.name}")
    of_train = learn(source.documents.get("train", []))
    if kind == "bpe" or config.unk:
        return of_train
    of_all = learn(*source.documents.values())
    if others := sorted(set(of_all.pieces) - set(of_train.pieces)):
        shown = ", ".join(map(short, others[:5])) + (", ..." if len(others) > 5 else "")
        noun = {"char": "character"}.get(kind, kind)
        occur = "occurs" if len(others) == 1 else "occur"
        say(
            f"{len(others):,} of the {plural(of_all.vocab_size, noun)} of {source.name} {occur} in "
            f"no training text: {shown}; for <unk> in their place, --config.data.unk=true"
        )
    return of_all


def _tokenize(
    source, tokenizer, row_len: int | None, config, directory: Path, say
) -> dict[str, Split]:
    """Return the memory-mapped tokens of each split, or its packed rows; the first call writes
    them.
    """

    def write(work: Path) -> None:
        say(f"tokenizing {source.name}")
        documents, marks = source.documents.items(), config.targets == "assistant"
        counts = {
            name: _write_split(name, texts, tokenizer, row_len, marks, work)
            for name, texts in documents
        }
        (work / "counts.json").write_text(json.dumps(counts))

    cache.make_entry(directory, write, say)
    splits = {}
    for name, counts in read_json(directory / "counts.json", {str: [COUNT]}).items():
        if len(counts) not in (2, 3, 5):  # see `_write_split`
            raise UserError(
                f"{directory}/counts.json is corrupted: {name} has {len(counts)} counts; delete "
                f"{directory}"
            )
        n_tokens, n_bytes, *of_chats = counts
        tokens = np.load(directory / f"{name}.npy", mmap_mode="r")
        segments = np.load(directory / f"{name}.segments.npy", mmap_mode="r") if row_len else None
        n_chats, *of_targets = of_chats or [0]
        targets = None
        if of_targets:
            targets = Targets(
                np.load(directory / f"{name}.targets.npy", mmap_mode="r"), *of_targets
            )
        splits[name] = Split(
            name, tokens, n_tokens, n_bytes, segments, targets=targets, n_chats=n_chats
        )
    return splits


def _write_split(
    name: str, documents: list[str], tokenizer, row_len: int | None, marks: bool, directory: Path
) -> list[int]:
    """Write the tokens of a split, in order or packed into rows, the last document without an
    ending; return counts.

    If it has chats and `marks` is set, also write which tokens are of answers. The counts are the
    number of tokens, and that of UTF-8 bytes of the text; with chats, their number; with marks, the
    number of tokens and bytes of answers.
    """
    n_bytes, answer_bytes, lengths, unpacked = 0, 0, list[int](), directory / "ids"
    n_chats = sum(isinstance(text, Chat) for text in documents)
    is_answer = [np.zeros(0, np.uint8)]
    pieces = (
        Piece(name, f"the {name} split", text, ends=i < len(documents))
        for i, text in enumerate(documents, 1)
    )
    with unpacked.open("wb") as file:
        for _, encoded in encode(tokenizer, pieces):
            file.write(encoded.ids.tobytes())
            lengths.append(len(encoded.ids))
            n_bytes += encoded.n_bytes
            answer_bytes += encoded.answer_bytes
            if n_chats and marks:
                is_answer.append(encoded.is_answer)
    n_tokens = sum(lengths)
    tokens = np.memmap(unpacked, tokenizer.dtype, "r") if n_tokens else np.zeros(0, tokenizer.dtype)
    targets = [np.concatenate(is_answer)] if n_chats and marks else []
    of_answers = [int(is_target.sum()) for is_target in targets] + [answer_bytes] * len(targets)
    if row_len is not None:
        tokens, segments, *targets = packing.pack(
            tokens, np.array(lengths, np.int64), row_len, *targets
        )
        np.save(directory / f"{name}.segments.npy", segments)
    np.save(directory / f"{name}.npy", tokens)
    for is_target in targets:
        np.save(directory / f"{name}.targets.npy", is_target)
    unpacked.unlink()
    return [n_tokens, n_bytes] + [n_chats] * bool(n_chats) + of_answers
