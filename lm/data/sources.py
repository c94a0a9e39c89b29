"""Sources of text: name and digest; documents are only read if the cache lacks their tokens."""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from lm.config.schema import SOURCES, SPLITS
from lm.data import cache, python_docs, readers, shakespeare, storage, tfds_directory
from lm.data.chats import Chat
from lm.data.markov import ORDERS, VERSION, MarkovChain
from lm.data.text_files import printable
from lm.system.errors import UserError
from lm.system.files import expanded, refuse_url, user_cache
from lm.system.text_tables import without_secrets

DEFAULT_FRACTIONS = (0.9, 0.05, 0.05)
LIMIT = 2**29  # bytes of files, except text, that are tokenized at the start of a run
LIMIT_DECODED = 2**31  # characters of text in them: files of any size but texts may decode to more


@dataclass(frozen=True)
class Source:
    """A text that was found but not read yet."""

    name: str  # shown to the user
    digest: str  # sha256 of everything that determines the text
    read: Callable[[], dict[str, list[str]]]  # returns the documents of each split
    chain: MarkovChain | None = None  # the generator of synthetic text, which knows its entropy

    @cached_property
    def documents(self) -> dict[str, list[str]]:
        """Return the documents of each split, read at first use."""
        return self.read()


def find_source(config, say: Callable[[str], None]) -> Source:
    """Find the text of config.data.source; raises Unavailable if it cannot be downloaded."""
    kind, _, argument = config.source.partition(":")
    if kind in ("hf", *readers.READERS) and argument:
        path = find_tfds(argument, config, say) if kind == "tfds" else expanded(argument)
        return find_files(kind, path, config, say)
    if config.source == "python_docs":
        return find_python_docs(config)
    if kind == "markov":
        return find_markov(config)
    problem = f'config.data.source: "{config.source}" is not one of {", ".join(SOURCES)}'
    if os.path.exists(expanded(config.source)):
        problem += f"; did you mean text:{config.source}?"
    raise UserError(problem)


def cut(documents: list[str], fractions: tuple[float, ...]) -> dict[str, list[str]]:
    """Split documents, concatenated in order, at the characters where the fractions end.

    The boundaries are floor(n (f_1 + ... + f_i)), so 0.9, 0.05, 0.05 cut Tiny Shakespeare where
    TFDS does. A fraction of 0 gives no split. A chat is not cut: it is in the split of its first
    character.

    >>> cut(["abcd", "efgh"], (0.75, 0.25, 0.0))
    {'train': ['abcd', 'ef'], 'validation': ['gh']}
    """
    n = sum(map(len, documents))
    # rounded, because 0.7 + 0.2 + 0.1 is less than 1 in floating point
    ends = [int(n * round(total, 9)) for total in itertools.accumulate(fractions)]
    cuts = zip(SPLITS, fractions, [0, *ends[:-1]], ends, strict=True)
    return {
        name: list(_slice(documents, start, end))
        for name, fraction, start, end in cuts
        if fraction > 0
    }


def _slice(documents, start, end) -> Iterator[str]:
    offset = 0
    for document in documents:
        if isinstance(document, Chat):
            piece = document if start <= offset < end else ""
        else:
            piece = document[max(0, start - offset) : max(0, end - offset)]
        if piece:
            yield piece
        offset += len(document)


# ---- Files ---------------------------------------------------------------------------------------


def find_files(kind: str, path: str | Path, config, say) -> Source:
    source = f"{kind}:{path}"
    files, spans = readers.find_spans(source, readers.TO_THE_END, config.field, say)
    if not spans:
        raise UserError(f'config.data.source: "{source}" contains no text')
    described = [storage.describe(file, user_cache(config.cache_dir)) for file in files]
    size = sum(file["size"] for file in described)
    if kind not in ("text", "tfds") and size > LIMIT:
        _refuse_size(f"{size / 2**20:,.0f} MiB", LIMIT, source, config)

    def read() -> dict[str, list[str]]:
        documents: dict[str, list[str]] = {span.split: [] for span in spans}
        limit = max(LIMIT_DECODED, size)
        length = 0
        for span in spans:
            texts = []
            for text in readers.read_documents(span, config.field):
                length += len(text)
                if length > limit:
                    size_of_text = f"more than {limit / 2**20:,.0f} MiB of text"
                    _refuse_size(size_of_text, limit, source, config)
                texts.append(text)
            if kind == "text":  # a file is one document, also if it is read in blocks
                texts = ["".join(texts)]
            elif kind != "tfds":
                texts = [text for text in texts if text]
            documents[span.split] += texts
        if config.splits is not None:
            ordered = [text for split in ("", *SPLITS) for text in documents.get(split, ())]
            if kind == "tfds" and len(ordered) == len(spans):
                ordered = ["".join(ordered)]  # one text by split, as in tiny_shakespeare
            return cut(ordered, config.splits)
        unassigned = documents.pop("", None)
        if unassigned is None:
            return documents
        fractions = (0.95, 0.05, 0.0) if "test" in documents else DEFAULT_FRACTIONS
        return cut(unassigned, fractions) | documents

    name = config.source.partition(":")[2]
    if kind != "tfds":
        name = os.path.basename(os.path.abspath(without_secrets(str(path))))
    return Source(printable(name), _digest_of(kind, path, described, spans, config), read)


def _refuse_size(size: str, limit: int, source: str, config) -> NoReturn:
    tokenizer = config.tokenizer
    if not tokenizer.startswith(("byte", "hf:", "bpe:")):  # lm.data.prepare has no others
        tokenizer = "bpe:32000"
    raise UserError(
        f'config.data.source: "{config.source}" has {size}, and at most {limit >> 20:,} MiB are '
        f"tokenized at the start of a run; python -m lm.data.prepare --input {source} --field "
        f"{config.field} --tokenizer {tokenizer} --output DIR writes tokens:DIR"
    )


def _digest_of(
    kind: str, path: str | Path, described: list[dict], spans: list[readers.Span], config
) -> str:
    """Return the sha256 of everything that determines the text."""
    digests = [file["sha256"] for file in described]
    splits = [span.split for span in spans]
    if kind == "tfds":
        left = iter(digests)
        shards = tfds_directory.check_prepared(Path(path)).items()
        by_split = {split: [next(left) for _ in files] for split, (files, _) in shards}
        # Where the splits are those of the directory, they are in the key already.
        others = [] if splits == list(by_split) else splits
        return cache.key_of(kind, by_split, config.splits, *others)
    parts = [kind, digests, config.splits or DEFAULT_FRACTIONS]
    if kind != "text":
        parts += [config.field, config.splits is None, splits]
    return cache.key_of(*parts)


def find_tfds(name: str, config, say: Callable[[str], None]) -> Path:
    """Return the prepared directory of a TFDS dataset; download tiny_shakespeare if missing."""
    given = config.data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    refuse_url(given, "config.data.data_dir or TFDS_DATA_DIR")
    root = Path(expanded(given))
    directory = tfds_directory.prepared_directory(root, name)
    if directory is None and name == "tiny_shakespeare":
        directory = shakespeare.download_and_prepare(root, say)
    if directory is None:
        raise UserError(
            f'config.data.source: "tfds:{name}" is not prepared in {root}; use '
            "--config.data.data_dir=DIR, or prepare it (needs TensorFlow): tfds build "
            f"{name} --file_format=array_record --data_dir={root}"
        )
    return directory


# ---- python_docs, markov -------------------------------------------------------------------------


def find_python_docs(config) -> Source:
    fractions = config.splits or DEFAULT_FRACTIONS
    digest = cache.key_of("python_docs", python_docs.version(), fractions)
    return Source("python_docs", digest, lambda: cut(python_docs.documents(), fractions))


def find_markov(config) -> Source:
    orders = {"markov": 1} | {f"markov:{order}": order for order in ORDERS[1:]}
    if config.source not in orders:
        raise UserError(f'config.data.source: "{config.source}" is not one of {", ".join(orders)}')
    chain = MarkovChain(orders[config.source])
    fractions = config.splits or DEFAULT_FRACTIONS
    digest = cache.key_of(config.source, VERSION, fractions)
    return Source(config.source, digest, lambda: cut([chain.text()], fractions), chain)
