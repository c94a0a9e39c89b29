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
from lm.data.chats import Chat, Encoded
from lm.data.encoding import Piece, cut, encode
from lm.data.readers import Span, read_documents
from lm.data.shards import MARKS, SPLIT_IN_FILE_NAME
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
        writer = writers[piece.split]
        if isinstance(piece.text, Chat):
            writer.n_chats += 1
            writer.n_marked += piece.text.is_marked
        writer.add(encoded, piece.ends)
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
        self.pieces: list[tuple[Encoded, bool]] = []  # of the next shard, and whether each ends
        self.n_tokens = 0
        self.n_chats = 0
        self.n_marked = 0

    def add(self, encoded: Encoded, ends: bool) -> None:
        self.pieces.append((encoded, ends))
        self.n_tokens += len(encoded.ids)
        if self.n_tokens >= SHARD:
            self.write()

    def write(self) -> None:
        if not self.pieces:
            return
        pieces, ends = zip(*self.pieces, strict=True)
        name = f"{SPLIT_IN_FILE_NAME[self.split]}_{self.i:06}"
        if self.records:
            name += f"_{len(self.records):03}"
        name += ".npy"
        size, digest = self._save(name, [piece.ids for piece in pieces])
        record = {
            "file": name,
            "split": self.split,
            "size": size,
            "documents": sum(ends),
            "tokens": self.n_tokens,
            "text_bytes": sum(piece.n_bytes for piece in pieces),
            "sha256": digest,
        }
        if self.n_chats:
            is_answer = [piece.is_answer for piece in pieces]
            record["chats"] = self.n_chats
            record["marked_chats"] = self.n_marked
            record["answer_tokens"] = int(sum(marks.sum() for marks in is_answer))
            record["answer_bytes"] = sum(piece.answer_bytes for piece in pieces)
            _, record["answers_sha256"] = self._save(name + MARKS, is_answer)
        self.records.append(record)
        self._begin()

    def _save(self, name: str, arrays: list[np.ndarray]) -> tuple[int, str]:
        """Write arrays to a file, joined, and return its bytes and its sha256."""
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate(arrays))
        content = buffer.getvalue()
        write_bytes(self.output / name, content)
        return len(content), hashlib.sha256(content).hexdigest()
