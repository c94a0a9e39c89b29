"""Tokenize one unit of a corpus into shards, in a process of its own (`shard_writer` calls it).

The options `o` are the arguments of `lm.data.prepare`.
"""

import argparse
import hashlib
import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lm.config import SPLITS
from lm.data import tokenizers
from lm.data.chats import Chat
from lm.data.encoding import Piece, cut, encode
from lm.data.readers import Span, read_documents
from lm.data.shards import SPLIT_IN_FILE_NAME
from lm.system.files import write_bytes

PIECE = 2**17  # characters encoded by one thread, and the rest of a line
SHARD = 2**24  # tokens of a shard, about; the rest of a unit goes to further shards


def spec_of_shards(o: argparse.Namespace) -> str:
    """Return config.data.tokenizer of the shards."""
    return "byte" if o.tokenizer == "byte" else f"hf:{o.output / 'tokenizer.json'}"


def documents_of(spans: list[Span], field: str) -> Iterator[str]:
    return itertools.chain.from_iterable(read_documents(span, field) for span in spans)


def hash_unit(spans: list[Span], field: str) -> np.ndarray:
    """Hash every document of a unit to 64 bits."""
    return np.fromiter(map(_hash, documents_of(spans, field)), np.uint64)


def write_unit(i: int, spans: list[Span], o: argparse.Namespace, kept: np.ndarray | None) -> dict:
    """Write the shards of unit i, and return their records and how many documents were left out.

    `kept` has whether each document is kept; None: all are. Raises UserError if the unit cannot be
    read or encoded, and OSError if a file cannot be read or written at the moment.
    """
    tokenizer = tokenizers.make(spec_of_shards(o), (), special_tokens=o.special_tokens)
    writers = {split: _Shards(o.output, split, i) for split in SPLITS}
    left_out = {"length": 0, "repeated": 0}
    for piece, encoded in encode(tokenizer, _pieces(spans, o, kept, left_out)):
        writers[piece.split].n_chats += isinstance(piece.text, Chat)
        writers[piece.split].add(encoded.ids, piece.ends, encoded.n_bytes)
    records = []
    for writer in writers.values():
        writer.write()
        records += writer.records
    return {"shards": records} | left_out


def _pieces(
    spans: list[Span], o: argparse.Namespace, kept: np.ndarray | None, left_out: dict[str, int]
) -> Iterator[Piece]:
    documents = ((span, text) for span in spans for text in read_documents(span, o.field))
    for n, (span, text) in enumerate(documents):
        if not o.min_chars <= len(text) <= (o.max_chars or len(text)):
            left_out["length"] += len(text) > 0  # an empty document has nothing to leave out
        elif kept is not None and not kept[n]:
            left_out["repeated"] += 1
        else:
            for split, part in assign(span, text, o.validation).items():
                yield from cut(Piece(split, str(span), part), PIECE)


def assign(span: Span, text: str, validation: float) -> dict[str, str]:
    """Return a document, or its parts, by split; `validation` is that split's fraction.

    A hash of its text assigns it. So the expected fraction of held-out documents does not depend on
    the spans, and copies of a document are in the same split. The document of a text span is cut
    after a line instead. The `split` of a span, if set, takes all its documents.
    """
    if span.split:
        return {span.split: text}
    if span.kind == "text":
        parts = zip(("train", "validation"), _cut_after_line(text, validation), strict=True)
        return {split: part for split, part in parts if part}
    return {"validation" if _uniform(text) < validation else "train": text}


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _uniform(text: str) -> float:
    """Hash a text to a number that is uniform in [0, 1)."""
    return (_hash(text) >> 11) * 2.0**-53


def _cut_after_line(text: str, fraction: float) -> tuple[str, str]:
    """Cut a text after a line, so that the expected size of the second part is `fraction` of it.

    The line at which the exact cut falls goes to either part, with the probabilities that make the
    expectation exact.
    """
    exact = len(text) * (1 - fraction)
    start = text.rfind("\n", 0, int(exact)) + 1
    end = text.find("\n", int(exact)) + 1 or len(text)
    place = start if _uniform(text) * (end - start) < end - exact else end
    return text[:place], text[place:]


class _Shards:
    """The tokens of one split of a unit, written shard by shard."""

    def __init__(self, output: Path, split: str, i: int):
        self.output = output
        self.split = split
        self.i = i
        self.records: list[dict] = []
        self._begin()

    def _begin(self) -> None:
        self.pieces: list[tuple[np.ndarray, bool, int]] = []  # of the next shard
        self.n_tokens = self.n_chats = 0

    def add(self, ids: np.ndarray, ends: bool, n_bytes: int) -> None:
        self.pieces.append((ids, ends, n_bytes))
        self.n_tokens += len(ids)
        if self.n_tokens >= SHARD:
            self.write()

    def write(self) -> None:
        if not self.pieces:
            return
        ids, ends, sizes = zip(*self.pieces, strict=True)
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate(ids))
        content = buffer.getvalue()
        name = f"{SPLIT_IN_FILE_NAME[self.split]}_{self.i:06}"
        if self.records:
            name += f"_{len(self.records):03}"
        name += ".npy"
        write_bytes(self.output / name, content)
        record = {
            "file": name,
            "split": self.split,
            "size": len(content),
            "documents": sum(ends),
            "tokens": self.n_tokens,
            "text_bytes": sum(sizes),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        if self.n_chats:
            record["chats"] = self.n_chats
        self.records.append(record)
        self._begin()
